"""tile: what becomes of linears and lookups, what stays one parameter, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import State, execute, make_tangents
from oracle_cases import captured, make_state
from tile_cases import Normed, Pair, assert_same, pair
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.capture import capture
from zerofx.codegen.emit import render
from zerofx.errors import BudgetError, PlanError
from zerofx.ir.meta import Role, info
from zerofx.ir.program import Planned
from zerofx.layout.buckets import Layout
from zerofx.passes.tile import Tile
from zerofx.passes.tiling import MOST, choose_tiles
from zerofx.plan.plan import Plan

aten = torch.ops.aten
TILED = {"blocks.*.mlp": 4, "blocks.0.attn": 2, "position": 2}


def tiled(program: Planned, tiling: Any, world: int = 2) -> Planned:
    """Return what the pass alone makes of a program."""
    after = program.clone()
    assert Tile(Plan(tiling=tiling), world).run(after).changed
    return after


def count(program: Planned, graph: str, *targets: Any) -> int:
    return sum(node.target in targets for node in program.graph(graph).nodes)


def test_before_and_expected() -> None:
    """y = x W^T + b by features, dx = dy W summed, a gradient a tile; W itself is gone."""
    before = zerofx.capture(Pair(), (torch.randn(8, 64, requires_grad=True),), {})
    after = tiled(before, {"up": 4})
    assert (
        count(before, "joint", aten.addmm.default),
        count(before, "joint", aten.mm.default),
    ) == (1, 5)
    # 4 forward with their bias, 3 that add to the first; 4 gradients beside down's 3 products
    assert (count(after, "joint", aten.addmm.default), count(after, "joint", aten.mm.default)) == (
        7,
        8,
    )
    assert count(after, "joint", aten.cat.default) == 1
    names = [info(n).name for n in after.placeholders("joint", Role.PARAM)]
    parts = [f"up.weight[{i}:{i + 32}]" for i in range(0, 128, 32)]
    assert names == [*parts, "up.bias", "down.weight"]
    grads = [s.name for s in after.outputs["joint"] if s.role is Role.GRAD]
    assert grads == [*parts, "up.bias", "down.weight"]
    assert [after.params[p].shape for p in parts] == [(32, 64)] * 4
    assert [after.params[p].unit for p in parts] == [f"up.weight tile {i}/4" for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("case", ["gpt", "hf-gpt2"])
def test_the_same_results_and_gradients(case: str) -> None:
    """Also of HF's Conv1D, whose weight lies the other way round."""
    if case.startswith("hf"):
        pytest.importorskip("transformers")
    before = captured(case)
    tiling = {"transformer.h.*.mlp": 4, "transformer.wpe": 2} if case == "hf-gpt2" else TILED
    after = tiled(before, tiling)
    state = make_state(case, 2)
    assert_same(before, after, state)


def gathered_at_once(program: Planned, graph: str, least: int = 1) -> int:
    """Return the most buckets of `least` elements that are gathered, or under way, at a time."""
    held = most = 0
    for node in program.graph(graph).nodes:
        if node.target is ops.all_gather and program.layout.buckets[node.args[1]].numel >= least:
            held += 1
        elif node.target is ops.release and info(node).index >= 0:
            held -= program.layout.buckets[info(node).index].numel >= least
        most = max(most, held)
    return most


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_two_tiles_at_a_time_one_in_backward(activations: str) -> None:
    """The next tile comes beside the gradient of the last, when that one has been released."""
    program = pair({"up": 4, "down": 4}, activations=activations)
    assert program.layout.tiles == {"up.weight": 4, "down.weight": 4}
    tile = 64 * 128 // 4
    assert gathered_at_once(program, "forward", tile) == 2
    assert gathered_at_once(program, "backward", tile) == 1
    large = [nbytes for nbytes in program.slot_bytes if nbytes >= 4 * tile]
    assert large == [4 * tile] * 2
    assert not any("weight" in s.name for s in program.outputs["forward"] if s.role is Role.SAVED)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_one_rank_brings_a_tile_at_a_time(tier: str) -> None:
    """Where parameters live off the device, each tile is copied there, used and released."""
    offload = {"parameters": tier, "optimizer": tier, "path": "/nvme"}
    if tier == "cpu":
        del offload["path"]
    program = pair({"up": 4, "down": 4}, 1, offload=offload)
    assert program.layout.tiles == {"up.weight": 4, "down.weight": 4}
    tile = 64 * 128 // 4
    for graph in ("forward", "backward"):
        assert count(program, graph, ops.all_gather) == 0
        copied = [n.args[2] for n in program.graph(graph).nodes if n.target is ops.reload_shard]
        assert max(copied) == tile and copied.count(tile) == (8 if graph == "forward" else 4)
    large = [nbytes for nbytes in program.slot_bytes if nbytes >= 4 * tile]
    assert large == [4 * tile] * 2


