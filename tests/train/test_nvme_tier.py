"""The NVMe tier of a model: what it moves and holds is what was predicted; what it refuses."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from far_cases import batch_loss, made, rank_here, tiers, train
from models import CASES
from pool import Pool

import zerofx
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import NvmeError, OptimizerError, PlanError, ShardError
from zerofx.nvme.faults import sized
from zerofx.nvme.folder import prepare
from zerofx.runtime.tiers.homes import far_bytes

EARLY = {"update": "in-backward"}
WAYS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"stage": 1}, ("nvme", "none")),
    ({}, ("nvme", "cpu")),
    ({"precision": "bf16"}, ("nvme", "nvme")),
    ({**EARLY, "bucket_bytes": 0}, ("nvme", "nvme")),
]


# -- counted --------------------------------------------------------------------------------------
def moved_and_held(folder: str, plan: dict[str, Any], places: tuple[str, str]) -> list[str]:
    """Return which lanes moved, and which files hold, other bytes than was predicted."""
    model, optimizer = made("gpt", "adamw", {**plan, **tiers(folder, *places)})
    host, store = model._engine.host, model._engine.store
    train(model, optimizer, "gpt", 0, 2)  # states are made and written for the first time
    before = {lane: (m.calls, m.nbytes) for lane, m in host.moved.items()}
    train(model, optimizer, "gpt", 2, 4)
    (program,) = model.programs
    found = []
    for lane, sent in traffic(program, store.world.rank).moved.items():
        calls, nbytes = before[lane]
        real = (host.moved[lane].calls - calls) / 2, (host.moved[lane].nbytes - nbytes) / 2
        if real != (sent.calls, sent.sent_bytes) or not sent.calls:
            found.append(f"{lane}: {real}, predicted {sent}")
    assert program.memory().to_dict()["traffic"]["nvme_read"]["bytes"] > 0
    held = {(kind, index): home.extents for (kind, index), home in store.homes.nvme._stores.items()}
    held_bytes = sum(e[store.homes.nvme._names[index]] for (_, index), e in held.items())
    predicted = far_bytes(store.layout, keeps="update" not in plan)
    padding = sum(b.numel for b in store.layout.buckets) - sum(
        p.numel for b in store.layout.buckets for p in b.params
    )
    if held_bytes != predicted or predicted - program.memory().memory.nvme_bytes > 16 * padding:
        found.append(f"files hold {held_bytes}, predicted {predicted} and {program.memory()}")
    return found


@pytest.mark.parametrize(("plan", "places"), WAYS, ids=str)
def test_bytes_moved_and_held(
    plan: dict[str, Any], places: tuple[str, str], tmp_path: Path
) -> None:
    assert not moved_and_held(str(tmp_path), plan, places)


def all_ways(folder: str) -> list[str]:
    return [text for way in WAYS[2:] for text in moved_and_held(folder, *way)]


def test_bytes_moved_and_held_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, all_ways, str(tmp_path)):
        assert not found


def test_a_copy_has_files_of_its_own(tmp_path: Path) -> None:
    model, optimizer = made("gpt", "adamw", tiers(str(tmp_path)))
    before = len(list(tmp_path.iterdir()))
    other = copy.deepcopy(model)
    assert len(list(tmp_path.iterdir())) == 2 * before > 0
    del other
    gc.collect()
    assert len(list(tmp_path.iterdir())) == before
    del model, optimizer
    gc.collect()
    assert not list(tmp_path.iterdir())


# -- copies that stay -----------------------------------------------------------------------------
STAYING: list[tuple[dict[str, Any], tuple[str, str], str]] = [
    ({}, ("nvme", "none"), "_send"),
    ({"precision": "bf16"}, ("nvme", "none"), "_send"),
    ({"stage": 1, "precision": "bf16"}, ("nvme", "none"), "_send"),
    ({**EARLY}, ("nvme", "none"), "_send"),
    ({"precision": "bf16", **EARLY}, ("nvme", "cpu"), "settle_place"),
    ({}, ("nvme", "cpu"), "settle_place"),
]


@pytest.mark.parametrize(("plan", "places", "moves"), STAYING, ids=str)
def test_copies_follow_updates_and_are_made_anew_for_writes_of_others(
    plan: dict[str, Any], places: tuple[str, str], moves: str, tmp_path: Path
) -> None:
    model, optimizer = made("gpt", "adamw", {**plan, **tiers(str(tmp_path), *places)})
    like, its_optimizer = made("gpt", "adamw", plan)
    made_anew: list[int] = []
    owner = model._engine.away if moves == "_send" else model._engine.host
    real = getattr(owner, moves)
    trained = [b.index for b in model._engine.layout.buckets if b.trainable]
    for step in range(4):
        if step == 3:  # somebody else writes; which copies it outdates is not known
            for each in (model, like):
                with torch.no_grad():
                    next(iter(each.parameters())).mul_(0.5)
        made_anew.clear()
        setattr(owner, moves, lambda *args: (made_anew.append(0), real(*args))[1])
        loss = batch_loss(model, "gpt", step)
        setattr(owner, moves, real)
        assert len(made_anew) == (0 if step in (1, 2) else len(trained))
        expected = batch_loss(like, "gpt", step)
        assert torch.equal(loss, expected)
        for each, its in ((loss, optimizer), (expected, its_optimizer)):
            each.backward()
            its.step()
            its.zero_grad()


# -- refused --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_that_step_past_the_schedule(kind: Any, tmp_path: Path) -> None:
    model, _ = made("gpt", "adamw", tiers(str(tmp_path)))
    optimizer = kind(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch_loss(model, "gpt", 0).backward()
    told = rf"{next(iter(before))} lives on NVMe, and {kind.__name__} would .* Use zerofx.optim"
    with pytest.raises(ShardError, match=told):
        optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for param in model.parameters():
        param.requires_grad_(False)
    optimizer.step()  # it has nothing to step


def test_an_optimizer_handed_over(tmp_path: Path) -> None:
    plain = CASES["gpt"].make()
    theirs = torch.optim.AdamW(plain.parameters())
    with pytest.raises(ShardError, match=r"lives on NVMe, and AdamW would .* Use zerofx\.optim"):
        zerofx.compile(plain, {**tiers(str(tmp_path))}, optimizer=theirs)
    assert type(next(plain.parameters())) is torch.nn.Parameter
    ours = zerofx.optim.AdamW(plain.parameters(), lr=0.01)
    model = zerofx.compile(plain, {**tiers(str(tmp_path)), "kernels": "aten"}, optimizer=ours)
    train(model, ours, "gpt", 0, 1)
    assert len(ours.state) == len(list(model.parameters()))


def test_frozen_parameters_do_not_mind_any_optimizer(tmp_path: Path) -> None:
    model, _ = made("adapters", "adamw", tiers(str(tmp_path), "none", "nvme"))
    train(model, torch.optim.AdamW(model.parameters()), "adapters", 0, 2)


def test_states_in_8_bits(tmp_path: Path) -> None:
    model, _ = made("gpt", "adamw", tiers(str(tmp_path)))
    optimizer = zerofx.optim.AdamW(model.parameters(), state_bits=8)
    batch_loss(model, "gpt", 0).backward()
    with pytest.raises(OptimizerError, match=r"8-bit states cannot be on NVMe. Use state_bits=32"):
        optimizer.step()


def test_a_plan_without_a_path() -> None:
    with pytest.raises(PlanError, match="tier 'nvme' needs a path"):
        zerofx.Plan(offload={"optimizer": "nvme"})
    with pytest.raises(PlanError, match="path"):
        zerofx.Plan(offload={"optimizer": "cpu", "path": "/tmp"})


def made_in(folder: Any) -> None:
    made("gpt", "adamw", tiers(str(folder)))


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NvmeError, match=r"file is a file. The NVMe tier needs a folder"):
        made_in(tmp_path / "file")
    with pytest.raises(NvmeError, match=r"neither it nor .*far exists. Create the folder"):
        made_in(tmp_path / "far" / "away")
    with pytest.raises(NvmeError, match=r"cannot make the folder /proc/new: .*[.] "):
        made_in("/proc/new")
    with pytest.raises(NvmeError, match=r"cannot write to the folder /proc: .*[.] "):
        made_in("/proc")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def with_little_space(folder: str, free: int, ranks: list[int]) -> str:
    """Make a model where `ranks` see only `free` bytes; return what this rank is told."""
    real = os.statvfs

    def little(path: Any) -> Any:
        found = real(path)
        return os.statvfs_result([*found[:4], free // found.f_frsize, *found[5:]])

    plain = CASES["gpt"].make()
    with pytest.MonkeyPatch.context() as patch:
        if rank_here() in ranks:
            patch.setattr(os, "statvfs", little)
        with pytest.raises(NvmeError) as caught:
            zerofx.compile(plain, {"kernels": "aten", **tiers(folder)})
    assert type(next(plain.parameters())) is torch.nn.Parameter
    return str(caught.value)


def test_too_little_space_is_said_before_step_0(tmp_path: Path) -> None:
    told = with_little_space(str(tmp_path), 65536, [0])
    layout = made("gpt", "adamw", {"kernels": "aten", **tiers(str(tmp_path))})[0]._engine.layout
    assert f"need {sized(far_bytes(layout, keeps=True))} (rank 0), but 64.0 KiB" in told
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_too_little_space_for_two_ranks_is_said_on_both(pool: Pool, tmp_path: Path) -> None:
    """Each alone would find room for its own half."""
    needed = sum(p.numel() for p in CASES["gpt"].make().parameters()) * 16
    told = pool.run(2, with_little_space, str(tmp_path), needed * 3 // 4, [1])
    assert told[0] == told[1] and "(ranks 0, 1)" in told[0]
    assert not list(tmp_path.iterdir())


def without_a_folder(folder: str) -> str:
    """Rank 1 has another disk, on which the folder is not."""
    mine = folder if rank_here() == 0 else f"{folder}/not/there"
    real = prepare

    def elsewhere(path: Any, *rest: Any) -> Any:
        return real(mine, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerofx.runtime.tiers.homes.prepare", elsewhere)
        with pytest.raises(NvmeError) as caught:
            made_in(folder)
    return str(caught.value)


def test_a_folder_that_one_rank_lacks(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, without_a_folder, str(tmp_path))
    assert "rank 1: " in first and second in first and "neither it nor" in second
    assert not list(tmp_path.iterdir())


def full_at_the_files(folder: str) -> str:
    """The space that was there is gone when rank 1 makes its second file."""
    real, calls = os.posix_fallocate, [0]

    def full(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2 and rank_here() == 1:
            raise OSError(28, "No space left on device")
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NvmeError) as caught:
            made_in(folder)
    return str(caught.value)


def test_a_disk_that_fills_while_files_are_made(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, full_at_the_files, str(tmp_path))
    assert "rank 1: " in first and "rank1-gradients" in second and "ENOSPC" in second
    assert not list(tmp_path.iterdir())
