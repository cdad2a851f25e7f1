"""Edits of an emitted directory that break it, each with what its refusal says (a pattern)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edits import Edit, Source, edited, moved

HARMFUL: list[tuple[Edit, str]] = []


def harmful(message: str) -> Callable[[Edit], Edit]:
    """Register an edit with what its refusal says."""

    def register(edit: Edit) -> Edit:
        HARMFUL.append((edit, message))
        return edit

    return register


@harmful(r"reads blocks.0.\S+, a parameter of gathered bucket 2 .*after its release")
def released_before_its_last_reader(directory: Path) -> None:
    moved(directory, r"rt.release\(full_2", r"\) = blocks_forward\(args\)  # blocks.0")


@harmful(r"what rt.unpack takes apart is a launch that was not waited for")
def wait_forgotten(directory: Path) -> None:
    edited(directory, r"full_2 = rt.wait\(gather_2\)", "full_2 = gather_2")


@harmful(
    r"bucket 3 \(blocks.1\) into slot 0 while gathered bucket 2 \(blocks.0\) is in flight there"
)
def slot_taken_twice(directory: Path) -> None:
    edited(directory, r"(gather_3 = .*slot=)\d", r"\g<1>0")
    edited(directory, r"(rt.release\(full_3, slot=)\d", r"\g<1>0")


@harmful(r"gives back slot 1, but gathered bucket 2 \(blocks.0\) is in slot 0")
def another_slot_given_back(directory: Path) -> None:
    edited(directory, r"(rt.release\(full_2, slot=)\d", r"\g<1>1")


@harmful(r"grad norm.\S+, grad norm.\S+ differ. Each value is a captured one, but in the wrong")
def gradients_exchanged(directory: Path) -> None:
    edited(directory, r"\(14, 15, 7", "(15, 14, 7", "def backward")


@harmful(r"is reduced at scale 1.0. The mean over 2 ranks is 1/2 = 0.5")
def sum_for_the_mean(directory: Path) -> None:
    edited(directory, r"(reduce_2 = .*scale=)0.5", r"\g<1>1.0")


@harmful(r"reduces bucket 1 before the gradient of blocks.0.\S+ is packed")
def reduced_before_the_last_pack(directory: Path) -> None:
    source = Source(directory)
    launch = source.lines.pop(source.at("reduce_1 = "))
    source.lines.insert(source.at("reduce_2 = "), launch)
    source.write()


@harmful(r"reduced bucket 2 \(blocks.0\) is never stored")
def never_stored(directory: Path) -> None:
    source = Source(directory)
    del source.lines[source.at(r"rt.store_grad\(reduced_2")]
    source.write()


@harmful(r"the gradient of \S+ is never reduced: backward has no reduction of bucket 2")
def never_reduced(directory: Path) -> None:
    source = Source(directory)
    for pattern in (r"reduce_2 = ", r"reduced_2 = ", r"rt.store_grad\(reduced_2"):
        del source.lines[source.at(pattern)]
    source.write()


@harmful(r"stores the reduced gradients of bucket 2 as those of bucket 3")
def stored_as_another(directory: Path) -> None:
    edited(directory, r"rt.store_grad\(reduced_2, bucket=2\)", "rt.store_grad(reduced_2, bucket=3)")


@harmful(r"rt.pack names bucket 2, but the buffer is that of bucket 3")
def packed_as_another(directory: Path) -> None:
    edited(directory, r"rt.pack\(grads_3, 3,", "rt.pack(grads_3, 2,")


@harmful(r"the result reads embed.weight, a parameter of gathered bucket 0 .*after its release")
def released_parameter_saved(directory: Path) -> None:
    edited(directory, r"\[\s*x, arange, ", "[x, arange, embed_weight, ")
    edited(directory, r"\(\s*x, arange, ", "(x, arange, embed_w, ", "def backward")


@harmful(r"shards of bucket 3|given shard_3, which is not its shard")
def another_shard_gathered(directory: Path) -> None:
    edited(directory, r"(gather_2 = rt.all_gather\(shards)\[2\]", r"\g<1>[3]")


@harmful(r"keeps bucket 2 \(blocks.0\) gathered between calls")
def kept_resident(directory: Path) -> None:
    edited(
        directory, r"rt.all_gather\(shards\[2\], bucket=2, slot=\d\)", "rt.refresh(shards[2], 2)"
    )


@harmful(r"does not compute what was captured: .*. Edited: regions/blocks_forward.py")
def math_changed(directory: Path) -> None:
    source = Source(directory, "regions/blocks_forward.py")
    source.replace("1e-05", "1e-06", "def blocks_forward")
    source.write()


@harmful(r"the engine has no call gather. It has all_gather, all_gather_blocks,")
def unknown_call(directory: Path) -> None:
    edited(directory, r"rt.all_gather\(shards\[2\]", "rt.gather(shards[2]")


@harmful(r"DataDependentOutput\w*: .*. A schedule is a straight-line sequence of calls")
def decided_by_a_value(directory: Path) -> None:
    edited(directory, r"^    x = inputs\[0\]", "    x = inputs[0]; y = 0 if int(x.sum()) else 1")


@harmful(r"NameError: name 'gather_2' is not defined")
def launch_deleted(directory: Path) -> None:
    source = Source(directory)
    del source.lines[source.at("gather_2 = ")]
    source.write()


@harmful(r"aten.add_.Tensor writes in place. Emitted files compute new values only")
def written_in_place(directory: Path) -> None:
    source = Source(directory)
    i = source.at(r"embed_embedding, = embed_forward")
    source.lines.insert(i + 1, "    embed_embedding.add_(1)")
    source.write()


@harmful(r"0 outputs are returned, not 1")
def output_forgotten(directory: Path) -> None:
    edited(directory, r"return \[nll_loss_forward_0\]", "return []")


@harmful(r"not enough values to unpack|too many values to unpack")
def saved_value_forgotten(directory: Path) -> None:
    edited(directory, r"\[\s*x, arange, ", "[x, ")


@harmful(r"bucket 7 is none of the layout's 4")
def unknown_bucket(directory: Path) -> None:
    edited(directory, r"(gather_2 = .*bucket=)2", r"\g<1>7")


@harmful(r"positions of parameters are a tuple. This is \[1\]")
def positions_as_a_list(directory: Path) -> None:
    edited(directory, r"rt.pack\(grads_0, 0, \(1,\)", "rt.pack(grads_0, 0, [1]")


@harmful(r"norm_forward takes one list, which it empties. This is a tuple")
def arguments_as_a_tuple(directory: Path) -> None:
    edited(directory, r"norm_forward\(args\)", "norm_forward(tuple(args))")
