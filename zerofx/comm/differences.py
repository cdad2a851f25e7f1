"""Descriptions of ranks that are about to differ: which ranks, which calls, which items."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from zerofx.comm.board import Entry

Published = Callable[[str], list[str]]
"""Returns the lines that a rank has published under a digest; none if it has published nothing."""

STUCK = "the transfer did not finish"  # of ranks that do the same, as the watchdog says it
_NO_LINES: list[str] = []


def describe_difference(
    groups: dict[Entry, list[int]], call: int, published: Published = lambda digest: _NO_LINES
) -> str:
    """Return the error text for ranks that differ; the largest group comes last.

    On a tie, rank 0's group counts as the largest.

    published: returns the parameters of a layout by its digest, one per line.
    """
    order = sorted(groups.items(), key=lambda item: (len(item[1]), -min(item[1])))
    (common, majority), odd = order[-1], order[:-1]
    parts, theirs = [], None
    names = [_STEPS] if len({entry.steps for entry in groups}) > 1 else []
    for entry, ranks in odd:
        detail = ""
        if entry.what == common.what:
            mine, others = _differing(entry, common, published)
            names += [_name(item) for item in (*mine, *others)]
            detail = f" with {_shown(mine)}"
            theirs = others if theirs is None else theirs
        parts.append(f"{name_ranks(ranks)} about to run {entry.what} (call {call}){detail}")
    last = f"{name_ranks(majority, 'runs', 'run')} {common.what}"
    if theirs is not None:
        last += f" with {_shown(theirs)}"
    return f"{', '.join(parts)} while {last}. {_rule([e.what for e in groups], names)}"


def is_difference(text: str) -> bool:
    """Return whether a text is that of an error for ranks that differ."""
    return re.match(r"ranks? \d[\d, .]*(\(\d+ in all\) )?(is|are) about to run ", text) is not None


NONE_OF_ITS_OWN = "no operator of its own"


def describe_graphs(groups: dict[Entry, list[int]], call: int, published: Published) -> str:
    """Return the error text for ranks with different graphs for inputs of equal sizes.

    published: returns a graph by its hash, one operator per line.
    """
    order = sorted(groups, key=lambda entry: (len(groups[entry]), -min(groups[entry])))
    pairs = [(a, b) for a in order for b in reversed(order) if a.sizes_hash == b.sizes_hash]
    odd, common = next((a, b) for a, b in pairs if a.graph_hash != b.graph_hash)
    mine, theirs = (
        Counter(re.sub(r"%\d+", "%", line) for line in published(entry.graph_hash.hex()))
        for entry in (odd, common)
    )
    here, there = (_first(a - b) for a, b in ((mine, theirs), (theirs, mine)))
    if here == there == NONE_OF_ITS_OWN:
        return (
            f"{name_ranks(groups[odd])} about to run {odd.what} (call {call}) with the operators "
            f"of {name_ranks(groups[common], '', '').strip()} in another order, from inputs of "
            "equal sizes. A loop over a set of texts runs in another order in each process. Loop "
            "over a list, or start all ranks with the same PYTHONHASHSEED."
        )
    return (
        f"{name_ranks(groups[odd])} about to run {odd.what} (call {call}) with {here} while "
        f"{name_ranks(groups[common], 'runs', 'run')} it with {there}, from inputs of equal sizes. "
        "Every rank must run the same model in the same mode (train() or eval(), frozen "
        "parameters)."
    )


def _first(lines: Counter[str]) -> str:
    """Return the first operator that only one of two graphs has, and the number of others."""
    own = [line for line in lines.elements() if not line.startswith("output(")]
    if not own:  # outputs are ignored: they differ whenever anything does
        return NONE_OF_ITS_OWN
    more = f" (and {len(own) - 1} more that differ)" if len(own) > 1 else ""
    return own[0].replace("\t", ", ") + more


# -- items: the "name=value" parts of an entry's texts --------------------------------------------
def _name(item: str) -> str:
    return item.partition("=")[0]


def _items(entry: Entry, other: Entry) -> list[str]:
    """Return the items in which an entry may differ from another one."""
    steps = entry.steps
    if not (entry.steps and other.steps):  # a rank without steps has no options to compare
        steps = entry.steps.partition(";")[0] or (f"{_STEPS}=0" if other.steps else "")
    found = re.split(r"[;\n]", f"{steps};{entry.digest}" if steps else entry.digest)
    return [item.strip() for item in found]


def _differing(mine: Entry, theirs: Entry, published: Published) -> tuple[list[str], list[str]]:
    """Return the items in which two entries differ, reduced to those that explain why."""
    a, b = _items(mine, theirs), _items(theirs, mine)
    here, there = [i for i in a if i not in b], [i for i in b if i not in a]
    shared = {_name(i) for i in here} & {_name(i) for i in there}
    if shared & {"optimizer", "param_groups"}:  # then other options may have different names
        here, there = ([i for i in items if _name(i) in shared] for items in (here, there))
    if "layout" in shared:
        one, other = ({_name(i): i.partition("=")[2] for i in items} for items in (here, there))
        first = _first_parameter(published(one["layout"]), published(other["layout"]))
        follows = {"layout", "buckets"} if first or shared - {"layout", "buckets"} else set()
        here, there = ([i for i in items if _name(i) not in follows] for items in (here, there))
        if first:
            here, there = [first[0], *here], [first[1], *there]
    return here, there


def _first_parameter(mine: list[str], theirs: list[str]) -> tuple[str, str] | None:
    """Return the first parameter in which two layouts differ, as an item of each.

    mine, theirs: "name<tab>dtype[shape]" of each parameter, in the order of the layout.
    """
    here, there = (dict(line.split("\t") for line in lines) for lines in (mine, theirs))
    if not here or not there:
        return None
    for name in (*here, *there):
        if here.get(name) != there.get(name):
            one, other = (
                f"{_PARAMETER}{name}={a[name]}" if name in a else f"{_PARAMETER}{name}=(none)"
                for a in (here, there)
            )
            return one, other
    return None


def _shown(items: list[str]) -> str:
    """Return at most six of the items, and the number of others."""
    shown = ", ".join(item for item in items[:6] if item)
    return (shown or "other contents") + (f" and {len(items) - 6} more" if items[6:] else "")


# -- suggestions ----------------------------------------------------------------------------------
_PARAMETER, _STEPS = "parameter ", "optimizer steps"
# Start of the name of a differing item -> what ranks must have in common; the first match counts.
_RULES = {
    _PARAMETER: "Every rank must build the same model: the same layers, sizes, dtypes and frozen "
    "parameters.",
    "plan.": "Every rank must be given the same plan.",
    _STEPS: "Every rank must step its optimizer after the same calls, with the same "
    "class and options.",
    "optimizer": "Every rank must make the same optimizer with the same options.",
    "param_groups": "Every rank must have the same parameter groups with the same options.",
    "torch": "Every host must have the same version of torch.",
    "deterministic": "Every rank must call torch.use_deterministic_algorithms alike.",
    "no_sync": "Every rank must enter no_sync() for the same batches.",
    "adds to gradients": "Every rank must set its gradients to None (zero_grad) after the same "
    "calls.",
    "inputs_only": "Every rank must ask autograd for the same gradients.",
    "accumulated": "Every rank must ask autograd for the same gradients.",
    "returned": "Every rank must ask autograd for the same gradients.",
    "layout": "Every rank must be given the same plan and machine.",
    "buckets to gather again": "Every rank must write to parameters, load and refresh() alike.",
}
IF_RANK_0 = (
    "The usual cause is code under `if rank == 0:`: let all ranks run it, and rank 0 alone print "
    "and write files."
)
_SAME_CALLS = "Every rank must make the same calls in the same order, with the same model and plan."
_OF_A_STEP = frozenset({"forward", "backward", "inference"})


def _rule(whats: list[str], names: list[str]) -> str:
    """Return what all ranks must have in common, by their calls or the names of differing items."""
    if len(set(whats)) == 1:
        fits = (rule for begin, rule in _RULES.items() if any(n.startswith(begin) for n in names))
        is_compile = whats[0].startswith("zerofx.compile")  # then it is an option of the optimizer
        return next(fits, _RULES["optimizer"] if is_compile else _SAME_CALLS)
    if {what.partition(" of ")[0] for what in whats} == {"zerofx.compile"}:
        return "Every rank must compile the same model."
    return f"{_same_calls(whats)} {IF_RANK_0}"


def _same_calls(whats: list[str]) -> str:
    """Return what ranks that make different calls must have in common."""
    kinds = {what.partition(" of ")[0] for what in whats}
    apart = [what for what in whats if what.partition(" of ")[0] not in _OF_A_STEP]
    if kinds == {"forward", "inference"}:
        return (
            "Every rank must call the same model or copy of it, in the same mode (train() or "
            "eval(), torch.no_grad())."
        )
    if kinds == {"forward", "backward"}:
        return "Every rank must call backward() after the same forwards, for as many batches."
    if len(set(apart)) == 1 and kinds & _OF_A_STEP:
        return (
            f"Every rank must run {apart[0]} at the same point of the loop, also if only one "
            "rank uses the result."
        )
    return _SAME_CALLS


def name_ranks(ranks: Iterable[int], one: str = "is", many: str = "are") -> str:
    """Return "rank 3 is" or "ranks 0, 1, 2 are"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]} {one}"
    if len(names) > 8:
        names = [*names[:7], f"... ({len(names)} in all)"]
    return f"ranks {', '.join(names)} {many}"
