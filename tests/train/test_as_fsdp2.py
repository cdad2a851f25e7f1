"""What FSDP2's users rely on: the same loops under zerofx.compile equal plain training.

docs/testing.md has the list of behaviours, with the tests of other files that show the rest.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

import zerofx
from zerofx.errors import ShardError

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Both:
    """A compiled model beside a plain one that is given every rank's batch in turn.

    model: the compiled one. plain: the reference, with the mean of all ranks' gradients.
    """

    def __init__(self, plain: nn.Module, fields: dict[str, Any], lr: float = 1e-2) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.plain = plain
        self.model: Any = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))
        self.pairs = [
            (m, torch.optim.Adam(m.parameters(), lr=lr)) for m in (self.model, self.plain)
        ]
        self.steps = 0

    def backward(self, loss: Callable[[Any, Any], Tensor], *batches: Any) -> None:
        """Run `loss(model, batch)` backward on this rank's batch, and the reference on all."""
        found = loss(self.model, batches[self.rank])
        found.backward()
        for rank, batch in enumerate(batches):
            wanted = loss(self.plain, batch)
            (wanted / self.world).backward()
            if rank == self.rank:
                torch.testing.assert_close(found, wanted)

    def compare(self) -> None:
        """Compare the gradients, and where there are none."""
        pairs = zip(self.model.named_parameters(), self.plain.parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                found = whole(mine.grad)
                torch.testing.assert_close(found, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)

    def step(self) -> None:
        """Step both optimizers, clear gradients in both ways by turns, compare the parameters."""
        self.compare()
        for _, optimizer in self.pairs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.steps % 2 == 0)
        self.steps += 1
        self.compare_parameters()

    def compare_parameters(self) -> None:
        state = self.model.state_dict()
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-4, msg=name)

    def batches(self, *shape: int, low: int = 0) -> list[Tensor]:
        """Draw a batch per rank, the same ones on all: floats, or numbers below `low`."""
        draw = (lambda: torch.randint(0, low, shape)) if low else (lambda: torch.randn(shape))
        return [draw() for _ in range(self.world)]


def total(model: Any, x: Any) -> Tensor:
    return model(x).square().mean()


def mlps(width: int, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Mlp(width, 1 + i % 2) for i in range(count)])


class Mlp(nn.Module):
    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # no bias: that of a key has no gradient but rounding, of which Adam makes steps
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out, self.mlp = nn.Linear(width, width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Text(nn.Module):
    """A small transformer; its head may be tied, left out of a call, and called by itself."""

    def __init__(self, tied: bool = False, again: bool = False, words: int = 19) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.embed, self.norm = nn.Embedding(words, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(2))
        self.head = nn.Linear(8, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, skip_head: bool = False) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        x = self.norm(x)
        return x if skip_head else self.head(x)


# -- training -------------------------------------------------------------------------------------


def odd_shapes(fields: dict[str, Any]) -> None:
    for wide, inner, out in ((16, 15, 8), (7, 15, 3), (16, 17, 8)):
        torch.manual_seed(0)
        both = Both(nn.Sequential(nn.Linear(wide, inner), nn.ReLU(), nn.Linear(inner, out)), fields)
        for _ in range(3):
            both.backward(total, *both.batches(4, wide))
            both.step()


def transformers(fields: dict[str, Any]) -> None:
    for tied, again in ((False, True), (True, False), (True, True)):
        both = Both(Text(tied, again), fields)
        for _ in range(3):
            both.backward(total, *both.batches(3, 6, low=19))
            both.step()


def checkpointed_layers(fields: dict[str, Any]) -> None:
    """Wrap layers for activation checkpointing, or hook them, as training libraries do."""
    wrapped, composed = Text(tied=True), Text(tied=True)
    apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Layer))
    for layer in composed.layers:
        composable_checkpoint(layer)
    for plain in (wrapped, composed):
        both = Both(plain, fields)
        both.plain = Text(tied=True)
        both.pairs[1] = both.plain, torch.optim.Adam(both.plain.parameters(), lr=1e-2)
        for _ in range(2):
            both.backward(total, *both.batches(3, 6, low=19))
            both.step()
        assert not both.model.zerofx.islands


