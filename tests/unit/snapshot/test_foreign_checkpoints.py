"""Checkpoints of other libraries: found out, streamed into shards with their states, or refused.

tests/snapshots/deepspeed-0.19.5 was written by DeepSpeed (tests/support/foreign_checkpoints.py).
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from foreign_checkpoints import (
    SCALES,
    Layers,
    adamw,
    batch,
    build,
    in_megatron,
    later_steps,
    layers_state,
)  # fmt: skip
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerofx
from zerofx.errors import ArgumentError, SnapshotError
from zerofx.snapshot.held import HeldFiles
from zerofx.snapshot.sources.chunk_files import Boxed, Chunk
from zerofx.snapshot.sources.source import read_whole
from zerofx.tools.demo.measure import PeakMemory

transformers: Any = pytest.importorskip("transformers")

DEEPSPEED = Path(__file__).parents[2] / "snapshots" / "deepspeed-0.19.5"
MEGATRON = DEEPSPEED.with_name("megatron-core-0.16.1")
TAG = "global_step3"
ENGINE = {"lr_scheduler": None, "skipped_steps": 0, "global_steps": 3, "global_samples": 24,
          "epoch": 7}  # fmt: skip


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def compiled(stage: int = 3, scale: float = 0.5) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model with other weights than any checkpoint, and its optimizer."""
    model = zerofx.compile(build(), {"stage": stage, "kernels": "aten"})
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    return model, adamw(model)


def go_on(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the steps after the save; return the mean losses and the whole state."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for number in later_steps():
        loss = model(*batch(number, rank, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean / world)
    return torch.stack(losses), {k: v.clone() for k, v in model.state_dict().items()}


def loaded(folder: str, stage: int) -> tuple[Any, Tensor, dict[str, Tensor]]:
    model, optimizer = compiled(stage)
    extra = zerofx.load(folder, model, optimizer)
    return extra, *go_on(model, optimizer)


def check(found: tuple[Any, Tensor, dict[str, Tensor]], extra: Any, later: dict[str, Any]) -> None:
    assert found[0] == extra
    torch.testing.assert_close(found[1], later["losses"].reshape(-1), rtol=0, atol=1e-6)
    assert found[2].keys() == later["state"].keys()
    for name, value in later["state"].items():
        torch.testing.assert_close(found[2][name], value, rtol=0, atol=1e-6, msg=name)


# -- DeepSpeed -------------------------------------------------------------------------------------
CELLS = [("zero1", 3), ("zero2", 1), ("zero3", 1), ("universal1", 1), ("universal3", 3)]
OTHERS = [(folder, 4 - stage) for folder, stage in CELLS]


@pytest.mark.parametrize(("folder", "stage"), [*CELLS, *(slow(*cell) for cell in OTHERS)])
def test_training_goes_on_as_under_deepspeed(folder: str, stage: int) -> None:
    later = torch.load(DEEPSPEED / f"zero{folder[-1]}" / "later.pt")
    check(loaded(str(DEEPSPEED / folder), stage), ENGINE, later)


def loaded_each(cells: list[tuple[str, int]]) -> list[Any]:
    return [loaded(str(DEEPSPEED / folder), stage) for folder, stage in cells]


@pytest.mark.parametrize("cells", [[("zero3", 3), ("zero1", 1)], slow(CELLS), slow(OTHERS)])
def test_training_goes_on_on_two_ranks(pool: Pool, cells: list[tuple[str, int]]) -> None:
    for found in pool.run(2, loaded_each, cells):
        for (folder, _), one in zip(cells, found, strict=True):
            check(one, ENGINE, torch.load(DEEPSPEED / f"zero{folder[-1]}" / "later.pt"))


def test_weights_alone_also_from_meta_and_with_other_optimizers() -> None:
    later = torch.load(DEEPSPEED / "zero3" / "later.pt")
    model, _ = compiled()
    assert zerofx.load_weights(model, DEEPSPEED / "zero3" / TAG) == ([], [])
    loss = model(*batch(later_steps()[0]))
    torch.testing.assert_close(loss.detach(), later["losses"].reshape(-1)[0], rtol=0, atol=1e-6)
    with torch.device("meta"):
        empty = build()
    made = zerofx.compile(empty, {"kernels": "aten"}, weights=DEEPSPEED / "zero1")
    for name, value in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name
    flat = zerofx.optim.AdamW(_two_groups(made), lr=0.1)
    zerofx.load(DEEPSPEED / "universal3", made, flat)
    assert [group["lr"] for group in flat.param_groups] == [0.02, 0.02]
    assert [group["weight_decay"] for group in flat.param_groups] == [0.1, 0.0]
    check((ENGINE, *go_on(made, flat)), ENGINE, later)


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in adamw(model).param_groups]


def test_optimizers_that_do_not_fit_are_refused() -> None:
    model, _ = compiled()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for optimizer, text in (
        (sgd, "so its optimizer was not SGD"),
        (one, r"up.weight and up.bias were saved with weight_decay = 0.1 and 0.0, and are both"),
    ):
        with pytest.raises(SnapshotError, match=text) as caught:
            zerofx.load(DEEPSPEED / "zero3", model, optimizer)
        assert "DeepSpeed 0.19.5 checkpoint, ZeRO-3, 2 ranks" in str(caught.value)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ArgumentError, match="names is of type int"):
        zerofx.load_weights(model, DEEPSPEED / "zero3", names=3)  # type: ignore[arg-type]


