"""How a test edits the collectives of values in a schedule, as a hand might."""

from __future__ import annotations

import re
from pathlib import Path

from edits import Source

LAUNCH = r" (\w+) = rt\.(reduce|scatter|gather|swap)_values\("


def _first(source: Source, after: str) -> str:
    """Return the name of the first launch of a function."""
    found = re.search(LAUNCH, source.lines[source.at(LAUNCH, after)])
    assert found is not None
    return found[1]


def waited_for_at_once(directory: Path, function: str) -> None:
    """Move a wait to directly after its launch."""
    source = Source(directory)
    after = f"def {function}"
    launch = _first(source, after)
    wait = source.lines.pop(source.at(rf"= rt.wait\({launch}\)", after))
    source.lines.insert(source.at(f"{launch} = rt", after) + 1, wait)
    source.write()


def launched_later(directory: Path, function: str) -> None:
    """Move a launch, and the `del` of what it sends, to directly before its wait."""
    source = Source(directory)
    after = f"def {function}"
    launch = _first(source, after)
    first = source.at(f"{launch} = rt", after)
    rows = [source.lines.pop(first)]
    if source.lines[first].lstrip().startswith("del "):
        rows.append(source.lines.pop(first))
    wait = source.at(rf"= rt.wait\({launch}\)", after)
    source.lines[wait:wait] = rows
    source.write()


def joined_twice(text: str) -> str:
    """Sum a sum."""
    again = "rt.wait(rt.reduce_values(rt.wait(sum_0), axis='tensor'))"
    return text.replace("rt.wait(sum_0)", again, 1)