def root_then_child(fields: dict[str, Any]) -> None:
    both = Both(mlps(8), fields)
    for part in (lambda m: m, lambda m: m[0], lambda m: m):
        both.backward(lambda m, x: total(part(m), x), *both.batches(4, 8))  # noqa: B023
        both.step()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


def used_twice_and_without_inputs(fields: dict[str, Any]) -> None:
    both = Both(Twice(), fields)
    for _ in range(3):
        both.backward(total, *both.batches(6, 4))
        both.step()
    alone = Both(Square(), fields)
    alone.backward(lambda m, _: m().sum(), *alone.batches(1))
    alone.step()


def chunked(model: Any, ids: Tensor) -> Tensor:
    """Run the body once, and the head forward and backward chunk by chunk; return what is left.

    Its backward is that of all chunks' losses, and its value their sum.
    """
    is_plain = not isinstance(model, zerofx.CompiledModule)
    scale = 1 / dist.get_world_size() if is_plain and dist.is_initialized() else 1.0
    hidden = model(ids, skip_head=True)
    grads, losses, before = [], torch.zeros(()), torch.zeros(())
    for chunk in hidden.detach().chunk(3, dim=1):
        part = chunk.contiguous().requires_grad_()
        loss = model.head(part).square().mean()
        (loss * scale).backward()
        losses = losses + loss.detach()
        grads.append(part.grad / scale)
        grad = whole(model.head.weight.grad).clone()
        assert not torch.equal(grad, before)  # each chunk adds to it
        before = grad
    surrogate = (hidden * torch.cat(grads, dim=1)).sum()
    return surrogate + (losses - surrogate.detach())


def head_by_chunks(fields: dict[str, Any]) -> None:
    for tied in (False, True):
        both = Both(Text(tied), fields)
        for _ in range(3):
            both.backward(chunked, *both.batches(2, 6, low=19))
            both.step()


def head_left_out(fields: dict[str, Any]) -> None:
    both = Both(Text(), fields)

    def twice(model: Any, ids: Tensor) -> Tensor:
        first, second = (model(part, skip_head=True) for part in ids.split(2))
        return first.square().mean() + second.sum()

    for _ in range(2):
        both.backward(twice, *both.batches(4, 6, low=19))
        assert both.model.head.weight.grad is None
        both.step()


def two_forwards(fields: dict[str, Any]) -> None:
    """Preferences are trained on two forwards of one model in one loss."""

    def preferred(model: Any, ids: Tensor) -> Tensor:
        chosen, rejected = (model(part).log_softmax(-1)[..., 0].sum(-1) for part in ids.split(2))
        return -F.logsigmoid(chosen - rejected).mean()

    both = Both(Text(again=True), fields)
    for _ in range(3):
        both.backward(preferred, *both.batches(4, 6, low=19))
        both.step()


