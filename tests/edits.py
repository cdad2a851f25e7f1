"""Edits of an emitted directory (tests/verify_cases.emitted) that a hand might make."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

Edit = Callable[[Path], None]
HARMLESS: list[Edit] = []
HARMFUL: list[tuple[Edit, str]] = []


def harmless(edit: Edit) -> Edit:
    HARMLESS.append(edit)
    return edit


def harmful(message: str) -> Callable[[Edit], Edit]:
    """Register an edit with what its refusal says."""

    def register(edit: Edit) -> Edit:
        HARMFUL.append((edit, message))
        return edit

    return register


class Source:
    """A file's statements (and the lines between them), to be changed and written back."""

    def __init__(self, directory: Path, name: str = "schedule.py") -> None:
        self.path = directory / name
        text = self.path.read_text()
        self.lines = text.split("\n")
        for node in sorted(_simple(ast.parse(text)), key=lambda n: -n.lineno):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            self.lines[first:last] = ["\n".join(self.lines[first:last])]

    def write(self) -> None:
        self.path.write_text("\n".join(self.lines))

    def at(self, pattern: str, after: str = "def forward") -> int:
        """Return the position of the first that matches, behind the first with `after`."""
        first = next(i for i, line in enumerate(self.lines) if after in line)
        for i in range(first, len(self.lines)):
            if re.search(pattern, self.lines[i]):
                return i
        raise AssertionError(f"{self.path}: nothing matches {pattern}")

    def move(self, pattern: str, before: str, after: str = "def forward") -> None:
        """Move one statement to just before another."""
        line = self.lines.pop(self.at(pattern, after))
        self.lines.insert(self.at(before, after), line)

    def replace(self, pattern: str, new: str, after: str = "def forward") -> None:
        """Substitute within the first statement that matches."""
        i = self.at(pattern, after)
        self.lines[i] = re.sub(pattern, new, self.lines[i])


def _simple(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements that contain no others."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not getattr(n, "body", None)]


def edited(directory: Path, pattern: str, new: str, after: str = "def forward") -> None:
    source = Source(directory)
    source.replace(pattern, new, after)
    source.write()


def moved(directory: Path, pattern: str, before: str, after: str = "def forward") -> None:
    source = Source(directory)
    source.move(pattern, before, after)
    source.write()


# -- harmless -----------------------------------------------------------------------------------
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
    i = source.at(r"rt.pack\(grads_1, 1, \(14, 15\)", "def backward")
    names = re.search(r"\[\s*(\w+), (\w+),?\s*\]", source.lines[i])
    assert names is not None
    source.lines[i : i + 1] = [
        f"    rt.pack(grads_1, 1, (14,), [{names[1]}])",
        f"    rt.pack(grads_1, 1, (15,), ({names[2]},))",
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
    source.lines[i] = "    first_block = fetch(rt, shards, 2, 1)"
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
    source.replace(r"aten.add.Tensor\(x0, clone\)", "x0 + clone", "def blocks_forward")
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


# -- harmful ------------------------------------------------------------------------------------
@harmful(r"reads blocks.0.\S+, a parameter of gathered bucket 2 .*after its release")
def released_before_its_last_reader(directory: Path) -> None:
    moved(directory, r"rt.release\(full_2", r"\) = blocks_forward\(args\)  # blocks.0")


@harmful(r"what rt.unpack takes apart is a launch that was not waited for")
def wait_forgotten(directory: Path) -> None:
    edited(directory, r"full_2 = rt.wait\(gather_2\)", "full_2 = gather_2")


@harmful(
    r"bucket 3 \(blocks.1\) into slot 1 while gathered bucket 2 \(blocks.0\) is in flight there"
)
def slot_taken_twice(directory: Path) -> None:
    edited(directory, r"(gather_3 = .*slot=)\d", r"\g<1>1")
    edited(directory, r"(rt.release\(full_3, slot=)\d", r"\g<1>1")


@harmful(r"gives back slot 0, but gathered bucket 2 \(blocks.0\) lies in slot 1")
def another_slot_given_back(directory: Path) -> None:
    edited(directory, r"(rt.release\(full_2, slot=)\d", r"\g<1>0")


@harmful(r"grad norm.\S+, grad norm.\S+ differ; each value is a captured one, but in the wrong")
def gradients_exchanged(directory: Path) -> None:
    edited(directory, r"\(14, 15\), \[", "(15, 14), [", "def backward")


@harmful(r"is reduced at scale 1.0; the mean over 2 ranks is 1/2 = 0.5")
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
    edited(directory, r"rt.all_gather\(shards\[2\], bucket=2, slot=1\)", "rt.refresh(shards[2], 2)")


@harmful(r"does not compute what was captured: .*; edited: regions/blocks_forward.py")
def math_changed(directory: Path) -> None:
    source = Source(directory, "regions/blocks_forward.py")
    source.replace("1e-05", "1e-06", "def blocks_forward")
    source.write()


@harmful(r"the engine has no call gather; it has all_gather, all_reduce,")
def unknown_call(directory: Path) -> None:
    edited(directory, r"rt.all_gather\(shards\[2\]", "rt.gather(shards[2]")


@harmful(r"DataDependentOutput\w*: .*; a schedule is a straight line of calls")
def decided_by_a_value(directory: Path) -> None:
    edited(directory, r"^    x = inputs\[0\]", "    x = inputs[0]; y = 0 if int(x.sum()) else 1")


@harmful(r"NameError: name 'gather_2' is not defined")
def launch_deleted(directory: Path) -> None:
    source = Source(directory)
    del source.lines[source.at("gather_2 = ")]
    source.write()


@harmful(r"aten.add_.Tensor writes in place; emitted files compute new values only")
def written_in_place(directory: Path) -> None:
    source = Source(directory)
    i = source.at(r"embed_embedding, = embed_forward")
    source.lines.insert(i + 1, "    embed_embedding.add_(1)")
    source.write()


@harmful(r"0 outputs are returned; the program has 1")
def output_forgotten(directory: Path) -> None:
    edited(directory, r"return \[nll_loss_forward_0\]", "return []")


@harmful(r"not enough values to unpack|too many values to unpack")
def saved_value_forgotten(directory: Path) -> None:
    edited(directory, r"\[\s*x, arange, ", "[x, ")


@harmful(r"bucket 7 is none of the layout's 4")
def unknown_bucket(directory: Path) -> None:
    edited(directory, r"(gather_2 = .*bucket=)2", r"\g<1>7")


@harmful(r"positions of parameters are a tuple; this is \[14, 15\]")
def positions_as_a_list(directory: Path) -> None:
    edited(directory, r"rt.pack\(grads_1, 1, \(14, 15\)", "rt.pack(grads_1, 1, [14, 15]")


@harmful(r"norm_forward takes one list, which it empties; this is a tuple")
def arguments_as_a_tuple(directory: Path) -> None:
    edited(directory, r"norm_forward\(args\)", "norm_forward(tuple(args))")
