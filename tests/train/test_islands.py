"""Islands: forwards that no static graph follows train as in plain PyTorch, on many ranks too."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import ArgumentError, CaptureError, GradientError, PlanError, ShardError

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
WIDTH = 16


class Experts(nn.Module):
    """Top-1 experts as they are written by hand: one without tokens is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view(x.shape)


class Either(nn.Module):
    """One unit, of whose parameters a forward uses one half, another on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.halves[int(torch.rand(()).item() > 0.5)](x)


class Packed(nn.Module):
    """An LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([x.shape[1] - i for i in range(len(x))])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return out


class Normed(nn.Module):
    """Batch statistics behind a value that decides: all of it runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 1e9:
            return x
        return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)) * self.gain


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class Text(nn.Module):
    """A text model; `kind` says what in it no static graph follows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        special = {"experts": Experts, "packed": Packed, "either": Either}.get(kind, mlp)
        self.kind = kind
        self.embed, self.norm = nn.Embedding(40, WIDTH), nn.LayerNorm(WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(6, WIDTH))
        self.blocks = nn.ModuleList(Block(special() if i % 2 else mlp()) for i in range(4))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "reads":
            self.query = nn.Embedding(6, WIDTH)
            self.shifts = nn.ParameterList([torch.randn(WIDTH), torch.randn(6, 1)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            if self.kind != "drop" or torch.rand(()).item() > 0.4:
                x = block(x)
        if self.kind in ("tied", "reads") and x.abs().mean().item() > 100:
            x = x * 2
        if self.kind == "reads":
            x = self.read(x)
        x = self.norm(x) + self.places.mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def read(self, x: Tensor) -> Tensor:
        """Compute with parameters of modules that are not called, or are called later."""
        assert self.query.weight.shape == (6, WIDTH) and self.query.weight.requires_grad
        x = x + self.query.weight.unsqueeze(0).repeat(len(x), 1, 1)
        if torch.rand(()).item() > 0.5:  # on one rank, and not on another
            x = x + self.shifts[0]
        x = x.add(self.shifts[1]) * self.blocks[1].norm.weight.detach().mean()
        return x + F.linear(x, self.head.weight, None) @ self.head.weight + self.norm.weight * 0.1


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 40, (3, 6), generator=torch.Generator().manual_seed(9 * step + rank))


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    named = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in named.items()}