class Raises(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.armed = inner, False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise RuntimeError("armed")
        return self.inner(x)


def after_an_exception(fields: dict[str, Any]) -> None:
    plain = Text()
    plain.layers[1] = Raises(plain.layers[1])
    both = Both(plain, fields)
    for step in range(3):
        if step < 2:  # before there is a program, and after
            both.model.layers[1].armed = True
            with pytest.raises(RuntimeError, match="armed"):
                both.model(both.batches(2, 6, low=19)[0])
            both.model.layers[1].armed = False
        both.backward(total, *both.batches(2, 6, low=19))
        both.step()


def every_row_of_a_tied_weight(fields: dict[str, Any]) -> None:
    class Tied(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(words, 16)
            self.out = nn.Linear(16, words, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), ids.flatten())

    words = 4 * (dist.get_world_size() if dist.is_initialized() else 1) + 1
    both = Both(Tied(words), fields)
    before = whole(both.model.embed.weight).detach().clone()
    for _ in range(3):
        both.backward(lambda m, ids: m(ids), *both.batches(2, 8, low=words))
        both.step()
    changed = (whole(both.model.embed.weight) != before).any(dim=1)
    assert bool(changed.all()), changed


def accumulated(fields: dict[str, Any]) -> None:
    """Sum micro-batches: all but the last without communication, and also with it."""
    plain = nn.Sequential(nn.Linear(8, 8), *mlps(8))
    both = Both(plain, fields)
    for step in range(4):
        for micro in range(3):
            if micro < 2 and step % 2 == 0:
                with both.model.no_sync():
                    both.backward(total, *both.batches(2, 8))
            else:
                both.backward(total, *both.batches(2, 8))
        both.step()


def one_forward_one_backward(fields: dict[str, Any]) -> None:
    """Run a pipeline's order: forwards go ahead of backwards, the last of which reduces."""
    both = Both(Text(), fields)
    for _ in range(2):
        inputs = [both.batches(2, 6, low=19) for _ in range(3)]
        waiting: list[tuple[Tensor, list[Tensor]]] = []
        for number in range(4):
            if number < 3:
                mine = inputs[number][both.rank]
                others = [total(both.plain, x) / both.world for x in inputs[number]]
                waiting.append((total(both.model, mine), others))
                torch.testing.assert_close(waiting[-1][0], others[both.rank] * both.world)
            if number > 0:
                loss, others = waiting.pop(0)
                if number < 3:
                    with both.model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                for other in others:
                    other.backward()
        both.step()


def methods_of_children(fields: dict[str, Any]) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(3, 8, kernel_size=4, stride=4)

        def features(self, images: Tensor) -> Tensor:
            return self.project(images).flatten(2).transpose(1, 2)

        def forward(self, images: Tensor) -> Tensor:
            return self.features(images).sum(dim=1)

    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.vision, self.project = Patches(), nn.Linear(8, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.project(self.vision.features(images))

    both = Both(Sees(), fields)
    for _ in range(2):
        both.backward(total, *both.batches(2, 3, 12, 12))
        both.step()


# -- frozen parameters ----------------------------------------------------------------------------


def frozen_within_a_unit(fields: dict[str, Any]) -> None:
    """Train the biases alone, frozen before compile or after."""

    def freeze(model: nn.Module) -> nn.Module:
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)
        return model

    early = Both(freeze(mlps(8)), fields)
    late = Both(mlps(8), fields)
    for model, _ in late.pairs:
        freeze(model)
    for both in (early, late):
        for _ in range(3):
            both.backward(total, *both.batches(4, 8))
            both.step()


def frozen_by_turns(fields: dict[str, Any]) -> None:
    """Every second layer is frozen until the last step, and a forward runs without gradients."""
    both = Both(mlps(8, 4), fields)
    for step in range(4):
        for model, _ in both.pairs:
            for layer in list(model)[::2]:
                layer.requires_grad_(step == 3)
        inputs = both.batches(4, 8)
        if step == 1:
            with torch.no_grad():
                found, wanted = (m(inputs[both.rank]) for m in (both.model, both.plain))
            torch.testing.assert_close(found, wanted)
            continue
        both.backward(total, *inputs)
        both.step()


def frozen_and_used_often(fields: dict[str, Any]) -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.fixed, self.trained = (nn.Linear(5, 5) for _ in range(3))
            self.fixed.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.fixed(self.trained(x).relu())
                with torch.no_grad():
                    x += self.trained(x).relu()
            return x

    both = Both(Often(), fields)
    for _ in range(3):
        both.backward(total, *both.batches(8, 5))
        both.step()


# -- autograd -------------------------------------------------------------------------------------


class Sides(nn.Module):
    """Two layers whose results are returned apart; the second may be left unused by forward."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.uses_second = nn.Linear(12, 12), nn.Linear(12, 12), uses_second

    def forward(self, x: Tensor) -> Any:
        return (self.a(x).relu(), self.b(x).relu()) if self.uses_second else self.a(x).relu()


def unused_outputs_and_modules(fields: dict[str, Any]) -> None:
    both = Both(Sides(uses_second=True), fields)
    for step in range(5):

        def loss(model: Any, x: Tensor, step: int = step) -> Tensor:
            first, second = model(x)
            return (first * second).sum() if step < 2 else first.sum()

        both.backward(loss, *both.batches(2, 12))
        both.step()
    both = Both(Sides(uses_second=False), fields)
    for _ in range(3):
        both.backward(total, *both.batches(2, 12))
        both.step()


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Nested:
    inner: Record
    z: Tensor


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda x: [x], lambda held: held[0]),
    "tuple": (lambda x: (x,), lambda held: held[0]),
    "namedtuple": (lambda x: Pair(x, torch.ones_like(x)), lambda held: held.x * held.y),
    "dict": (lambda x: {"x": x}, lambda held: held["x"]),
    "dataclass": (lambda x: Record(x, x.clone()), lambda held: held.x + held.y),
    "nested": (lambda x: Nested(Record(x, 2 * x), 3 * x), lambda held: held.inner.y + held.z),
}


class Wrapped(nn.Module):
    """Takes and gives values of one kind of container."""

    def __init__(self, kind: str, inner: nn.Module) -> None:
        super().__init__()
        self.kind, self.inner = kind, inner

    def forward(self, held: Any) -> Any:
        wrap, unwrap = WRAPS[self.kind]
        return wrap(self.inner(unwrap(held)))


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.parts = kind, nn.ModuleList(Wrapped(kind, Mlp(8)) for _ in range(2))

    def forward(self, x: Any, is_wrapped: bool = False) -> Any:
        held = x if is_wrapped else WRAPS[self.kind][0](x)
        for part in self.parts:
            held = part(held)
        return held if is_wrapped else WRAPS[self.kind][1](held)


def containers(fields: dict[str, Any]) -> None:
    for kind, (wrap, unwrap) in WRAPS.items():
        both = Both(Chain(kind), fields)

        def outside(model: Any, x: Tensor, wrap: Any = wrap, unwrap: Any = unwrap) -> Tensor:
            return unwrap(model(wrap(x), is_wrapped=True)).square().mean()

        for loss in (total, outside):
            both.backward(loss, *both.batches(2, 8))
            both.step()


# -- clipping -------------------------------------------------------------------------------------


def clipped(fields: dict[str, Any]) -> None:
    for kind in (2, 1, 3, float("inf")):
        both = Both(Text(), fields)
        for _ in range(2):
            both.backward(lambda m, ids: 100 * total(m, ids), *both.batches(3, 6, low=19))
            norms = [
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, kind) for m, _ in both.pairs
            ]
            assert float(norms[1]) > 0.1
            torch.testing.assert_close(whole(norms[0]), norms[1])
            clipped = [whole(p.grad) for p in both.model.parameters()]
            total_after = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(g, kind) for g in clipped]), kind
            )
            assert float(total_after) <= 0.1001
            both.step()


# -- state ----------------------------------------------------------------------------------------


def states(fields: dict[str, Any]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for width in (2, 3, 4, 5):
        torch.manual_seed(0)
        plain = nn.Sequential(Mlp(width), nn.Sequential(Mlp(width), nn.Linear(width, width)))
        model: Any = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))
        for _ in range(2):  # before there is a program, and after a forward
            kept, sharded = model.state_dict(), model.zerofx.sharded_state_dict()
            assert list(kept) == list(sharded) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert torch.equal(kept[name], value) and kept[name].device.type == "cpu"
            model(torch.randn(2, width))
        other = {name: torch.full_like(v, 7.0) for name, v in plain.state_dict().items()}
        for name, value in other.items():  # piece by piece
            found = model.load_state_dict({name: value}, strict=False)
            assert len(found.missing_keys) == len(other) - 1 and not found.unexpected_keys
        plain.load_state_dict(other)
        x = torch.randn(2, width)
        torch.testing.assert_close(model(x), plain(x))
        full = zerofx.full_state_dict(model)  # on rank 0 alone
        assert list(full) == (list(other) if rank == 0 else [])
        assert all(torch.equal(full[name], value) for name, value in other.items() if rank == 0)


def parameters_are_dtensors(fields: dict[str, Any]) -> None:
    both = Both(mlps(3), fields)

    def check() -> None:
        for mine, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
            assert isinstance(mine, nn.Parameter) and mine.shape == theirs.shape
            assert mine.is_contiguous()
            torch.testing.assert_close(whole(mine), theirs)

    for _ in range(2):
        check()
        both.model(both.batches(2, 3)[both.rank])
        check()
        both.backward(total, *both.batches(2, 3))
        check()
        both.step()


def doubles(fields: dict[str, Any]) -> None:
    """Convert before compile; after it, the refusal says so."""
    both = Both(mlps(4).double(), fields)
    for _ in range(2):
        both.backward(total, *[x.double() for x in both.batches(2, 4)])
        assert all(p.grad.dtype is p.dtype is torch.float64 for p in both.model.parameters())
        both.step()
    model = zerofx.compile(mlps(4), zerofx.Plan(**{**ATEN, **fields}))
    with pytest.raises(ShardError, match=r"Convert the model before zerofx\.compile"):
        model.to(torch.float64)


BODIES = {
    body.__name__: body
    for body in (
        *(
            odd_shapes,
            transformers,
            checkpointed_layers,
            root_then_child,
            used_twice_and_without_inputs,
        ),
        *(head_by_chunks, head_left_out, two_forwards, after_an_exception),
        *(every_row_of_a_tied_weight, accumulated, one_forward_one_backward),
        *(methods_of_children, frozen_within_a_unit, frozen_by_turns, frozen_and_used_often),
        *(unused_outputs_and_modules, containers, clipped, states, parameters_are_dtensors),
        doubles,
    )
}
PLANS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "gradients-sharded": {"stage": 2, "bucket_bytes": 1 << 20},  # parameters stay gathered
    "states-sharded": {"stage": 1},
    "replicated": {"stage": 0},
    "offloaded": {"offload": {"parameters": "cpu", "optimizer": "cpu"}},
}
QUICK = "frozen_by_turns", "accumulated"


def under(name: str, *plans: dict[str, Any]) -> None:
    for fields in plans:
        torch.manual_seed(0)
        BODIES[name](fields)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BODIES]
)
def test_on_two_ranks(pool: Pool, name: str) -> None:
    pool.run(2, under, name, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_in_one_process(name: str) -> None:
    under(name, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_under_other_plans(pool: Pool, name: str) -> None:
    """Two other plans, in turn."""
    others, place = list(PLANS.values())[1:], list(BODIES).index(name)
    pool.run(2, under, name, others[place % 4], others[(place + 1) % 4], timeout_s=300)


# -- sharded within groups, replicated across ------------------------------------------------------


def in_groups(fields: dict[str, Any]) -> None:
    """Train micro-batches on odd widths; reduce at the last of them, or at each."""
    for width in (3, 16, 17):
        for again in (False, True):
            torch.manual_seed(0)
            layers = [nn.LayerNorm(width, bias=False), *mlps(width)]
            plain = nn.Sequential(*[Again(layer) if again else layer for layer in layers])
            both = Both(plain, fields)
            for step in range(2):
                for micro in range(3):
                    if micro < 2 and step == 0:
                        with both.model.no_sync():
                            both.backward(total, *both.batches(4, width))
                    else:
                        both.backward(total, *both.batches(4, width))
                both.step()


class Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


BODIES["in_groups"] = in_groups
GROUPED: dict[str, dict[str, Any]] = {
    "device": {"shard_axis_size": 2},
    "host": {"shard_axis_size": 2, "offload": {"parameters": "cpu", "optimizer": "cpu"}},
    "all": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [*(("in_groups", plan) for plan in GROUPED), ("accumulated", "host"), ("clipped", "device"),
     ("clipped", "all"), ("states", "host"), ("odd_shapes", "device")],
)  # fmt: skip
def test_on_four_ranks(pool: Pool, name: str, plan: str) -> None:
    pool.run(4, under, name, GROUPED[plan], timeout_s=300)