def test_the_engine_goes_on_from_a_checkpoint_of_deepspeed() -> None:
    from zerofx.integrations import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
    }
    model = build()
    optimizer = adamw(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, plan={"kernels": "aten"}
    )
    path, client = engine.load_checkpoint(DEEPSPEED / "zero2")
    assert path == str(DEEPSPEED / "zero2" / TAG) and client == {"epoch": 7}
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 24, 0)
    loss = engine(*batch(later_steps()[0]))
    expected = torch.load(DEEPSPEED / "zero2" / "later.pt")["losses"].reshape(-1)[0]
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-6)


# -- damage ----------------------------------------------------------------------------------------
def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def _half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _swap(file: Path) -> None:
    others = [f for f in sorted(file.parent.iterdir()) if f.suffix == file.suffix and f != file]
    kept = others[0].read_bytes()
    shutil.copy(file, others[0])
    file.write_bytes(kept)


def _fill_with_text(file: Path) -> None:
    file.write_text("not what it was" * 50)


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait, after each fault, for somebody who replaces the files."""
    monkeypatch.setattr("zerofx.snapshot.sources.source._SECOND_LOOK_S", 0.0)


DAMAGES = [_truncate, _half, _swap, _fill_with_text, Path.unlink]
PIECES = {
    "zero1": f"{TAG}/*.pt",
    "zero3": f"{TAG}/*.pt",
    "universal3": f"{TAG}_universal/zero/up.weight/*.pt",
}


@pytest.mark.parametrize("folder", PIECES)
def test_a_damaged_folder_is_refused_and_nothing_is_loaded(tmp_path: Path, folder: str) -> None:
    model, optimizer = compiled()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    began, cases = time.monotonic(), 0
    for number in range(len(sorted((DEEPSPEED / folder).glob(PIECES[folder])))):
        for damage in DAMAGES:
            copy = tmp_path / f"{number}-{damage.__name__}"
            shutil.copytree(DEEPSPEED / folder, copy)
            file = sorted(copy.glob(PIECES[folder]))[number]
            damage(file)
            with pytest.raises(SnapshotError) as caught:
                zerofx.load(copy, model, optimizer)
            assert str(copy) in str(caught.value), (file.name, damage.__name__)
            cases += 1
    assert cases >= 12 and time.monotonic() - began < 30
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """Change what a file of torch.save has, under the name that it had."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_files_of_several_checkpoints_are_refused(tmp_path: Path) -> None:
    model, optimizer = compiled()
    folder = tmp_path / "zero3"
    shutil.copytree(DEEPSPEED / "zero3", folder)
    file = folder / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    rewritten(file, lambda content: content.update(global_steps=4))
    with pytest.raises(SnapshotError, match="is of step 4, and rank 0's of step 3"):
        zerofx.load(folder, model, optimizer)
    (folder / "latest").write_text("global_step9")
    with pytest.raises(SnapshotError, match="names global_step9, which is not there"):
        zerofx.load(folder, model, optimizer)
    (folder / TAG).rename(folder / "3")
    (folder / "latest").write_text("3")
    with pytest.raises(SnapshotError, match=f"{folder}/3/.* is of step 4"):
        zerofx.load(folder, model, optimizer)
    (folder / "latest").write_text("../zero1")
    with pytest.raises(SnapshotError, match="should be the name of a file in the same folder"):
        zerofx.load(folder, model, optimizer)
    sliced = tmp_path / "sliced"
    shutil.copytree(DEEPSPEED / "zero1" / TAG, sliced)
    shutil.copy(sliced / "mp_rank_00_model_states.pt", sliced / "mp_rank_01_model_states.pt")
    with pytest.raises(
        SnapshotError, match=r"only data-parallel checkpoints are read\. Convert it"
    ):
        zerofx.load(sliced, model, optimizer)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch bombed",)