def train(kind: str, fields: dict[str, Any], steps: int = 3) -> list[str]:
    """Train beside plain PyTorch, from the same state; return the entries that became islands."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain = Text(kind)
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(steps):
        for each in range(world):
            torch.manual_seed(2 * step + each)  # ranks drop other layers
            (plain(batch(step, each), batch(step, each)) / world).backward()
        torch.manual_seed(2 * step + rank)
        model(batch(step, rank), batch(step, rank)).backward()
        found, wanted = grads_of(model), grads_of(plain)
        assert {n for n in found if found[n] is None} == {n for n in wanted if wanted[n] is None}
        for name, grad in found.items():
            if grad is not None:
                torch.testing.assert_close(grad, wanted[name], atol=1e-6, rtol=1e-5, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [str(island.entry) for island in model.zerofx.islands]


KINDS = {
    "experts": ["blocks.1", "blocks.3", ""],
    "packed": ["blocks.1", "blocks.3", ""],
    "drop": [""],
    "tied": [""],
    "either": ["blocks.1", "blocks.3", ""],
}
QUICK = "drop", "either"  # the others are slow on several ranks


@pytest.mark.parametrize("kind", KINDS)
def test_an_island_trains_as_plain_pytorch(kind: str) -> None:
    assert train(kind, {}) == KINDS[kind]


def cases(kind: str, *plans: dict[str, Any]) -> list[list[str]]:
    return [train(kind, fields) for fields in plans]


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_ranks_that_call_different_modules_meet(pool: Pool, kind: str) -> None:
    assert pool.run(2, cases, kind, {}) == [[KINDS[kind]]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_islands_under_other_plans(pool: Pool, kind: str) -> None:
    plans: list[dict[str, Any]] = [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "bucket_bytes": 2**20},
        {"persist_below": 10_000},
        {"offload": {"parameters": "cpu", "optimizer": "cpu"}},
        {"kernels": "inductor"},
    ]
    assert pool.run(2, cases, kind, *plans) == [[KINDS[kind]] * len(plans)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_islands_in_groups_of_ranks(pool: Pool, kind: str) -> None:
    by_node = {"secondary_shard_size": 2, "hierarchical_size": 2}
    plans = {"shard_axis_size": 2}, {"stage": 3}, by_node
    assert pool.run(4, cases, kind, *plans) == [[KINDS[kind]] * 3] * 4


def running_statistics() -> None:
    """Train a batch norm inside an island; its statistics are rank 0's on every rank."""
    torch.manual_seed(0)
    inner = nn.Sequential(mlp(), Block(Normed()))
    plain = copy.deepcopy(inner[1].inner.norm)
    model = zerofx.compile(inner, zerofx.Plan(**ATEN, units=["0", "1"]))
    x = torch.randn(3, 6, WIDTH)
    for step in range(2):
        model(x * (1 + step + dist.get_rank())).sum().backward()
        with torch.no_grad():
            first = zerofx.full_state_dict(model, rank0_only=False)
        assert int(first["1.inner.norm.num_batches_tracked"]) == step + 1
    held = [torch.empty_like(plain.running_var) for _ in range(dist.get_world_size())]
    dist.all_gather(held, model[1].inner.norm.running_var)
    assert torch.equal(held[0], held[1]) and not torch.equal(held[0], plain.running_var)


def test_running_statistics_follow_rank_0(pool: Pool) -> None:
    pool.run(2, running_statistics)


def test_an_island_is_said_once_and_can_be_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = zerofx.compile(Text("experts"), zerofx.Plan(**ATEN))
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            model(batch(step, 0), batch(step, 0)).backward()
    assert caplog.text.count("Text.blocks.1 runs eagerly") == 1
    assert "test_islands.py" in caplog.text and "nonzero" in caplog.text
    assert caplog.text.count("runs eagerly, too") == 2
    assert caplog.text.count("makes this an error") == 1
    islands = {str(i.entry): i for i in model.zerofx.islands}
    assert islands["blocks.1"].is_whole and 0.2 < islands["blocks.1"].share < 0.5
    assert not islands[""].is_whole and "3 islands" in repr(model.zerofx)
    refused = zerofx.compile(Text("experts"), zerofx.Plan(**ATEN, islands="refuse"))
    with pytest.raises(CaptureError, match="nonzero"):
        refused(batch(0, 0), batch(0, 0))


def test_one_call_as_an_island_leaves_others_their_program() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training and x.sum().item() > 1e9:
                return x
            return self.b(self.a(x).relu()).square().mean()

    model, x = zerofx.compile(Either(), zerofx.Plan(**ATEN)), torch.randn(2, 4)
    with torch.no_grad():
        model.eval()(x)
    model.train()(x).backward()
    trained = [p.model_name for p in model.programs if p.is_training]
    assert trained == ["Either"] and [str(i.entry) for i in model.zerofx.islands] == [""]


def test_an_island_runs_in_inference_mode() -> None:
    plain = Text("experts").eval()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**ATEN))
    with torch.inference_mode():
        found, wanted = (m(batch(0, 0), batch(0, 0)) for m in (model, plain))
    torch.testing.assert_close(found, wanted)
    assert {str(i.entry) for i in model.zerofx.islands} == set(KINDS["experts"])


