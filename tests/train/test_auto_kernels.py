"""Plan(kernels="auto"): ATen until compiled regions are there, then these, from one call on."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.runtime.regions import background, contest, foreman
from zerofx.runtime.regions.swap import Swap

CPU: dict[str, Any] = {"device": "cpu"}


class Blocks(nn.Module):
    """Two equal blocks and a head, with buffers that forward updates."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).square().mean()


def net() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def batch(seed: int, rank: int = 0) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * seed + rank))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by name, as copies."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name] = grad.detach().clone()
    return found


@contextlib.contextmanager
def compiled_at(call: int) -> Iterator[None]:
    """Have the compiled regions of every program there from its own call of this number on."""
    real, asked = Swap.exists, dict[int, int]()

    def exists(self: Swap) -> bool:
        asked[id(self)] = asked.get(id(self), 0) + 1
        return asked[id(self)] >= call and real(self)

    Swap.exists = exists  # type: ignore[method-assign]
    try:
        yield
    finally:
        Swap.exists = real  # type: ignore[method-assign]


def trained(model: nn.Module, steps: int, rank: int = 0, first: int = 0) -> list[Any]:
    """Train some steps; return the loss and the gradients of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(first, first + steps):
        loss = model(batch(step, rank))
        loss.backward()
        found.append((loss.detach().clone(), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_equal(found: list[Any], wanted: list[Any], is_exact: bool) -> None:
    compare: Callable[..., None] = torch.testing.assert_close
    exact = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 2e-4, "atol": 2e-6}
    for (loss, grads), (wanted_loss, wanted_grads) in zip(found, wanted, strict=True):
        compare(loss, wanted_loss, **exact)
        for name, grad in wanted_grads.items():
            compare(grads[name].view(grad.shape), grad, **exact, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(autouse=True)
def _whole_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All regions run compiled after a swap; tests of the contest set another number of rounds."""
    monkeypatch.setattr(contest, "ROUNDS", 0)


@pytest.fixture(scope="module")
def _warm() -> None:
    """The regions of `net` are in this user's cache, as the other tests leave theirs."""
    model = zerofx.compile(net(), {"kernels": "inductor"}, **CPU)
    model(batch(0)).backward()
    with torch.no_grad():
        model(batch(0))


def forms(model: Any) -> list[tuple[str, int]]:
    return [(running.form, running.since) for running in model.zerofx.kernels]


def is_compiled(model: Any) -> bool:
    return [form for form, _ in forms(model)] == ["inductor"]


# -- one process ----------------------------------------------------------------------------------
@pytest.mark.usefixtures("_warm")
def test_a_warm_cache_has_no_aten_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_COMPILERS", [])
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    inductor = zerofx.compile(net(), {"kernels": "inductor"}, **CPU)
    assert_equal(trained(model, 2), trained(inductor, 2), is_exact=True)
    assert forms(model) == forms(inductor) == [("inductor", 1)]
    assert background.compilers().process_id is None
    assert str(model.zerofx.kernels[0]) == "Blocks (training): inductor since call 1"


def test_later_programs_of_a_kind_are_numbered() -> None:
    model = zerofx.compile(net(), {"kernels": "aten", "dynamic": "off"}, **CPU)
    for rows in (6, 4, 6, 2):
        model(batch(0)[:rows])
    with torch.no_grad():
        model(batch(0))
    kinds = ("training", "training, program 2", "training, program 3", "inference")
    assert [running.program for running in model.zerofx.kernels] == [f"Blocks ({k})" for k in kinds]


@pytest.mark.usefixtures("_warm")
def test_before_and_after_the_swap() -> None:
    """Up to the swap it is ATen to the bit, after it what Inductor makes of the same state."""
    with compiled_at(3):
        model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
        before = trained(model, 2)
        assert [running.form for running in model.zerofx.kernels] == ["aten"]
        state = copy.deepcopy(zerofx.full_state_dict(model))
        after = trained(model, 2, first=2)
    assert forms(model) == [("inductor", 3)]
    aten = zerofx.compile(net(), {"kernels": "aten"}, **CPU)
    assert_equal(before, trained(aten, 2), is_exact=True)
    plain = net()
    plain.load_state_dict(state)
    inductor = zerofx.compile(plain, {"kernels": "inductor"}, **CPU)
    assert_equal(after, trained(inductor, 2, first=2), is_exact=True)
    assert_equal(before + after, trained(net(), 4), is_exact=False)


