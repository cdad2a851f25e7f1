"""sync-buffers: running statistics follow rank 0."""

from __future__ import annotations

from oracle import differences, execute, same_bits
from oracle_cases import Choice, expected, following_rank_0, make_state
from passes_compact import before, order, pass_named, run

from zerofx.ir.meta import Role
from zerofx.passes.sync_buffers import SyncBuffers

NAME = "sync-buffers"


def test_one_broadcast_of_what_floats_at_the_end_of_forward() -> None:
    program = before("convnet", Choice(1), NAME)
    after = run(program, SyncBuffers())
    assert order(after, "forward") == [*order(program, "forward"), "sync 4"]
    assert order(after, "backward") == order(program, "backward")
    updates = [s for s in after.outputs["forward"] if s.role is Role.BUFFER_UPDATE]
    assert len(updates) == 6, "the counters of batches stay each rank's own"


def test_every_rank_ends_with_rank_0s_statistics() -> None:
    after = run(before("convnet", Choice(1), NAME), SyncBuffers())
    own = expected("convnet", 2)
    key = ("buffer", "norm.running_mean", -1)
    assert not same_bits(own[0].results[key], own[1].results[key])
    assert not differences(following_rank_0(own), execute([after] * 2, make_state("convnet", 2)))


def test_nothing_to_do() -> None:
    assert not SyncBuffers().run(before("gpt", Choice(1), NAME)).changed
    assert not SyncBuffers(enabled=False).run(before("convnet", Choice(1), NAME)).changed


def test_one_rank_needs_none() -> None:
    assert pass_named(Choice(3, 1), NAME) == SyncBuffers(enabled=False)
    assert pass_named(Choice(3, 2), NAME) == SyncBuffers(enabled=True)