def test_tiles_are_alike_and_compiled_once() -> None:
    def structures(k: int) -> int:
        files = render(pair({"up": k, "down": k}))
        return sum(name.startswith("regions/") for name in files)

    assert structures(8) == structures(4)


def test_a_weight_used_twice_is_gathered_for_each_use() -> None:
    class Twice(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(2 * x)

    program = pair({"up": 4}, model=Twice())
    gathers = [n for n in program.graph("forward").nodes if n.target is ops.all_gather]
    indices = [n.args[1] for n in gathers]
    tiles = [b.index for b in program.layout.buckets if b.tile is not None]
    assert [indices.count(i) for i in tiles] == [2, 2, 2, 2]


def test_shards_of_tiles_lie_in_one_piece() -> None:
    layout = pair({"up": 4}).layout
    assert isinstance(layout, Layout)
    assert layout.owners[0] == ("up.weight",) and len(layout.blocks[0]) == 4
    tile = 64 * 128 // 4
    for rank in (0, 1):
        half = rank * tile // 2
        expected = tuple((i * tile + half, i * tile + half + tile // 2) for i in range(4))
        assert layout.ranges("up.weight", rank) == expected
    assert [layout.shard_numel(b) for b in layout.blocks[0]] == [tile // 2] * 4


@pytest.mark.parametrize(
    ("plan", "world"),
    [({"stage": 2}, 2), ({"stage": 3}, 1), ({"stage": 1, "persist_below": 0}, 2),
     ({"offload": {"optimizer": "cpu"}}, 1)],
)  # fmt: skip
def test_nothing_to_gain(plan: dict[str, Any], world: int) -> None:
    program = pair({"up": 4}, world, **plan)
    assert not program.layout.tiles
    [entry] = [e for e in program.history if e.pass_spec.startswith("tile")]
    assert "nothing to gain" in entry.summary


def test_auto_takes_the_fewest_tiles_within_an_eighth_of_what_is_left() -> None:
    """16 bytes an element of two ranks' halves stand; a tile and its gradient may take 1/8."""
    model = Pair(64, 128)
    standing = 16 * (2 * 64 * 128 + 128) // 2
    whole = 2 * 4 * 64 * 128
    program = pair("auto", memory_budget=standing + 8 * whole // 4 + 8000, model=model)
    assert program.layout.tiles == {"up.weight": 4, "down.weight": 4}
    [entry] = [e for e in program.history if e.pass_spec.startswith("tile")]
    assert entry.summary.startswith("up.weight in 4 tiles of 16.0 KiB, down.weight in 4 tiles")
    roomy = pair("auto", memory_budget="1GiB")
    assert roomy.layout is not None and not roomy.layout.tiles


def test_auto_stays_sane_where_no_number_of_tiles_helps() -> None:
    """Below what stands, tiles cannot meet the budget: it is refused, not cut into dust."""
    with pytest.raises(BudgetError, match="memory_budget"):
        pair("auto", memory_budget="1KiB", model=Pair(64, 1024))
    params = list(capture(Pair(64, 1024), (torch.zeros(8, 64),)).params.values())
    counts = choose_tiles(params, Plan(tiling="auto", memory_budget="1KiB"), 2)
    assert counts and max(counts.values()) <= MOST


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.long().clamp(0, 63))).mean()


@pytest.mark.parametrize(
    ("model", "tiling", "said"),
    [
        (Pair(), {"pu": 4}, "covers no parameter. Known are up.weight"),
        (Pair(), {"up.bias": 4}, r"up.bias of shape \[128\] and no matrix"),
        (Pair(), {"up": 3}, r"cuts up.weight \[128, 64\] into 3 tiles.*64 elements.*is 2"),
        (Pair(), {"up": 256}, "The nearest valid number is 128"),
        (Normed(), {"up": 4}, r"4 tiles of up.weight .*linalg_vector_norm.*tile_cases.py"),
        (Tied(), {"embed": 4}, "embed.weight is tied to head.weight"),
    ],
)
def test_refusals_name_the_parameter_and_the_way_out(
    model: nn.Module, tiling: dict[str, int], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        pair(tiling, model=model)


COLWISE, ROWWISE = {"up": "colwise", "down": "rowwise"}, {"up": "rowwise", "down": "colwise"}


class Fused(nn.Module):
    """Three outputs of one product, which the tensor axis cuts one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.down = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.down(q.tanh() * k + v).pow(2).mean()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = nn.Embedding(64, 64, padding_idx=37), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.table((x[:, :6] * 7).abs().long() % 64)).pow(2).mean()


@pytest.mark.parametrize(
    ("model", "tiling", "placements"),
    [
        (Pair(), {"up": 4, "down": 2}, COLWISE),
        (Pair(), {"up": 4, "down": 2}, ROWWISE),
        (Fused(), {"qkv": 6}, {"qkv": "colwise/3", "down": "rowwise"}),
        (Fused(), {"qkv": 3}, {"qkv": "colwise/3", "down": "rowwise"}),
        (Table(), {"table": 4}, {"table": "rowwise", "down": "whole"}),
        (Normed(), "auto", COLWISE),
    ],
)
def test_parts_of_ranks_are_tiled(model: nn.Module, tiling: Any, placements: Any) -> None:
    """Each rank tiles its part; nothing more is sent, and the proof holds."""
    x = [torch.randn(8, 64), torch.randn(8, 64)]
    program = zerofx.capture(model, (x[0],), {})
    state = State(
        {n: p.detach() for n, p in model.named_parameters()}, {},
        [{0: x[rank // 2]} for rank in range(4)],
        [make_tangents(program, 0) for _ in range(4)], [0] * 4,
    )  # fmt: skip
    parallel = {"tensor": 2, "placements": placements}
    budget = {"memory_budget": "160KiB"} if tiling == "auto" else {}
    whole = zerofx.rewrite(program, Plan(parallel=parallel), 4)
    planned = zerofx.rewrite(program, Plan(tiling=tiling, parallel=parallel, **budget), 4)
    tiles = [p for p in planned.params.values() if p.tile is not None]
    assert tiles and all(p.shape == p.tile.local for p in tiles if p.tile is not None)
    if tiling != "auto" and "table" not in tiling:  # whose gradient is cut, and gathered per tile
        assert sent(planned) == sent(whole)
    expected, got = execute([program] * 4, state), execute([planned] * 4, state)
    for a, b in zip(expected, got, strict=True):
        for name, grad in a.gradients.items():
            torch.testing.assert_close(b.gradients[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def sent(program: Planned) -> int:
    nodes = (n for g in program.graphs.values() for n in g.graph.nodes)
    return sum(n.target in (ops.reduce_values, ops.gather_values) for n in nodes)


def test_groups_of_rows_are_tiled_one_by_one() -> None:
    parallel = {"tensor": 2, "placements": {"qkv": "colwise/3", "down": "rowwise"}}
    with pytest.raises(PlanError, match=r"\(\[96, 64\] per rank\) into 4 .*3 groups.* is 3"):
        pair({"qkv": 4}, world=4, model=Fused(), parallel=parallel)


def test_contradictions() -> None:
    with pytest.raises(PlanError, match="memory_budget, which is None"):
        Plan(tiling="auto")
    with pytest.raises(PlanError, match="in-backward"):
        Plan(tiling={"up": 2}, update="in-backward")