@pytest.mark.usefixtures("_warm")
def test_calls_go_on_to_backward_as_they_began() -> None:
    """Forwards that are alive across the swap have ATen backwards, those after it compiled ones."""
    plans = {"differentiate": "all", "buffers": "local"}

    def alive(kernels: str, order: tuple[int, ...]) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = zerofx.compile(Blocks().eval(), {"kernels": kernels} | plans, **CPU)
        losses = [model(batch(i)) for i in range(3)]
        found: list[dict[str, Tensor]] = [{}] * 3
        for i in order:
            model.zero_grad()
            losses[i].backward()
            found[i] = gradients(model)
        return found

    aten, inductor = alive("aten", (0, 1, 2)), alive("inductor", (0, 1, 2))
    with compiled_at(3):
        mixed = alive("auto", (2, 0, 1))
    for found, wanted in zip(mixed, [*aten[:2], inductor[2]], strict=True):
        for name, grad in wanted.items():
            assert torch.equal(found[name], grad), name


@pytest.mark.usefixtures("_warm")
def test_copies_and_further_programs() -> None:
    """A deep copy begins for itself; evaluation and a smaller batch have their own swaps."""
    with compiled_at(2):
        model = zerofx.compile(net(), {"kernels": "auto", "dynamic": "off"}, **CPU)
        model(batch(0)).backward()
        model(batch(1)).backward()
        other = copy.deepcopy(model)
        other(batch(2)).backward()
        assert forms(model) == [("inductor", 2)]
        assert forms(other) == [("aten", 1)]
        with torch.no_grad():
            model(batch(0))
        assert [form for form, _ in forms(model)] == ["inductor", "aten"]
        other(batch(2)).backward()
        assert forms(other) == [("inductor", 2)]


@pytest.mark.slow
def test_sizes_that_vary() -> None:
    """The program for many sizes begins on ATen too, and swaps by itself."""
    sizes = (6, 5, 4, 3, 6, 5)
    found: dict[str, list[Any]] = {}
    for kernels in ("plain", "inductor", "auto"):
        with compiled_at(2):
            model = net() if kernels == "plain" else zerofx.compile(net(), {"kernels": kernels})
            found[kernels] = []
            for step, size in enumerate(sizes):
                model.zero_grad()
                loss = model(batch(step)[:size])
                loss.backward()
                found[kernels].append((loss.detach(), gradients(model)))
        if kernels == "auto":
            assert forms(model) == [("inductor", 2)]
            assert len(model.zerofx.programs[0].sizes.symbols) == 1
            assert_equal(found["auto"][-3:], found["inductor"][-3:], is_exact=True)
    assert_equal(found["auto"], found["plain"], is_exact=False)


