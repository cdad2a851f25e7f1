"""Edits of an emitted directory that leave its meaning as it is: each loads and trains alike."""

from __future__ import annotations

import re
from pathlib import Path

from edits import Edit, Source, edited, moved

HARMLESS: list[Edit] = []


def harmless(edit: Edit) -> Edit:
    HARMLESS.append(edit)
    return edit


@harmless
def comments_and_blank_lines(directory: Path) -> None:
    source = Source(directory)
    rows = []
    for line in source.lines:
        if re.match(r"    \w+ = rt\.", line):
            rows += ["", "    # a launch or a wait"]
        rows.append("\n".join(row.split("  # ")[0] for row in line.split("\n")))
    source.lines = rows
    source.write()


@harmless
def variables_renamed(directory: Path) -> None:
    path = directory / "schedule.py"
    path.write_text(re.sub(r"\bfull_2\b", "first_block", path.read_text()))


@harmless
def independent_launches_swapped(directory: Path) -> None:
    moved(directory, r"refresh_1 = ", r"gather_0 = ")


@harmless
def wait_moved_earlier(directory: Path) -> None:
    moved(directory, r"full_2 = rt.wait", r"full_0 = rt.wait")


@harmless
def prefetched_further(directory: Path) -> None:
    moved(directory, r"gather_3 = ", r"gather_0 = ")


@harmless
def memory_of_its_own(directory: Path) -> None:
    edited(directory, r"(gather_2 = .*slot=)\d", r"\g<1>-1")
    edited(directory, r"(rt.release\(full_2, slot=)\d", r"\g<1>-1")


@harmless
def released_later(directory: Path) -> None:
    moved(directory, r"rt.release\(full_2", r"rt.release\(full_3")


@harmless
def statements_split(directory: Path) -> None:
    source = Source(directory)
    i = source.at(r"rt.pack\(grads_1, 1, \(14, 15, ", "def backward")
    pack = source.lines[i]
    names = re.search(r"\[\s*(\w+),\s*(\w+),", pack)
    assert names is not None
    rest = pack[: names.start() + 1] + pack[names.end() :]
    source.lines[i : i + 1] = [
        f"    rt.pack(grads_1, 1, (14,), [{names[1]}])",
        f"    rt.pack(grads_1, 1, (15,), ({names[2]},))",
        rest.replace("(14, 15, ", "("),
    ]
    i = source.at(r"\(embed_weight, position_weight\) = ")
    source.lines[i : i + 1] = [
        "    embed_weight = rt.unpack(full_0, 0, (0,))[0]",
        "    views = rt.unpack(full_0, 0, (1,))",
        "    position_weight, = views",
    ]
    source.write()


@harmless
def deletions_dropped(directory: Path) -> None:
    source = Source(directory)
    source.lines = [line for line in source.lines if not line.startswith("    del ")]
    source.write()


@harmless
def helper_written(directory: Path) -> None:
    source = Source(directory)
    i = source.at("gather_2 = ")
    source.lines[i] = "    first_block = fetch(rt, shards, 2, 0)"
    source.replace(r"full_2 = rt.wait\(gather_2\)", "full_2 = first_block")
    i = source.at("def forward")
    source.lines[i:i] = [
        "def fetch(rt, shards, bucket, slot):",
        "    launch = rt.all_gather(shards[bucket], bucket=bucket, slot=slot)",
        "    return rt.wait(launch)",
        "",
        "",
    ]
    source.write()


@harmless
def region_inlined(directory: Path) -> None:
    source = Source(directory)
    i = source.at(r"embed_embedding, = embed_forward")
    source.lines[i - 1 : i + 1] = [
        "    embed_embedding = torch.ops.aten.embedding.default(embed_weight, x)"
    ]
    source.write()


@harmless
def region_rewritten(directory: Path) -> None:
    """Other names, other order, other spelling of the same computation in a region."""
    source = Source(directory, "regions/blocks_forward.py")
    source.lines = [line for line in source.lines if not line.startswith("    del ")]
    source.move(r"    t_3 = ", r"    view = ", "def blocks_forward")
    source.replace(r"aten.add_.Tensor\((view_\d+), x0\)", r"x0 + \1", "def blocks_forward")
    text = "\n".join(source.lines)
    source.lines = re.sub(r"\bgelu\b(?!\.)", "activated", text).split("\n")
    source.write()


@harmless
def saved_values_reordered(directory: Path) -> None:
    edited(directory, r"\[\s*x, arange, ", "[arange, x, ")
    edited(directory, r"\(\s*x, arange, ", "(arange, x, ", "def backward")


@harmless
def recomputed_by_hand(directory: Path) -> None:
    """Backward computes what forward saved for it."""
    edited(directory, r"\[\s*x, arange, ", "[x, ")
    edited(directory, r"\(\s*x, arange, ", "(x, ", "def backward")
    source = Source(directory)
    i = source.at(r"saved.clear\(\)")
    source.lines[i] += "\n    arange, = root_forward([])"
    source.write()


@harmless
def reduction_waited_for_at_once(directory: Path) -> None:
    source = Source(directory)
    wait = source.lines.pop(source.at(r"reduced_3 = rt.wait"))
    store = source.lines.pop(source.at(r"rt.store_grad\(reduced_3"))
    i = source.at(r"reduce_3 = ")
    source.lines[i + 1 : i + 1] = [wait, store]
    source.write()
