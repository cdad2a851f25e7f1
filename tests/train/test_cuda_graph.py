"""Training whose forwards and backwards are replayed equals training that runs them, bit for bit.

On a CPU the recorder is the Tape of tape.py; tests marked gpu do the same with CUDA graphs. The
tape draws random numbers from the generator at each replay, as CUDA graphs do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CASES, OWN
from tape import Tape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from training import loss_of

import zerofx
from zerofx.layout import buckets as layout
from zerofx.model.programs import ProgramTable

ATEN = {"kernels": "aten", "bucket_bytes": 4096}
BF16 = {"precision": "bf16"}
Action = Callable[["Trained", int], None]


class Trained:
    """A model, its optimizer, and all that was seen of its training."""

    def __init__(self, name: str, plan: dict[str, Any], device: str = "cpu") -> None:
        self.case, self.device = CASES[name], device
        self.model = zerofx.compile(self.case.make(), {**ATEN, **plan}, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen: list[Tensor] = []
        self.kept: list[Any] = []

    def loss(self, seed: int) -> Tensor:
        args, kwargs = self.case.batch(seed)
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(self.device), (args, kwargs))
        result = self.model(*args, **kwargs)
        # A replay that wrote to it would show in the comparison.
        self.kept.append(tree_map_only(Tensor, Tensor.detach, result))
        loss = loss_of(result)
        self.note(loss)
        return loss

    def note(self, *tensors: Tensor | None) -> None:
        self.seen += [t.detach().clone() for t in tensors if t is not None]

    def update(self, set_to_none: bool = True) -> None:
        self.note(*(p.grad for p in self.model.parameters()))
        self.note(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)


def train(trained: Trained, action: Action, steps: int = 6) -> list[Tensor]:
    """Return everything that was seen, and what of it was still held at the end."""
    torch.manual_seed(0)
    for step in range(steps):
        action(trained, step)
    state = [v.clone() for v in trained.model.state_dict().values()]
    held = [t for t in tree_leaves(trained.kept) if isinstance(t, Tensor)]
    return [
        *trained.seen,
        *(t.detach() for t in held),
        *state,
        torch.rand(3, device=trained.device),
    ]


def taped(name: str, plan: dict[str, Any]) -> tuple[Trained, Tape]:
    """Return a model whose calls a tape records."""
    run, tape = Trained(name, plan), Tape()
    own = run.model.zerofx
    setting = replace(own.setting, plan=replace(own.setting.plan, cuda_graph=True))
    own.table = ProgramTable(run.model, setting, own.engine, recorder=tape)
    return run, tape


def equal(plain: list[Tensor], replayed: list[Tensor]) -> None:
    assert len(plain) == len(replayed)
    for i, (a, b) in enumerate(zip(plain, replayed, strict=True)):
        assert torch.equal(a, b), f"value {i} of {len(plain)} differs: {a} and {b}"


def compare(name: str, plan: dict[str, Any], action: Action) -> Tape:
    run, tape = taped(name, plan)
    equal(train(Trained(name, plan), action), train(run, action))
    return tape


# -- what a loop may do in one step -----------------------------------------------------------
def plainly(run: Trained, step: int) -> None:
    run.loss(step).backward()
    run.update()


def in_two_micro_batches(run: Trained, step: int) -> None:
    run.loss(2 * step).backward()
    (run.loss(2 * step + 1) / 2).backward()
    run.update()


def zeroing(run: Trained, step: int) -> None:
    run.loss(step).backward()
    run.update(set_to_none=False)


def holding_gradients(run: Trained, step: int) -> None:
    run.loss(step).backward()
    run.kept += [p.grad for p in run.model.parameters()] if step in (2, 4) else []
    run.update()


def with_some_gradients_unset(run: Trained, step: int) -> None:
    run.loss(step).backward()
    if step % 2:
        next(iter(run.model.parameters())).grad = None
    run.loss(step + 50).backward()
    run.update()


def with_evaluation(run: Trained, step: int) -> None:
    plainly(run, step)
    run.model.eval()
    with torch.no_grad():
        run.loss(100 + step)
    with torch.inference_mode():
        run.loss(200 + step)
    run.model.train()


def with_evaluation_before_backward(run: Trained, step: int) -> None:
    """What is recorded first has the older memory, which a later forward's values may be in."""
    if step < 2:
        with torch.no_grad():
            run.loss(100 + step)
        return
    loss = run.loss(step)
    with torch.no_grad():
        run.loss(100 + step)
    loss.backward()
    run.update()