@pytest.mark.usefixtures("cold")
def test_what_no_call_needs_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for many sizes takes the place of those for one: their regions are left out."""
    own = background.Compilers()
    monkeypatch.setattr(own, "_start", lambda: setattr(own, "_process", "that never begins"))
    monkeypatch.setattr(background, "_COMPILERS", [own])
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    asked: list[dict[str, Any]] = []
    for size in (6, 5):
        model(batch(0)[:size]).backward()
        while not own._orders.empty():
            asked.append(json.loads(own._orders.get()))
    own._process = None
    begun = [order["id"] for order in asked if not order.get("drop")]
    dropped = [order["id"] for order in asked if order.get("drop")]
    wanted = [name for name in begun if name not in dropped]
    assert dropped == begun[: len(dropped)] and len(wanted) == len(dropped) > 0
    assert [str(path) for path, job in own._jobs.items() if not job.end] == wanted
    for job in own._jobs.values():  # their lines of progress end
        for waits in list(job.batches):
            own.drop(waits)
    # The foreman itself would take this process's standard output.
    waiting = foreman.Foreman.__new__(foreman.Foreman)
    waiting._waiting, waiting._text = deque(), b""
    lines = iter(["".join(json.dumps(order) + "\n" for order in asked).encode(), b""])
    monkeypatch.setattr(foreman.os, "read", lambda *_: next(lines))
    waiting._take_orders()
    assert [job["id"] for job in waiting._waiting] == wanted


@pytest.mark.usefixtures("_warm")
def test_a_recording_keeps_the_form_that_it_began_with() -> None:
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    with compiled_at(2):
        model(batch(0)).backward()
        with zerofx.record(model):
            for step in range(3):
                model(batch(step)).backward()
        assert forms(model) == [("aten", 1)]
    model(batch(0)).backward()
    assert forms(model) == [("inductor", 5)]


def test_plans_that_need_compiled_regions_first_wait() -> None:
    """A budget is met with what compiled regions allocate."""
    model = zerofx.compile(net(), {"kernels": "auto", "memory_budget": "1GiB"}, **CPU)
    model(batch(0)).backward()
    assert forms(model) == [("inductor", 1)]
    assert model.programs[0].memory(basis="compiled").peak_bytes <= 1 << 30
    slow = zerofx.compile(net(), {"kernels": "auto", "debug": True}, **CPU)
    slow(batch(0)).backward()
    assert forms(slow) == [("aten", 1)]


# -- several ranks --------------------------------------------------------------------------------
def swap_together(plan: dict[str, Any], steps: int) -> tuple[list[Any], list[tuple[str, int]]]:
    """Train where the regions of rank 1 are there two calls after rank 0's."""
    rank, contest.ROUNDS = int(os.environ["RANK"]), 0
    with compiled_at(2 + 2 * rank):
        model = zerofx.compile(net(), {"kernels": "auto", "buffers": "rank0"} | plan, **CPU)
        return trained(model, steps, rank), forms(model)