def test_a_bug_in_an_island_raises_what_eager_raises() -> None:
    class Buggy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum().item() > 0:
                raise KeyError("a bug of the user's")
            return self.a(x).sum()

    model = zerofx.compile(Buggy(), zerofx.Plan(**ATEN))
    with pytest.raises(KeyError, match="a bug of the user's"):
        model(torch.ones(2, 4))
    model(-torch.ones(2, 4)).backward()
    assert model.a.weight.grad is not None


def test_a_parameter_that_an_island_writes_to_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.a = nn.Parameter(torch.ones(())), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.clamp_(x.sum().item() - 10, 10)
            return (self.a(x) * self.scale).sum()

    model = zerofx.compile(Writes(), zerofx.Plan(**ATEN))
    with pytest.raises(ShardError, match="changes its parameter scale in place"):
        model(torch.ones(2, 4))


# -- methods and submodules that are called by themselves -----------------------------------------


class Pairs(nn.Module):
    """Two encoders and a projection, as CLIP has them; the methods read `self.project`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.image = nn.Sequential(nn.Linear(6, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.project = nn.Parameter(torch.randn(WIDTH, 4))

    def encode_text(self, x: Tensor) -> Tensor:
        return self.text(x) @ self.project

    def encode_image(self, x: Tensor) -> Tensor:
        found = self.image(x) @ self.project
        return found * 2 if found.sum().item() > 1e9 else found

    def training_step(self, text: Tensor, image: Tensor) -> Tensor:
        return self(text, image)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        return self.encode_text(text).square().mean() + self.image(image).square().mean()


def methods() -> None:
    plain = Pairs()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**ATEN))
    text, image = torch.ones(3, 8), torch.ones(3, 6)
    calls = (
        lambda m: m(text, image),
        lambda m: m.training_step(text, image),
        lambda m: m.encode_text(text).square().sum(),
        lambda m: m.encode_image(image).square().sum(),
        lambda m: m.text(text).square().sum() + m.image[0](image).sum(),
    )
    for call in calls:
        losses = [call(m) for m in (model, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        found, wanted = grads_of(model), grads_of(plain)
        for name, grad in found.items():
            assert (grad is None) == (wanted[name] is None), name
            if grad is not None:
                torch.testing.assert_close(grad, wanted[name], atol=1e-5, rtol=1e-5, msg=name)
        for m in (model, plain):
            m.zero_grad()
    names = {p.model_name for p in model.programs}
    assert {"Pairs", "Pairs.encode_text", "Pairs.text", "Pairs.image.0"} <= names
    assert [str(i.entry) for i in model.zerofx.islands] == ["encode_image"]


def test_methods_and_submodules_run_as_programs() -> None:
    methods()


@pytest.mark.slow
def test_methods_and_submodules_run_as_programs_on_two_ranks(pool: Pool) -> None:
    pool.run(2, methods)


# -- zerofx.whole ----------------------------------------------------------------------------------


def whole() -> None:
    plain = Pairs()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**ATEN))
    text = torch.ones(3, 8)
    with zerofx.whole(model) as inside:
        assert type(inside) is Pairs and type(inside.project) is nn.Parameter
        assert torch.equal(inside.encode_text(text), plain.encode_text(text))
        for name, value in inside.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
    with zerofx.whole(model.text, write_back=True), torch.no_grad():
        rank = dist.get_rank() if dist.is_initialized() else 0
        model.text[0].weight.mul_(2 + rank)  # what rank 0 makes of it is kept
    with torch.no_grad():
        plain.text[0].weight.mul_(2)
    assert torch.equal(model.text(text), plain.text(text))
    for name, value in zerofx.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    with (
        pytest.raises(ShardError, match=r"image.0.weight was written to .* write_back=True"),
        zerofx.whole(model.image),
    ):
        model.image[0].weight.data.mul_(2)
    with (
        pytest.raises(ShardError, match="project got a gradient that was computed inside"),
        zerofx.whole(model),
    ):
        model.encode_text(text).sum().backward()
    assert torch.equal(model.encode_text(text), plain.encode_text(text))


def test_whole_parameters_for_eager_code() -> None:
    whole()
    with pytest.raises(ArgumentError, match="not part of a compiled model"), zerofx.whole(mlp()):
        pass


class Projects(Pairs):
    """A forward that reads a parameter of a child that it calls too, and its own, in eager code."""

    of: str = ""

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        found = self.text(text)
        if found.sum().item() < 1e9:
            module = self.get_submodule(self.of)
            with zerofx.whole(module) if hasattr(self, "zerofx_") else contextlib.nullcontext():
                norm = sum(p.square().mean() for p in module.parameters())
        return (found @ self.project).square().mean() + self.image(image).mean() + norm


def whole_in_islands() -> None:
    for of in ("", "image", "image.0"):
        plain = Projects()
        plain.of = of
        model = copy.deepcopy(plain)
        model.zerofx_ = True
        model = zerofx.compile(model, zerofx.Plan(stage=3, **ATEN))
        for inputs in (torch.ones(3, 8), torch.ones(3, 6)), (torch.ones(2, 8), torch.ones(2, 6)):
            losses = [m(*inputs) for m in (model, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
        found, wanted = grads_of(model), grads_of(plain)
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-5, msg=f"{of} {name}")


def test_whole_in_an_island_gives_gradients() -> None:
    whole_in_islands()


@pytest.mark.slow
def test_whole_in_an_island_gives_gradients_on_two_ranks(pool: Pool) -> None:
    pool.run(2, whole_in_islands)


def test_whole_parts_and_calls_around_them() -> None:
    model, plain = zerofx.compile(Pairs(), zerofx.Plan(**ATEN)), Pairs()
    text, image = torch.ones(3, 8), torch.ones(3, 6)
    with zerofx.whole(model.image), zerofx.whole(model):  # the inner one has what the outer has
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert torch.equal(model(text, image), plain(text, image))
    for _ in range(2):
        with zerofx.whole(model.image):
            assert len(dict(model.named_parameters())) == 9
            assert torch.equal(model(text, image), plain(text, image))  # its programs have shards
    with zerofx.whole(model):
        loss = model(text, image)
    with pytest.raises(ShardError, match=r"got a gradient that was computed inside zerofx\.whole"):
        loss.backward()

    class Writes(Projects):
        def forward(self, text: Tensor, image: Tensor) -> Tensor:
            with zerofx.whole(self.image, write_back=text.sum().item() < 1e9):
                return super().forward(text, image)

    with pytest.raises(ArgumentError, match="in the model's forward, which cannot change"):
        zerofx.compile(Writes(), zerofx.Plan(**ATEN))(text, image)


def test_whole_parameters_for_eager_code_on_two_ranks(pool: Pool) -> None:
    pool.run(2, whole)


# -- parameters of modules that an island does not call --------------------------------------------
def test_parameters_of_other_modules_are_read() -> None:
    assert train("reads", {}) == [""]


def test_parameters_of_other_modules_are_read_on_two_ranks(pool: Pool) -> None:
    plans: list[dict[str, Any]] = [{}, {"stage": 0}, {"stage": 1, "bucket_bytes": 2**20}]
    plans.append({"stage": 3, "offload": {"parameters": "cpu", "optimizer": "cpu"}})
    assert pool.run(2, cases, "reads", *plans) == [[[""]] * len(plans)] * 2


def test_a_parameter_of_another_module_that_is_written_to_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.book, self.out = nn.Embedding(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum().item() > -1e9:
                x = x + self.book.weight
                with torch.no_grad():
                    self.book.weight.mul_(0.5)
            return self.out(x).sum()

    model = zerofx.compile(Writes(), zerofx.Plan(**ATEN))
    with pytest.raises(ShardError, match="changes its parameter weight in place"):
        model(torch.randn(4, 4))


class Matching:
    """DETR with its loss, which solves an assignment problem and reads embeddings directly."""

    error = 2e-6

    def make(self) -> nn.Module:
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig
        from transformers.image_transforms import center_to_corners_format
        from transformers.loss import loss_for_object_detection as losses

        # transformers imports it only where Pillow is installed
        losses.center_to_corners_format = center_to_corners_format
        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage4"],
        )  # fmt: skip
        return DetrForObjectDetection(DetrConfig(
            use_timm_backbone=False, backbone_config=backbone, d_model=16, num_queries=5,
            encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0,
            num_labels=3,
        ))  # fmt: skip

    def batch(self, draws: torch.Generator) -> dict[str, Any]:
        boxes = [0.25 + torch.rand(n, 4, generator=draws) / 4 for n in (1, 3)]
        classes = [torch.randint(0, 3, (len(b),), generator=draws) for b in boxes]
        labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=draws), "labels": labels}


class Dropping:
    """A wav2vec2 that drops layers, with a CTC loss, in float64.

    Such a loss subtracts logarithms of likelihoods before it takes their exponentials: in float32
    one unit in the last place of a parameter, which another order of a sum over ranks gives,
    changes its gradients by some 2e-6 of the largest.
    """

    error = 1e-12

    def make(self) -> nn.Module:
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        return Wav2Vec2ForCTC(Wav2Vec2Config(
            vocab_size=16, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8),
            num_feat_extract_layers=2, num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2, layerdrop=0.5, hidden_dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
            final_dropout=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
        )).double()  # fmt: skip

    def batch(self, draws: torch.Generator) -> dict[str, Any]:
        labels = torch.randint(1, 16, (2, 4), generator=draws)
        values = torch.randn(2, 800, generator=draws, dtype=torch.float64)
        return {"input_values": values, "labels": labels}


def loss_of(model: nn.Module, given: dict[str, Any], seed: int) -> Tensor:
    torch.manual_seed(seed)  # drops other layers on other ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the matching turns tensors into numbers
        loss: Tensor = model(**given).loss
    return loss


def of_others(kind: type[Matching] | type[Dropping], steps: int = 2) -> float:
    """Train a model of transformers beside the plain one; return the largest relative error."""
    rank, world, case = dist.get_rank(), dist.get_world_size(), kind()
    torch.manual_seed(0)
    plain = case.make().train()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(stage=3, kernels="aten"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    for step in range(steps):
        for each in range(world):
            given = case.batch(torch.Generator().manual_seed(world * step + each))
            (loss_of(plain, given, 9 + 2 * step + each) / world).backward()
            if each == rank:
                loss_of(model, given, 9 + 2 * step + each).backward()
        found, wanted = grads_of(model), grads_of(plain)
        scale = max(float(g.abs().max()) for g in wanted.values() if g is not None)
        for name, grad in wanted.items():
            mine = found[name]
            if grad is not None or mine is not None:
                zeros = torch.zeros_like(plain.get_parameter(name))
                mine, grad = (zeros if g is None else g for g in (mine, grad))
                assert float((mine - grad).abs().max()) <= case.error * scale, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.zerofx.islands
    full = model.state_dict()
    return max(float((full[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())


@pytest.mark.parametrize("kind", [Matching, Dropping])
def test_models_of_transformers_with_islands_on_two_ranks(pool: Pool, kind: Any) -> None:
    assert max(pool.run(2, of_others, kind)) <= 5 * kind.error


# -- islands that a plan names ---------------------------------------------------------------------
NAMED = {
    "blocks.1": ["blocks.1", ""],
    "blocks.*.inner": ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""],
    "": [""],
}


@pytest.mark.parametrize("pattern", NAMED)
def test_modules_that_a_plan_names_run_eagerly(
    pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"islands": [pattern]}
    assert train("mlp", fields) == NAMED[pattern]
    assert "runs eagerly" not in caplog.text  # it was asked for
    assert train("tied", fields)[-1] == ""
    plan = zerofx.Plan(islands=[pattern])
    assert zerofx.Plan.from_yaml(plan.to_yaml()) == plan


def test_modules_that_a_plan_names_run_eagerly_on_two_ranks(pool: Pool) -> None:
    assert pool.run(2, cases, "mlp", {"islands": ["blocks.1"]}) == [[["blocks.1", ""]]] * 2
    assert (
        pool.run(2, cases, "experts", {"islands": ["blocks.0"]})
        == [[["blocks.0", "blocks.1", "blocks.3", ""]]] * 2
    )


def test_names_of_islands_that_do_not_fit_are_refused() -> None:
    model = Text("mlp")
    with pytest.raises(PlanError, match=r"no module of Text matches 'block\.1'. Its modules are"):
        zerofx.compile(model, {"islands": ["block.1"]})
    assert type(model) is Text and model.head.weight.shape == (40, WIDTH)
    with pytest.raises(PlanError, match=r"islands = 'blocks\.1': allowed are 'auto', 'refuse'"):
        zerofx.Plan(islands="blocks.1")
    with pytest.raises(PlanError, match="contradicts update = 'in-backward'"):
        zerofx.Plan(islands=["blocks.1"], update="in-backward")


# -- gradient penalties: backwards of eager modules have a backward --------------------------------
class Critic(nn.Module):
    """The discriminator of a WGAN-GP; with `fake`, the penalty, from NumPy's random numbers."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [
            layer
            for i in range(depth)
            for layer in (nn.Linear(12 if i == 0 else 8, 8), nn.LeakyReLU(0.2, inplace=True))
        ]
        self.model = nn.Sequential(*hidden, nn.Linear(8, 1))

    def forward(self, x: Tensor, fake: Tensor | None = None) -> Tensor:
        if fake is None:
            return self.model(x.flatten(1))
        alpha = torch.from_numpy(np.random.random((len(x), 1, 1))).float()
        return penalty(self, x, fake, alpha)


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, alpha: Tensor) -> Tensor:
    mix = (alpha * real + (1 - alpha) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def pictures(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(9 * step + rank)
    real, fake = torch.randn(2, 5, 3, 4, generator=source)
    return real, fake, torch.rand(5, 1, 1, generator=source)


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, alpha: Tensor) -> Tensor:
    return critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake, alpha)


