"""Tensors that keep their place: any layout goes in, and comes out in memory of its own."""

from __future__ import annotations

import pytest
import torch

from zerofx.runtime.cuda_graph.recorded import Results, blank_like, fill

LAYOUTS = {
    "plain": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "sliced": torch.arange(12.0).view(3, 4)[:, 1:3],
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "unfolded": torch.arange(6.0).unfold(0, 3, 1),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blanks_take_any_layout(name: str) -> None:
    given = LAYOUTS[name]
    place = blank_like(given)
    fill([place], [given])
    assert torch.equal(place, given)
    assert place.stride() == given.stride()
    copied = Results([place], [], []).give_out([])[0]
    assert torch.equal(copied, given)
    assert copied.stride() == given.stride()
    assert place.numel() == 0 or copied.data_ptr() != place.data_ptr()


def test_results_that_share_memory_still_do() -> None:
    base, mine, weight = torch.arange(12.0).view(3, 4), torch.zeros(3, 4), torch.ones(4)
    theirs = torch.arange(20.0)[8:].view(3, 4)
    outs = [base[1], base.t(), mine, mine[2], weight[1:], None]
    row, turned, same, last, part, none = Results(outs, [mine], [weight]).give_out([theirs])
    assert torch.equal(turned, base.t())
    row.fill_(-1)
    assert torch.equal(turned[:, 1], row)
    assert base.min() == 0
    assert same is theirs
    assert torch.equal(last, theirs[2])
    assert last.data_ptr() == theirs[2].data_ptr()
    assert part.data_ptr() == weight[1:].data_ptr()
    assert none is None
