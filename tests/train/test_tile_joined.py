"""tiling="auto": a weight that other ops read too is put together where it is read."""

from __future__ import annotations

import pytest
import torch
from oracle import State, make_tangents
from oracle_cases import captured
from tile_cases import Normed, Pair, assert_same, pair
from torch import Tensor, fx, nn

from zerofx.capture import capture
from zerofx.ir.graphs import alias_source, is_alias
from zerofx.ir.program import Planned
from zerofx.passes.tile import Tile
from zerofx.passes.tiling import choose_tiles
from zerofx.plan.plan import Plan

aten = torch.ops.aten


class Late(Pair):
    """Reads a view of one layer's weight at the very end, behind all others."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean() + self.down.weight.T.tanh().mean()


def joins(program: Planned, graph: str) -> list[fx.Node]:
    nodes = program.graph(graph).nodes
    return [n for n in nodes if n.target is aten.cat.default and n.args[1:] == (0,)]


OTHERWISE_READ = pytest.mark.parametrize("model", [Normed(), Late()], ids=["up", "down"])


@OTHERWISE_READ
def test_auto_puts_a_weight_together_for_other_readers(model: nn.Module) -> None:
    """In front of the first of them, and again in backward, since a weight is never saved."""
    program = pair("auto", memory_budget=280_000, model=model)
    assert len(program.layout.tiles) == 2
    for graph in ("forward", "backward"):
        [whole] = joins(program, graph)
        following = whole.next
        while is_alias(following) and alias_source(following) is whole:
            following = following.next
        assert any(alias_source(a) is whole for a in following.all_input_nodes), following
    pairs = zip(program.outputs["forward"], program.results("forward"), strict=True)
    assert not any(alias_source(n) in joins(program, "forward") for _, n in pairs)


@OTHERWISE_READ
def test_a_weight_put_together_changes_nothing(model: nn.Module) -> None:
    before = capture(model, (torch.randn(8, 64),))
    tiles = before.clone()
    assert Tile(Plan(tiling="auto", memory_budget=280_000), 2).run(tiles).changed
    params = {n: p.detach() for n, p in model.named_parameters()}
    tangents = [make_tangents(before, seed) for seed in (1, 2)]
    state = State(params, {}, [{0: torch.randn(8, 64)} for _ in range(2)], tangents, [0, 1])
    assert_same(before, tiles, state)


def test_auto_tiles_what_is_linear_in_all_but_name() -> None:
    """The linear layer of transformers' GPT-2, whose weight lies the other way round."""
    pytest.importorskip("transformers")
    params = captured("hf-gpt2").params.values()
    counts = choose_tiles(params, Plan(tiling="auto", memory_budget="1KiB"), 2)
    assert "transformer.h.0.mlp.c_fc.weight" in counts
