"""defer-weights: what is computed before the pause, what is held over it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensor_models import MODELS, batch
from torch import Tensor, fx, nn

import zerofx
from zerofx.analysis.memory.standing import saved_bytes, waiting_bytes
from zerofx.errors import ProgramError
from zerofx.ir.graphs import pause_of
from zerofx.ir.meta import Role, nbytes, set_info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, is_reduction, kind_of, spec_of
from zerofx.ir.verify import verify, verify_stages


def stages(name: str, schedule: str = "zero-bubble", size: int = 2, **fields: object) -> list:
    torch.manual_seed(0)
    captured = zerofx.capture(MODELS[name](), (), batch(name), outputs="loss")
    parallel = {"pipeline": size, "schedule": schedule, "micro_batches": 4}
    plan = zerofx.Plan(**{"kernels": "aten", "stage": 3, "parallel": parallel, **fields})
    world = 2 * size
    return [zerofx.rewrite(captured, plan, world_size=world, position=p) for p in range(size)]


def divided(program: Planned) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
    """Return the pause of a backward, and the nodes before and after it."""
    graph = program.graph(BACKWARD)
    pause, nodes = pause_of(graph), list(graph.nodes)
    assert pause is not None
    at = nodes.index(pause)
    return pause, nodes[:at], nodes[at + 1 :]


def products(nodes: list[fx.Node]) -> int:
    return sum(str(n.target).startswith(("aten.mm", "aten.addmm", "aten.bmm")) for n in nodes)


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("gpt2", 2), ("t5", 4), ("vit", 2)])
def test_stages_are_proved_and_divided_alike(name: str, size: int) -> None:
    found = stages(name, size=size)
    verify_stages(found)
    whole = stages(name, "1f1b", size)
    for program, other in zip(found, whole, strict=True):
        pause, before, after = divided(program)
        pairs = zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True)
        assert list(pause.args[0]) == [r for s, r in pairs if s.role is Role.INPUT_GRAD]
        # parameters are gathered before it alone, and gradients leave after it alone
        assert not any(kind_of(n) in (Kind.PACK, Kind.STORE) or is_reduction(n) for n in before)
        assert not any(spec.is_gather for n in after if (spec := spec_of(n)) is not None)
        # nothing is computed twice
        assert products([*before, *after]) == products([*other.graph(BACKWARD).nodes])
    # of a stage between two others, each weight has a product in either part
    _, before, after = divided(found[-1])
    assert products(before) == products(after) > 0 or name == "t5"


def test_what_takes_no_product_stays_if_less_is_held() -> None:
    """The gradients of norms would hold the gradients of their results, which nothing else does."""
    _, last = stages("llama")
    _, before, after = divided(last)
    packed = {a for n in after if kind_of(n) is Kind.PACK for a in n.args[1]}
    early = [n for n in packed if n in before]
    assert early and all(value(n).dim() == 1 for n in early)
    assert {value(n).dim() for n in packed if n in after} == {2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def test_what_is_held_is_each_products_two_arguments() -> None:
    """16 rows: of `outer` its input and its result's gradient, and the same of `inner`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    parallel = {"pipeline": 3, "schedule": "zero-bubble", "micro_batches": 3}
    captured = zerofx.capture(Model(), (torch.randn(16, 8),))
    plan = zerofx.Plan(kernels="aten", parallel=parallel)
    found = [zerofx.rewrite(captured, plan, 3, position=p) for p in range(3)]
    row = 16 * 4
    # the middle stage: x, which it received, relu(inner(x)), and the gradients of both products
    assert waiting_bytes(found[1]) == row * (8 + 32 + 8 + 32)
    # the first one reads the batch, which is there anyway
    assert waiting_bytes(found[0]) == row * (32 + 8 + 32)


def test_memory_counts_what_waits() -> None:
    """Of two ranks the first has another micro-batch under way, of the second another one waits."""
    first, last = stages("llama")
    for program, expected in ((first, saved_bytes(first)), (last, waiting_bytes(last))):
        held = [s for s in program.memory().memory.storages if s.name.startswith("saved by 1")]
        assert len(held) == 3  # in forward, and in either part of backward
        assert [s.nbytes for s in held] == [expected] * 3
        assert [s.birth for s in held[1:]] == [s.death + 1 for s in held[:-1]]
    assert waiting_bytes(last) < saved_bytes(last)


Change = Callable[[Planned], None]


def _reads_a_parameter_late(program: Planned) -> None:
    """Move the pause before the last release: its bucket would stay in its slot over it."""
    pause, before, _ = divided(program)
    release = next(n for n in reversed(before) if kind_of(n) is Kind.RELEASE)
    pause.append(release)


def _packs_early(program: Planned) -> None:
    pause, _, after = divided(program)
    end = next(n for n in after if kind_of(n) is Kind.PACK)
    end.append(pause)


def _hands_out_another(program: Planned) -> None:
    pause, before, _ = divided(program)
    [due] = pause.args[0]
    form = nbytes(value(due))
    other = [n for n in before if n is not due and isinstance(value(n), Tensor)]
    pause.args = ([next(n for n in reversed(other) if nbytes(value(n)) == form)],)


def _pauses_twice(program: Planned) -> None:
    pause, _, _ = divided(program)
    graph = program.graph(BACKWARD)
    with graph.inserting_after(pause):
        again = graph.node_copy(pause)
    again.meta = dict(pause.meta)


def _leaves_it_out(program: Planned) -> None:
    pause, _, _ = divided(program)
    program.graph(BACKWARD).erase_node(pause)


def _draws_late(program: Planned) -> None:
    _, _, after = divided(program)
    set_info(
        next(n for n in after if n.op == "call_function" and spec_of(n) is None), is_random=True
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_reads_a_parameter_late, "is not released. Other micro-batches run meanwhile"),
        (_packs_early, "is being filled. Other micro-batches run meanwhile"),
        (_hands_out_another, "and the gradients of inputs are"),
        (_pauses_twice, "pauses a second time"),
        (_leaves_it_out, "backward pauses nowhere, and Plan.parallel.schedule is 'zero-bubble'"),
        (_draws_late, "draws random numbers after pause"),
    ],
)
def test_wrong_divisions_are_refused(change: Change, said: str) -> None:
    _, last = stages("llama")
    change(last)
    with pytest.raises(ProgramError, match=said):
        verify(last)