def train_critic(fields: dict[str, Any]) -> None:
    """Train a WGAN-GP's discriminator beside plain PyTorch, with the same gradients."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain = Critic()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))
    # Adam would turn the rounding of biases whose gradient is zero into steps
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        for each in range(world):
            (critic_loss(plain, *pictures(step, each)) / world).backward()
        critic_loss(model, *pictures(step, rank)).backward()
        wanted = grads_of(plain)
        for name, grad in grads_of(model).items():
            torch.testing.assert_close(grad, wanted[name], atol=1e-6, rtol=1e-5, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


LAYERS = ["model.0", "model.2", "model.4"]


@pytest.mark.parametrize("names", [LAYERS, ["model.*"], ["*"]], ids=" ".join)
def test_a_gradient_penalty_over_eager_layers(names: list[str]) -> None:
    train_critic({"stage": 0, "islands": names})


def test_a_gradient_penalty_over_eager_layers_on_two_ranks(pool: Pool) -> None:
    pool.run(2, train_critic, {"stage": 3, "islands": LAYERS})


@pytest.mark.parametrize(
    ("depth", "fields", "expected"),
    [
        (2, {}, f"let the modules that have parameters run eagerly: Plan(islands={LAYERS})."),
        (9, {}, "Plan(islands=['model.*'])."),
        (2, {"update": "in-backward"}, "inside the model's forward, where it is captured."),
    ],
)
def test_a_gradient_penalty_over_a_program_says_what_works(
    depth: int, fields: dict[str, Any], expected: str
) -> None:
    model = zerofx.compile(Critic(depth), zerofx.Plan(**ATEN, **fields))
    with pytest.raises(GradientError, match="inside the model's forward") as caught:
        critic_loss(model, *pictures(0, 0))
    assert str(caught.value).endswith(expected)


def test_a_gradient_of_parameters_over_eager_layers_says_what_works() -> None:
    model = zerofx.compile(Critic(), zerofx.Plan(**ATEN, islands=["*"]))
    score = model(pictures(0, 0)[0]).sum()
    with pytest.raises(GradientError, match=r"not for parameters.* without Plan\.islands"):
        torch.autograd.grad(score, [*model.parameters()], create_graph=True)


def test_an_error_in_an_island_says_why_it_is_one() -> None:
    model = zerofx.compile(Critic(), zerofx.Plan(**ATEN))
    real, fake, _ = pictures(0, 0)
    with pytest.raises(GradientError, match=r"Plan\(islands=") as caught:
        model(real, fake)
    reason = "Critic runs eagerly here, because it cannot be captured as a static graph: forward "
    assert f"\n{reason}draws from NumPy's random generator at test_islands.py:" in str(caught.value)
    assert str(caught.value).count("runs eagerly here") == 1
    named = zerofx.compile(Critic(), zerofx.Plan(**ATEN, islands=["model"]))
    with pytest.raises(GradientError) as caught:
        named(real, fake)
    assert "runs eagerly here" not in str(caught.value)  # it was asked for


class Unrolled(nn.Module):
    """A recurrence in a loop, once for every step of time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for step in x:
            state = state * 0.5 + step.tanh() * state.cos() + self.inner(step).sin()
        return self.out(state).square().mean()