class Sheep:
    def __reduce__(self) -> Any:
        return Path, ("bombed",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked module is refused; other classes are replaced by what does nothing."""
    monkeypatch.chdir(tmp_path)
    model, _ = compiled()
    weights = dict(build().state_dict())
    torch.save({"module": weights, "more": Bomb()}, "bomb.pt")
    with pytest.raises(
        SnapshotError, match=r"bomb.pt is damaged.*posix.system whose module posix is blocked"
    ):
        zerofx.load_weights(model, "bomb.pt")
    torch.save({"module": weights, "more": Sheep(), "code": print}, "sheep.pt")
    assert zerofx.load_weights(model, "sheep.pt") == ([], [])
    assert torch.equal(model.state_dict()["up.weight"], weights["up.weight"])
    with zipfile.ZipFile("zipped.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zipped/data.pkl", pickle.dumps({}))
    with pytest.raises(SnapshotError, match=r"is compressed, which torch\.save never does"):
        zerofx.load_weights(model, "zipped.pt")
    torch.save(weights, "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SnapshotError, match=r"torch before 1.6 wrote it"):
        zerofx.load_weights(model, "old.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapshotError, match="or a checkpoint of another kind"):
        zerofx.load_weights(model, tmp_path / "empty")
    assert not Path("bombed").exists()


# -- FSDP2 -----------------------------------------------------------------------------------------
def written_by_fsdp2(folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Save after three steps in two forms; return what the next steps make."""
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(model)
    for number in range(later_steps()[0]):
        model(*batch(number, dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()
    for is_flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        weights, states = get_state_dict(model, optimizer, options=options)
        saved = {"model": weights, "optim": states, "step": 3}
        if is_flat:  # as torchtitan has it
            saved = {**weights, "optimizer": states, "train_state": torch.tensor(3)}
        dcp.save(saved, checkpoint_id=f"{folder}/{'flat' if is_flat else 'nested'}")
    losses, state = go_on(model, optimizer)
    return losses, {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in state.items()}


def loaded_both(folder: str) -> list[Any]:
    return [loaded(f"{folder}/nested", 3), loaded(f"{folder}/flat", 1)]


def test_folders_of_fsdp2(pool: Pool, tmp_path: Path) -> None:
    losses, state = pool.run(2, written_by_fsdp2, str(tmp_path))[0]
    later = {"losses": losses, "state": state}
    for found in (*pool.run(2, loaded_both, str(tmp_path)), loaded_both(str(tmp_path))):
        for one in found:
            check(one, {}, later)


def save_alone(state: dict[str, Any], folder: Path) -> None:
    """Save in this process, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder))


def test_damaged_folders_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    model, optimizer = compiled()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    save_alone({"model": dict(build().state_dict())}, tmp_path / "whole")
    for number, damage in enumerate((_truncate, _half, _fill_with_text, Path.unlink)):
        for name in ("__0_0.distcp", ".metadata"):
            folder = tmp_path / f"{number}{name}"
            shutil.copytree(tmp_path / "whole", folder)
            damage(folder / name)
            with pytest.raises(SnapshotError) as caught:
                zerofx.load(folder, model, optimizer)
            assert str(folder) in str(caught.value)
    with pytest.raises(
        SnapshotError, match=r"has no states for AdamW: it has none\. Leave the opti"
    ):
        zerofx.load(tmp_path / "whole", model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert zerofx.load_weights(model, tmp_path / "whole") == ([], [])


def test_folders_as_accelerate_has_them(tmp_path: Path) -> None:
    plain = build()
    optimizer = adamw(plain)
    step(plain, optimizer, 0)
    weights, states = get_state_dict(plain, optimizer)
    save_alone({"model": weights}, tmp_path / "pytorch_model_fsdp_0")
    save_alone({"optimizer": states}, tmp_path / "optimizer_0")
    step(plain, optimizer, 1)
    model, own = compiled()
    zerofx.load(tmp_path, model, own)
    step(model, own, 1)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-6, msg=name)


class Deep(nn.Module):
    """Layers of a size that can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


LARGEST = 256 * 256 * 4  # bytes of each weight of `Deep`, which are alike
FEW = 8192  # step counts, options, what ranks agree on
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def held(model: nn.Module, num_tensors: int) -> int:
    """Return the bytes of this rank's shards, and of states of the same size."""
    return sum(num_tensors * p.to_local().nbytes for p in model.parameters())  # type: ignore


def peak_of_load(folder: str) -> tuple[int, int]:
    """Return (bytes of this rank's shards and states, of the peak) while a folder is loaded."""
    with PeakMemory(torch.device("cpu")) as memory:
        model = zerofx.compile(Deep(), {"kernels": "aten"})
        optimizer = torch.optim.AdamW(model.parameters())
        with memory.step():
            zerofx.load(folder, model, optimizer)
    return held(model, 3), memory.steps[0].high_bytes


def peak_with_fsdp2(folder: str) -> tuple[int, int]:
    model: Any = Deep()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 256)).backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    del model, optimizer, weights, states
    return peak_of_load(folder)


def write_as_deepspeed(folder: Path, stage: int, ranks: int = 2) -> None:
    """Write a checkpoint of `Deep` in the layout of DeepSpeed's files, of any number of ranks."""
    state = Deep().state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    weights = [value.flatten() for value in state.values()]
    folder.mkdir()
    for rank in range(ranks):
        if stage == 3:
            flat = torch.cat([value.chunk(ranks)[rank] for value in weights])
        else:
            flat = torch.cat(weights).chunk(ranks)[rank].clone()
        moments = {"step": 3, "exp_avg": flat * 2, "exp_avg_sq": flat.square()}
        base = {"state": {0: moments}, "param_groups": [{**OPTIONS, "params": [0]}]}
        inner = (
            {"fp32_flat_groups": [flat], "partition_count": ranks, "optimizer_state_dict": base}
            if stage == 3
            else {"single_partition_of_fp32_groups": [flat], "partition_count": [ranks],
                  "base_optimizer_state": base}
        )  # fmt: skip
        inner["zero_stage"] = stage
        whole = state if stage < 3 else {name: torch.empty(0) for name in state}
        common = {"module": dict(whole), "buffer_names": [], "param_shapes": [shapes],
                  "global_steps": 3, "ds_version": "0.19.5"}  # fmt: skip
        mp = "mp_rank_00"
        torch.save({"optimizer_state_dict": inner},
                   folder / f"zero_pp_rank_{rank}_{mp}_optim_states.pt")  # fmt: skip
        if stage == 3 or rank == 0:
            own = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(common, folder / f"{own}{mp}_model_states.pt")


def check_loaded(folder: str) -> tuple[int, int]:
    model = zerofx.compile(Deep(), {"kernels": "aten"})
    optimizer = torch.optim.AdamW(model.parameters())
    zerofx.load(folder, model, optimizer)
    torch.manual_seed(7)
    for name, value in Deep().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    return peak_of_load(folder)


def test_loads_take_the_shards_and_less_than_a_tensor(pool: Pool, tmp_path: Path) -> None:
    """Of folders of FSDP2 and DeepSpeed; the peak is counted over all tensors of a rank."""
    for shards, peak in pool.run(2, peak_with_fsdp2, str(tmp_path / "fsdp2")):
        assert peak <= shards + LARGEST + FEW, (peak, shards)
    for stage in (1, 3):
        torch.manual_seed(7)
        write_as_deepspeed(tmp_path / f"zero{stage}", stage, ranks=4)
        for shards, peak in pool.run(2, check_loaded, str(tmp_path / f"zero{stage}")):
            assert peak <= shards + LARGEST + FEW, (stage, peak, shards)


def peak_of_pretrained(folder: str) -> tuple[int, int, int]:
    """Return bytes: of this rank's shards, of the largest tensor, of the peak of a load."""
    from zerofx.integrations.transformers import from_pretrained

    with PeakMemory(torch.device("cpu")) as memory, memory.step():
        model = from_pretrained(transformers.GPT2LMHeadModel, folder, {"kernels": "aten"})
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    largest = max(value.nbytes for value in plain.values())
    return held(model, 1), largest, memory.steps[0].high_bytes


@pytest.mark.slow
def test_pretrained_models_are_loaded_by_shards(pool: Pool, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_layer=6, n_embd=128, n_head=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path, max_shard_size="1MB")
    for shards, largest, peak in pool.run(2, peak_of_pretrained, str(tmp_path)):
        assert peak <= shards + largest + FEW, (peak, shards, largest)


# -- boxes, names ----------------------------------------------------------------------------------
def test_boxes_of_any_cut_are_read_by_any_range(tmp_path: Path) -> None:
    draw = random.Random(0)
    held = HeldFiles()
    for case in range(60):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
        cuts = [sorted({0, n, draw.randint(0, n)}) for n in shape]
        path = tmp_path / f"{case}.bin"
        chunks: list[Chunk] = []
        with path.open("wb") as file:
            for corner in itertools.product(*(itertools.pairwise(c) for c in cuts)):
                part = whole.view(shape)[tuple(slice(a, b) for a, b in corner)].contiguous()
                offset = file.tell()
                torch.save(part, file)
                chunks.append(
                    Chunk(held, path, offset, file.tell() - offset,
                          tuple(a for a, _ in corner), tuple(part.shape), part.dtype)
                )  # fmt: skip
        boxed = Boxed(path, torch.float32, shape, tuple(chunks))
        assert torch.equal(read_whole(boxed), whole.view(shape))
        for _ in range(10):
            start, stop = sorted(draw.randint(0, len(whole)) for _ in range(2))
            boxed.check(start, stop)
            found = torch.full_like(whole, -1)
            for first, part in boxed.read(start, stop):
                found[first : first + len(part)] = part
            expected = torch.full_like(whole, -1)
            expected[start:stop] = whole[start:stop]
            assert torch.equal(found, expected), (shape, cuts, start, stop)
    held.close()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


def stacked(name: str) -> str | tuple[str, int] | None:
    """Say how Megatron calls what the model calls `layers.<n>.weight`."""
    if name == "scale":
        return None
    return "decoder.layers.linear.weight", int(name.split(".")[1])


def test_names_that_the_user_gives_and_stacked_layers(tmp_path: Path) -> None:
    weights, states = torch.randn(2, 3, 3), torch.rand(2, 3, 3)
    name = "decoder.layers.linear.weight"
    saved = {name: weights.bfloat16(), f"optimizer.state.fp32_param.{name}": weights}
    for key in ("exp_avg", "exp_avg_sq"):
        saved[f"optimizer.state.{key}.{name}"] = states
    save_alone(saved, tmp_path / "iter_0000007")
    torch.save(
        {"iteration": 7, "optimizer": {"param_groups": [{"lr": 0.5, "betas": (0.5, 0.5),
                                                         "step": 7, "params": [0]}]}},
        tmp_path / "iter_0000007" / "common.pt",
    )  # fmt: skip
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    model = zerofx.compile(Stack(), {"kernels": "aten"})
    layers = [layer.weight for layer in model.layers]
    optimizer = torch.optim.AdamW(layers, lr=0.1)
    with pytest.raises(SnapshotError, match=r"layers.0.weight is only in the model"):
        zerofx.load(tmp_path, model, optimizer)
    keys = zerofx.load_weights(model, tmp_path, strict=False, names=stacked)
    assert keys == (["scale"], [])
    assert all(torch.equal(p, w) for p, w in zip(layers, weights, strict=True))
    model = zerofx.compile(nn.Sequential(nn.Linear(3, 3, bias=False)), {"kernels": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extra = zerofx.load(tmp_path, model, optimizer, names={"0.weight": (name, 1)})
    assert extra == {"iteration": 7}
    state = optimizer.state[model[0].weight]
    assert torch.equal(state["exp_avg"], states[1]) and state["step"] == 7
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(SnapshotError, match=r"there is no slice 2 of float32 \[2, 3, 3\]"):
        zerofx.load_weights(model, tmp_path, names={"0.weight": (name, 2)})


def from_megatron(stage: int) -> list[str]:
    """Return what differs from what Megatron was given."""
    model: Any = zerofx.compile(Layers(), {"stage": stage, "kernels": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    extra = zerofx.load(MEGATRON, model, optimizer, names=in_megatron)
    assert extra == {"iteration": 3}
    states = zerofx.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert states["param_groups"][0]["betas"] == (0.9, 0.95)
    wrong = []
    for number, (name, value) in enumerate(model.state_dict().items()):
        held = states["state"][number]
        assert held["step"] == 3
        for key, found in {"": value, "exp_avg": held["exp_avg"],
                           "exp_avg_sq": held["exp_avg_sq"]}.items():  # fmt: skip
            if not torch.equal(found, layers_state(SCALES[key])[name]):
                wrong.append(f"{name} {key}")
    return wrong


def test_a_folder_that_megatron_wrote(pool: Pool) -> None:
    """By two tensor-parallel ranks: layers stacked and cut by rows, a matrix by columns."""
    assert from_megatron(1) == []
    assert pool.run(2, from_megatron, 3) == [[], []]


# -- adapters, and files of torch.save -------------------------------------------------------------
class Adapted(nn.Module):
    """The names that PEFT gives: one adapter, and a module that is saved whole."""

    def __init__(self, adapter: str = "default") -> None:
        super().__init__()
        self.peft_config = {adapter: None}
        self.base_model = nn.ModuleDict({
            "fc": nn.ModuleDict({
                "base_layer": nn.Linear(4, 4),
                "lora_A": nn.ModuleDict({adapter: nn.Linear(4, 2, bias=False)}),
                "lora_B": nn.ModuleDict({adapter: nn.Linear(2, 4, bias=False)}),
            }),
            "head": nn.ModuleDict({"modules_to_save": nn.ModuleDict({adapter: nn.Linear(4, 1)})}),
        })  # fmt: skip
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        fc: Any = self.base_model["fc"]
        y = fc["base_layer"](x) + fc["lora_B"][self.adapter](fc["lora_A"][self.adapter](x))
        return self.base_model["head"]["modules_to_save"][self.adapter](y)  # type: ignore[index]


def test_adapters_by_the_names_of_peft(tmp_path: Path) -> None:
    saved = {"base_model.fc.lora_A.weight": torch.randn(2, 4),
             "base_model.fc.lora_B.weight": torch.randn(4, 2),
             "base_model.head.weight": torch.randn(1, 4),
             "base_model.head.bias": torch.randn(1)}  # fmt: skip
    save_file(saved, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    model = zerofx.compile(Adapted(), {"kernels": "aten"})
    assert zerofx.load_weights(model, tmp_path) == ([], [])
    found = model.state_dict()
    assert torch.equal(
        found["base_model.fc.lora_A.default.weight"], saved["base_model.fc.lora_A.weight"]
    )
    assert torch.equal(
        found["base_model.head.modules_to_save.default.bias"], saved["base_model.head.bias"]
    )
    other = zerofx.compile(Adapted("mine"), {"kernels": "aten"})
    assert zerofx.load_weights(other, tmp_path / "adapter_model.safetensors") == ([], [])
    plain, _ = compiled()
    with pytest.raises(
        SnapshotError, match=r"is a PEFT adapter, but .*Net has none. Add the adapters"
    ):
        zerofx.load_weights(plain, tmp_path)
    del saved["base_model.fc.lora_B.weight"]
    save_file(saved, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SnapshotError, match=r"lora_B.default.weight is only in the model"):
        zerofx.load_weights(model, tmp_path)


def test_adapters_that_peft_wrote(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            target_modules=["up", "embed"], modules_to_save=["down"], r=2, init_lora_weights=False
        )
        return peft.get_peft_model(build(), config)

    source = adapted()
    source.save_pretrained(tmp_path)
    model = zerofx.compile(adapted(), {"kernels": "aten"})
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5 if param.requires_grad else 1.0)
    assert zerofx.load_weights(model, tmp_path) == ([], [])
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_files_of_torch_save_in_any_order_of_memory(tmp_path: Path) -> None:
    state = dict(build().state_dict())
    state["up.weight"] = state["up.weight"].t().contiguous().t()
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        model, _ = compiled()
        assert zerofx.load_weights(model, source) == ([], [])
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    index = {"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model, _ = compiled()
    assert zerofx.load_weights(model, tmp_path) == ([], [])


# -- and out again ---------------------------------------------------------------------------------
def given_out(folder: str) -> dict[str, Tensor]:
    """Save after a step in every form that others read; return the state after the next step."""
    model, optimizer = compiled(scale=1.0)
    step(model, optimizer, 0)
    state = zerofx.full_state_dict(model)
    states = zerofx.full_optimizer_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": states}, f"{folder}/full.pt")
    zerofx.export(f"{folder}/export", model)
    weights, held = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": held}, checkpoint_id=f"{folder}/dcp")
    zerofx.save(f"{folder}/own", model, optimizer)
    step(model, optimizer, 1)
    return dict(zerofx.full_state_dict(model, rank0_only=False))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model(*batch(number, rank, world)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_what_goes_out_is_read_by_plain_torch_and_comes_back(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, given_out, str(tmp_path))[0]
    dcp_to_torch_save(tmp_path / "own", tmp_path / "own.pt")
    saved = torch.load(tmp_path / "full.pt", weights_only=True)
    converted = torch.load(tmp_path / "own.pt")["model"]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    plain = build()
    optimizer = adamw(plain)
    plain.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for name, value in plain.state_dict().items():
        if name != "head.weight":  # tied, and there under its other name
            assert torch.equal(converted[name], value) and torch.equal(exported[name], value)
    step(plain, optimizer, 1)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
    for source in ("full.pt", "export", "dcp", "own"):
        model, _ = compiled()
        assert zerofx.load_weights(model, tmp_path / source) == ([], [])
        for name, value in saved["model"].items():
            assert torch.equal(model.state_dict()[name], value), (source, name)
    model, fresh = compiled()
    assert zerofx.load(tmp_path / "dcp", model, fresh) == {}
    step(model, fresh, 1)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


# -- transformers ----------------------------------------------------------------------------------
def made_by_transformers() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16,
                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def stepped(model: Any) -> list[float]:
    """Take two steps on the same data of both ranks; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(24).view(2, 12) % 40
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def from_transformers(folder: str, stages: tuple[int, ...]) -> list[list[float]]:
    found = []
    for stage in stages:
        torch.manual_seed(5)
        model = zerofx.compile(made_by_transformers(), {"stage": stage, "kernels": "aten"})
        zerofx.load_weights(model, folder)
        found.append(stepped(model))
    return found


@pytest.mark.slow
def test_shards_that_transformers_wrote(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = made_by_transformers()
    plain.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = stepped(plain)
    runs = [*pool.run(2, from_transformers, str(tmp_path), (3,))]
    runs.append(from_transformers(str(tmp_path), (1,)))
    for losses in itertools.chain(*runs):
        assert losses == pytest.approx(expected, abs=1e-6)