def with_two_forwards(run: Trained, step: int) -> None:
    first, second = run.loss(2 * step), run.loss(2 * step + 1)
    (first if step % 2 else second).backward()
    (second if step % 2 else first).backward()
    run.update()


def twice_backward(run: Trained, step: int) -> None:
    loss = run.loss(step)
    loss.backward(retain_graph=True)
    loss.backward()
    run.update()


def without_some_backwards(run: Trained, step: int) -> None:
    run.loss(step + 100)
    plainly(run, step)


def with_loads(run: Trained, step: int) -> None:
    plainly(run, step)
    if step % 3 == 2:
        run.model.load_state_dict(run.model.state_dict())
        run.model.refresh()


def with_a_second_shape(run: Trained, step: int) -> None:
    plainly(run, step)
    if step >= 3:
        tokens = torch.randint(0, 32, (3 + step, 8)).to(run.device)
        loss = run.model(tokens, tokens)
        run.note(loss)
        loss.backward()
        run.update()


ACTIONS = [
    plainly, in_two_micro_batches, zeroing, holding_gradients, with_some_gradients_unset,
    with_evaluation, with_evaluation_before_backward, with_two_forwards, twice_backward,
    without_some_backwards, with_loads, with_a_second_shape,
]  # fmt: skip


def _cells() -> list[Any]:
    """All stages of the GPT and the ends of the other models, half of these marked slow."""
    cells = [(n, s) for n in OWN for s in range(4) if n == "gpt" or s in (0, 3)]
    is_slow = {(n, s) for k, n in enumerate(OWN) for s in (0, 3) if n != "gpt" and s % 2 == k % 2}
    return [pytest.param(*c, marks=pytest.mark.slow) if c in is_slow else c for c in cells]


@pytest.mark.parametrize(("name", "stage"), _cells())
def test_models_train_alike(name: str, stage: int) -> None:
    tape = compare(name, {"stage": stage}, plainly)
    assert tape.counts == (2, 2, 10)


# with slots, and with resident parameters
@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_loops_train_alike(action: Action, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "REST_BYTES", 1)  # every buffer is one that may be freed
    tape = compare("gpt", {"stage": stage, **BF16}, action)
    assert tape.replayed >= 8


def test_the_usual_loops_are_recorded_as_often_as_they_differ() -> None:
    """One forward; a backward that sets gradients, and one that adds to them."""
    tape = compare("gpt", BF16, in_two_micro_batches)
    assert len(tape.recordings) == 3
    assert tape.replayed == 4 * 6 - tape.warmed


def test_gradients_for_inputs_alone() -> None:
    def action(run: Trained, step: int) -> None:
        (x, y), _ = run.case.batch(step)
        out = run.model(x, y)
        run.note(*torch.autograd.grad(sum(o.sum() for o in out), [x]))
        assert all(p.grad is None for p in run.model.parameters())
        plainly(run, step)

    compare("stage", {}, action)


# -- with CUDA graphs -------------------------------------------------------------------------
def compare_on_cuda(name: str, plan: dict[str, Any], action: Action) -> None:
    """Compare without kernels of torch's that add in no fixed order: they are not tested here."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=True, deterministic=True):
        plain = train(Trained(name, plan, "cuda:0"), action)
        replayed = Trained(name, {**plan, "cuda_graph": True}, "cuda:0")
        equal(plain, train(replayed, action))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", OWN)
def test_models_train_alike_on_cuda(name: str, stage: int) -> None:
    compare_on_cuda(name, {"stage": stage}, plainly)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [{"stage": 0, **BF16}, {"stage": 3, **BF16}, {}], ids=str)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_loops_train_alike_on_cuda(action: Action, plan: dict[str, Any]) -> None:
    compare_on_cuda("gpt", plan, action)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "gpt-dropout"])
@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
def test_compiled_regions_train_alike_on_cuda(name: str, numerics: str) -> None:
    plan = {**BF16, "kernels": "inductor", "numerics": numerics}
    compare_on_cuda(name, plan, in_two_micro_batches)