def test_a_long_loop_is_named_with_the_island_that_avoids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many operators as are named otherwise take a minute to capture."""
    module = importlib.import_module("zerofx.capture.capture")  # not the function
    monkeypatch.setattr(module, "MANY_OPERATORS", 300)
    monkeypatch.setattr(module, "MANY_OF_A_LINE", 60)
    x = torch.randn(60, 2, 4)
    with pytest.warns(UserWarning, match="captured iteration by iteration") as found:
        zerofx.capture(Unrolled(), (x,))
    (said,) = [str(w.message) for w in found if "iteration" in str(w.message)]
    assert "test_islands.py:" in said and "Plan(islands=[''])" in said
    plain = Unrolled()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**ATEN, islands=[""]))
    model(x).backward()
    plain(x).backward()
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad, grads_of(plain)[name], atol=1e-6, rtol=1e-5, msg=name)
    assert [str(island.entry) for island in model.zerofx.islands] == [""]
    assert [p.model_name for p in model.programs]  # of the layers that it calls


# -- parts of other compiled models ----------------------------------------------------------------


class Distilled(nn.Module):
    """A student that calls a teacher which is no submodule of it."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = (teacher,)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher[0](x)
        return (self.student(x) - wanted).pow(2).mean()


def distilled() -> str:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.randn(4, WIDTH)
    wanted = Distilled(copy.deepcopy(teacher))(x)
    ours: Any = zerofx.compile(teacher, zerofx.Plan(stage=3, **ATEN))
    model: Any = zerofx.compile(Distilled(ours), zerofx.Plan(stage=3, **ATEN))
    for _ in range(2):
        found = model(x)
        torch.testing.assert_close(found, wanted)
        found.backward()
    assert not ours.zerofx.islands, "the teacher's own programs run"
    return str(model.zerofx.islands[0])