def of_one_process(world: int, steps: int) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Return what plain PyTorch finds in one process: each rank's losses, and mean gradients."""
    plain, found = net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(steps):
        buffers = {n: b.clone() for n, b in plain.named_buffers()}
        losses = []
        for rank in reversed(range(world)):  # rank 0 last: the buffers are its own
            for name, buffer in plain.named_buffers():
                buffer.data.copy_(buffers[name])
            losses.insert(0, plain(batch(step, rank)))
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        found.append(([loss.detach() for loss in losses], gradients(plain)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_swap_at_the_same_call(pool: Pool, stage: int) -> None:
    found = pool.run(2, swap_together, {"stage": stage}, 6, timeout_s=200.0)
    wanted = of_one_process(2, 6)
    for rank, (steps, said) in enumerate(found):
        assert said == [("inductor", 4)]
        for (loss, grads), (losses, means) in zip(steps, wanted, strict=True):
            torch.testing.assert_close(loss, losses[rank], rtol=2e-4, atol=2e-6)
            for name, mean in means.items():
                torch.testing.assert_close(grads[name], mean, rtol=2e-4, atol=2e-6)


class Either(nn.Module):
    """An island: which half it calls is decided by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        half = self.halves[0] if x.sum().item() > 0 else self.halves[1]
        return half(x).square().mean()


def swap_in_an_island(signs: list[int]) -> tuple[list[Any], list[list[Any]]]:
    """Train where ranks call different programs; return each forward's forms."""
    rank = int(os.environ["RANK"])
    x = torch.full((4, 16), 0.5) * signs[rank]
    for kernels in ("inductor", "auto"):  # the first one warms the cache
        torch.manual_seed(0)
        with compiled_at(2 + rank):
            model = zerofx.compile(Either(), {"kernels": kernels}, **CPU)
            found, said = [], []
            for _ in range(4):
                model.zero_grad()
                model(x).backward()
                found.append(gradients(model))
                said.append(forms(model))
    return found, said


def test_ranks_in_an_island_swap_at_the_end_of_one_forward(pool: Pool) -> None:
    found = pool.run(2, swap_in_an_island, [1, -1], timeout_s=200.0)
    torch.manual_seed(0)
    plain = Either()
    sum(plain(torch.full((4, 16), 0.5) * sign) for sign in (1, -1)).backward()  # type: ignore
    for steps, said in found:
        assert [form for ((form, _),) in said] == ["aten", "aten", "inductor", "inductor"]
        assert said[-1] == [("inductor", 4)]
        for grads in steps:
            for name, grad in gradients(plain).items():
                torch.testing.assert_close(grads[name], grad / 2, rtol=2e-4, atol=2e-6)


# -- the faster form of each region ---------------------------------------------------------------
def contested(
    folder: str, winners: list[str], plan: dict[str, Any], steps: int = 24
) -> tuple[list[Any], Any]:
    """Train with an own cache; `winners` says which form is the faster one on each rank."""
    rank = int(os.environ.get("RANK", "0"))
    before = os.environ.get("ZEROFX_CACHE_DIR")
    os.environ["ZEROFX_CACHE_DIR"] = folder
    wins = contest._ATEN if winners[rank] == "aten" else contest._COMPILED
    contest.ROUNDS, real = 2, contest.Both._choose

    def choose(both: contest.Both) -> None:
        both._least_s[wins] = 0.0
        real(both)

    contest.Both._choose = choose  # type: ignore[method-assign]
    try:
        zerofx.compile(net(), {"kernels": "inductor"} | plan, **CPU)(batch(0)).backward()
        with compiled_at(2 + rank):
            model = zerofx.compile(net(), {"kernels": "auto", "buffers": "rank0"} | plan, **CPU)
            found = trained(model, steps, rank)
        return found, model.zerofx.kernels
    finally:
        contest.Both._choose, contest.ROUNDS = real, 6  # type: ignore[method-assign]
        os.environ.pop("ZEROFX_CACHE_DIR")
        if before is not None:
            os.environ["ZEROFX_CACHE_DIR"] = before


@pytest.mark.parametrize("winner", ["aten", "compiled"])
def test_the_faster_form_stays_and_is_remembered(tmp_path: Path, winner: str) -> None:
    found, (running,) = contested(str(tmp_path), [winner], {})
    assert (running.form, running.since, running.state) == ("inductor", 2, "")
    assert bool(running.on_aten) == (winner == "aten")
    assert ("but ATen where that is faster" in str(running)) == (winner == "aten")
    assert_equal(found, trained(net(), 24), is_exact=False)
    other = {"aten": "compiled", "compiled": "aten"}[winner]
    again, (running,) = contested(str(tmp_path), [other], {})  # nothing is measured again
    assert bool(running.on_aten) == (winner == "aten")
    if winner == "aten":
        aten = zerofx.compile(net(), {"kernels": "aten"}, **CPU)
        assert_equal(again, trained(aten, 24), is_exact=True)


def test_each_rank_keeps_its_own_faster_forms(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, contested, str(tmp_path), ["aten", "compiled"], {}, timeout_s=200.0)
    wanted = of_one_process(2, 24)
    for rank, (steps, (running,)) in enumerate(found):
        assert (running.since, running.state) == (3, "")
        assert bool(running.on_aten) == (rank == 0)
        for (loss, grads), (losses, means) in zip(steps, wanted, strict=True):
            torch.testing.assert_close(loss, losses[rank], rtol=2e-4, atol=2e-5)
            for name, mean in means.items():
                torch.testing.assert_close(grads[name], mean, rtol=2e-4, atol=2e-5)


def sizes_that_differ(folder: str) -> list[Any]:
    """Call with batches of other sizes on each rank, from a warm cache on."""
    rank = int(os.environ["RANK"])
    os.environ["ZEROFX_CACHE_DIR"], contest.ROUNDS = folder, 2
    try:
        model = zerofx.compile(net(), {"kernels": "auto", "dynamic": "off"}, **CPU)
        for step in range(20):
            rows = 6 - rank if step % 5 > 2 else 6
            model(batch(step, rank)[:rows]).backward()
        return forms(model)
    finally:
        os.environ.pop("ZEROFX_CACHE_DIR")
        contest.ROUNDS = 6


@pytest.mark.slow
def test_ranks_may_call_different_programs_meanwhile(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):  # with a cold cache, and with a warm one
        found = pool.run(2, sizes_that_differ, str(tmp_path), timeout_s=300.0)
        assert [len(each) for each in found] == [1, 2]


def layers_over_ranks(folder: str) -> Any:
    os.environ["ZEROFX_CACHE_DIR"], contest.ROUNDS = folder, 2
    try:
        plan = {"kernels": "auto", "parallel": {"tensor": 2}}
        model = zerofx.compile(net(), plan, **CPU)
        with compiled_at(1):
            model(batch(0)).backward()
        (table,) = [bound.executable for bound in model.zerofx.table.bound.values()]
        return table.contested
    finally:
        os.environ.pop("ZEROFX_CACHE_DIR")
        contest.ROUNDS = 6


@pytest.mark.slow
def test_ranks_that_compute_the_same_compare_nothing(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, layers_over_ranks, str(tmp_path), timeout_s=200.0) == [{}, {}]


class Deep(nn.Module):
    """Four equal layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def kernels_of_a_pipeline() -> list[tuple[str, int]]:
    parallel = {"pipeline": 2, "micro_batches": 2}
    model = zerofx.compile(Deep(), {"kernels": "auto", "parallel": parallel}, **CPU)
    model(batch(0)).backward()
    return forms(model)


@pytest.mark.slow
def test_stages_of_a_pipeline_wait_for_their_kernels(pool: Pool) -> None:
    assert pool.run(2, kernels_of_a_pipeline, timeout_s=200.0) == [[("inductor", 1)]] * 2


# -- real compilers -------------------------------------------------------------------------------
TROUBLE = """
import os, signal, sys, json; sys.path[:] = json.loads(sys.argv.pop())
from zerofx.runtime.regions import cache, foreman
real = cache._compile
def compile_with_trouble(name, *rest):
    if "backward" in name:
        {trouble}
    return real(name, *rest)
cache._compile = compile_with_trouble
foreman.main(*sys.argv[1:])
"""


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of regions, and compilers of this test's own at normal priority."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(background, "NICENESS", 0)
    monkeypatch.setattr(background, "_COMPILERS", [])
    yield tmp_path / "regions"
    background.compilers().close()


def until(model: Any, is_so: Callable[[], bool], limit_s: float = 240.0) -> int:
    """Train until something holds; return the number of calls."""
    deadline = time.monotonic() + limit_s
    calls = 0
    while not is_so():
        assert time.monotonic() < deadline, model.zerofx.kernels
        model(batch(calls)).backward()
        calls += 1
        time.sleep(0.02)
    return calls


@pytest.mark.slow
def test_a_cold_start(cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    before = trained(model, 1)
    assert time.monotonic() - began < 60
    assert [running.form for running in model.zerofx.kernels] == ["aten"]
    assert "regions compiled" in str(model.zerofx.kernels[0])
    calls = 1 + until(model, lambda: is_compiled(model))
    assert forms(model) == [("inductor", calls)]
    assert_equal(before, trained(net(), 1), is_exact=False)
    said = capsys.readouterr().err
    assert "zerofx: compiling Blocks (training): " in said
    assert "steps run on ATen until all are compiled" in said
    assert "zerofx: compiled Blocks (training): " in said
    again = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    again(batch(0)).backward()
    assert forms(again) == [("inductor", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGKILL)", "was ended by signal 9"),
    ],
    ids=["worker", "foreman"],
)
def test_a_killed_compiler_leaves_aten(
    cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    trouble: str, reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(background, "_START", TROUBLE.format(trouble=trouble))
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    until(model, lambda: "goes on with ATen" in caplog.text)
    until(model, lambda: "(given up)" in str(model.zerofx.kernels[0]))
    steps = trained(zerofx.compile(net(), {"kernels": "aten"}, **CPU), 1)
    assert_equal(steps, trained(net(), 1), is_exact=False)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (warning,) = [text for text in warnings if "goes on with ATen" in text]
    assert reason in warning
    assert "backward" in warning
    assert forms(model) == [("aten", 1)]
    assert not [p.name for p in cold.iterdir() if p.name.startswith(".") or ".bin." in p.name]


@pytest.mark.slow
def test_a_region_that_inductor_refuses(
    cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are compiled, and this one runs as ATen, with the warning of "inductor"."""
    refuses = "cache._refusal = lambda hints: 'not today'"
    monkeypatch.setattr(background, "_START", TROUBLE.format(trouble=refuses))
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    until(model, lambda: is_compiled(model))
    assert "Inductor cannot compile" in caplog.text
    assert "not today" in caplog.text
    model.zero_grad()
    plain = net()
    plain.load_state_dict(zerofx.full_state_dict(model))
    assert_equal(trained(model, 2), trained(plain, 2), is_exact=False)


@pytest.mark.slow
def test_an_operator_of_the_users(cold: Path) -> None:
    """Another process does not have it: its regions are compiled here, at the swap."""

    @torch.library.custom_op("zerofx_auto_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return twice(self.fc(x)).tanh().square().mean()

    torch.manual_seed(0)
    plain = Twice()
    model = zerofx.compile(copy.deepcopy(plain), {"kernels": "auto"}, **CPU)
    until(model, lambda: is_compiled(model))
    model.zero_grad()
    assert_equal(trained(model, 2), trained(plain, 2), is_exact=False)


def train_cold(folder: str) -> tuple[list[Any], list[tuple[str, int]], int]:
    """Train with an empty cache until the swap and beyond; return what was compiled here."""
    from zerofx.runtime.regions.cache import CompileCount

    os.environ["ZEROFX_CACHE_DIR"] = folder
    background.NICENESS = contest.ROUNDS = 0
    rank, found, before = int(os.environ["RANK"]), [], CompileCount.compiled
    model = zerofx.compile(net(), {"kernels": "auto"}, **CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    deadline = time.monotonic() + 400
    while len(found) < 2 or forms(model)[0][1] > len(found) - 2 or forms(model)[0][0] == "aten":
        assert time.monotonic() < deadline, model.zerofx.kernels
        loss = model(batch(len(found), rank))
        loss.backward()
        found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        # All ranks look at the same: forms change at the same call of each.
    background.compilers().close()
    return found, forms(model), CompileCount.compiled - before


@pytest.mark.slow
def test_ranks_of_a_host_share_the_work(pool: Pool, tmp_path: Path) -> None:
    (left, form, here), (right, other, there) = pool.run(
        2, train_cold, str(tmp_path), timeout_s=150.0
    )
    assert form == other
    assert form[0][0] == "inductor"
    assert form[0][1] > 1
    assert here == there == 0  # compiled by other processes, and loaded
    assert len(left) == len(right)
    assert len(list((tmp_path / "regions").glob("*.bin"))) == len(
        list((tmp_path / "regions").glob("*.lock"))
    )


# -- the end of the process that trains -----------------------------------------------------------
def session_of(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


TRAINS = """
import os, signal, sys, time
from pathlib import Path
import zerofx
from zerofx.runtime.regions import background
import test_auto_kernels as cases

background.NICENESS = 0
model = zerofx.compile(cases.net(), {"kernels": "auto"}, device="cpu")
model(cases.batch(0)).backward()
regions = Path(os.environ["ZEROFX_CACHE_DIR"]) / "regions"
while not list(regions.glob("*.lock")):  # one is being compiled
    time.sleep(0.01)
time.sleep(0.3)
print(background.compilers().process_id, flush=True)
"""
ENDINGS = {
    "exit": "",
    "exception": "raise RuntimeError('the end')",
    "interrupt": "time.sleep(100)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "at once": "os._exit(0)",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_compiler_outlives_training(tmp_path: Path, ending: str) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    env = {"ZEROFX_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINS + ENDINGS[ending]], env=os.environ | env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert trainer.stdout is not None
    said = trainer.stdout.readline()
    assert said.strip().isdigit(), trainer.communicate()[1]
    foreman = int(said)
    if ending == "interrupt":
        assert len(session_of(foreman)) > 1
        trainer.send_signal(signal.SIGINT)
    trainer.wait(60)
    deadline = time.monotonic() + 20
    while (left := session_of(foreman)) and time.monotonic() < deadline:
        time.sleep(0.1)
    trainer.communicate()
    assert not left
    unfinished = [p.name for p in (tmp_path / "regions").iterdir()]
    assert not [name for name in unfinished if name.startswith(".") or ".bin." in name]
    libraries = list((tmp_path / "inductor").rglob("*.so"))
    assert all(p.stat().st_size and p.read_bytes()[:4] == b"\x7fELF" for p in libraries)
