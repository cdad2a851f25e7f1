"""The kinds of change that `mutants` makes: each returns what it did, None if it found no place."""

from __future__ import annotations

from mutants import Editor, Kind
from mutants_copies import (
    drop_offload,
    drop_read,
    drop_reload,
    drop_write,
    duplicate_copy,
    move_copy,
    offload_early,
    retarget_copy,
    swap_copies,
)
from mutants_drop import (
    drop_compute,
    drop_pack,
    drop_part_of_pack,
    drop_reduction,
    drop_release,
    drop_store,
    drop_update,
    drop_wait,
    duplicate,
    duplicate_compute,
    duplicate_launch,
)
from mutants_move import (
    move_launch,
    move_op,
    move_pack,
    move_region,
    move_update,
    move_wait,
    release_early,
    release_late,
    reorder_compute,
    swap,
    swap_launches,
    swap_two,
    wait_late,
)
from mutants_shards import (
    drop_grad_offload,
    drop_shard_reload,
    duplicate_move,
    duplicate_move_launch,
    move_move,
    move_near,
    other_verb,
    release_near,
    rename_move,
    retarget_move,
    swap_moves,
)
from mutants_value import (
    retarget_compute,
    retarget_op,
    retarget_parameter,
    retarget_result,
    wrong_bucket,
    wrong_pack_offset,
    wrong_saved,
    wrong_scale,
    wrong_slot,
    wrong_view_offset,
    wrong_zero,
)


def one_rank(edit: Editor) -> str | None:
    """Let one rank alone run a schedule whose communication differs."""
    return edit.rng.choice(COMMUNICATION)(edit)


COMMUNICATION: list[Kind] = [
    drop_reduction, drop_part_of_pack, duplicate_launch, swap_launches, wrong_scale, wrong_bucket,
    wrong_pack_offset,
]  # fmt: skip
KINDS: list[Kind] = [
    drop_wait, drop_release, drop_pack, drop_part_of_pack, drop_reduction, drop_store, drop_update,
    drop_compute, duplicate, duplicate_launch, duplicate_compute, swap, swap_two, swap_launches,
    move_op, move_launch, move_wait, wait_late, move_pack, move_update, move_region, release_early,
    release_late, reorder_compute, retarget_compute, retarget_op, retarget_parameter,
    retarget_result, wrong_view_offset, wrong_pack_offset, wrong_scale, wrong_bucket, wrong_slot,
    wrong_zero, wrong_saved, one_rank, drop_offload, drop_reload, duplicate_copy, move_copy,
    offload_early, retarget_copy, swap_copies, drop_shard_reload, drop_grad_offload, duplicate_move,
    duplicate_move_launch, move_move, move_near, release_near, retarget_move, rename_move,
    swap_moves, other_verb, drop_write, drop_read,
]  # fmt: skip
ON_ONE_RANK: list[Kind] = [one_rank]