@pytest.mark.parametrize("size", [1, 2])
def test_a_compiled_teacher_may_be_called_in_another_models_forward(pool: Pool, size: int) -> None:
    for said in pool.run(size, distilled):
        assert "forward calls Sequential at test_islands.py:" in said


class Closed(nn.Module):
    """A block whose function is a lambda over its layers, as in minGPT."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        last = self.blocks[1]
        self.f = lambda x: F.linear(x, last.weight) if reads else last(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.blocks[0](x)).pow(2).mean()


def closed(reads: bool) -> str:
    torch.manual_seed(0)
    model: Any = zerofx.compile(Closed(reads), zerofx.Plan(stage=3, **ATEN))
    x = torch.randn(4, WIDTH)
    average = copy.deepcopy(model)
    with pytest.raises(CaptureError) as caught:
        average(x)
    assert model(x).isfinite() and not model.zerofx.islands  # the original is as it was
    new: Any = zerofx.compile(Closed(reads), zerofx.Plan(stage=3, **ATEN))
    new.load_state_dict(model.state_dict())  # as the error advises
    torch.testing.assert_close(new(x), model(x))
    return str(caught.value)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_copy_that_reaches_its_original_is_refused(pool: Pool, size: int, reads: bool) -> None:
    does = "reads blocks.1.weight" if reads else "calls Closed.blocks.1"
    for said in pool.run(size, closed, reads):
        assert "Closed.f (test_islands.py:" in said
        assert f"{does} of the Closed that this one is a copy of" in said


# -- values that are read between steps ------------------------------------------------------------


def guarded() -> None:
    model: Any = zerofx.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH)), zerofx.Plan(**ATEN))
    with zerofx.whole(model):
        assert model.zerofx.world.rank == dist.get_rank()
        assert type(model) is nn.Sequential
    assert "zerofx" not in vars(model)


def test_a_model_tells_its_rank_while_it_is_whole(pool: Pool) -> None:
    pool.run(2, guarded)


def trained(stage: int) -> tuple[Any, nn.Module]:
    """Return a compiled model and the plain one, with gradients of the same batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain[1].bias.requires_grad_(False)
    model: Any = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(stage=stage, **ATEN))
    x = torch.randn(4, WIDTH)
    plain(x).pow(2).mean().backward()
    model(x).pow(2).mean().backward()
    return model, plain


def logged(stage: int) -> None:
    model, plain = trained(stage)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    for ours, theirs in pairs:
        torch.testing.assert_close(zerofx.full_tensor(ours), theirs.detach())
        assert not zerofx.full_tensor(ours).requires_grad
        if theirs.grad is not None:
            found = zerofx.full_tensor(ours.grad)
            torch.testing.assert_close(found, theirs.grad)
            found.zero_()  # a copy
            assert zerofx.full_tensor(ours.grad).count_nonzero()
    with pytest.raises(ArgumentError, match="was given a NoneType"):
        zerofx.full_tensor(pairs[-1][0].grad)


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 0), (2, 3)])
def test_values_are_read_alike_on_one_rank_and_on_many(pool: Pool, size: int, stage: int) -> None:
    pool.run(size, logged, stage)


def with_gradients(stage: int) -> None:
    model, plain = trained(stage)
    with zerofx.whole(model):
        assert model[0].weight.grad is None
    with zerofx.whole(model, gradients=True):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(ours) is nn.Parameter
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                np.testing.assert_allclose(np.asarray(ours.grad), theirs.grad.numpy(), 1e-4, 1e-6)
        with (
            pytest.raises(ArgumentError, match="Give gradients=True to the outer"),
            zerofx.whole(model[0], gradients=True),
        ):
            pass
    for is_dropped in (False, True):
        with (
            pytest.raises(ShardError, match=r"0\.weight: p\.grad was changed inside zerofx\.whole"),
            zerofx.whole(model[0], gradients=True) as layer,
        ):
            if is_dropped:
                layer.weight.grad = None
            else:
                layer.weight.grad.zero_()
    with (
        pytest.raises(ShardError, match="got a gradient that was computed inside"),
        zerofx.whole(model, gradients=True),
    ):
        model(torch.ones(4, WIDTH)).sum().backward()
    torch.testing.assert_close(zerofx.full_tensor(model[0].weight.grad), plain[0].weight.grad)


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 0), (2, 3)])
def test_gradients_can_be_whole_inside_a_block(pool: Pool, size: int, stage: int) -> None:
    pool.run(size, with_gradients, stage)
