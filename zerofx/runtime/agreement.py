"""Agreement before every call: a rank about to run something else is named on every rank.

Each rank posts (call number, what, digest) on the board its host shares and reads the others',
never through a collective: a collective that ranks do not share hangs or aborts the process. Hosts
compare through the store (see runtime/hosts.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from zerofx.errors import DesyncError
from zerofx.runtime.board import ABSENT, FAILED, LEFT, Entry, MemoryBoard, digest_hash
from zerofx.runtime.hosts import HostLink

T = TypeVar("T")
_SAME, _DIFFERENT = "same", "different"  # how the hosts compared

_SPINS = 200  # looks without sleeping, 60 us or so: ranks in step arrive within that
_SLEEP_S = (20e-6, 2e-3)  # first and longest sleep between looks
_CHECK_S = 0.1  # how often a waiting rank looks whether the others still live
_STRAGGLERS_S = 2.0  # what the others get to post in, once a difference is known


class Agreement:
    """One rank's side of the agreement; row i of the board belongs to world rank `ranks[i]`."""

    def __init__(
        self, board: MemoryBoard, ranks: list[int], timeout_s: float, link: HostLink | None = None
    ) -> None:
        self.board = board
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.link = link
        self.rank = ranks[board.rank]
        self.call = 0
        self.what = "its first call"
        self.digest = ""
        self.unchecked = False
        self._failure: str | None = None
        self._hash = b""
        self._launched = 0
        self._others = [row for row in range(board.size) if row != board.rank]

    def agree(self, what: str, digest: str) -> None:
        """Return once every rank has announced `what` with an equal `digest`.

        `digest` may carry readable "name=value" items, separated by ";" or new lines: where ranks
        differ, the items that differ are in the message.

        Raises:
            DesyncError: a rank announced something else, left, died, or did not come in time.
        """
        self.announce(what, digest)
        self.check()

    @property
    def has_failed(self) -> bool:
        """Whether the ranks have lost each other for good."""
        return self._failure is not None

    def announce(self, what: str, digest: str) -> None:
        """Post the next call without waiting; `check` must follow before its results are used."""
        if self._failure is not None:
            raise DesyncError(f"{what} cannot run: {self._failure}")
        if self.unchecked:
            self.check()
        self.call += 1
        self.what, self.digest = what, digest
        self._hash = digest_hash(what, digest)
        self._launched = self.board.launched(self.board.rank)
        self.board.post(self.call, what, digest)
        self.unchecked = True

    def check(self) -> None:
        """Wait until every rank has posted the announced call, and compare.

        Raises:
            DesyncError: as for `agree`.
        """
        self.unchecked = False
        equal = True
        for row in self._others:
            late = partial(self._place, row)
            equal = self._await(partial(self._same, row), late, _SPINS) and equal
        if any(self.board.state(row) == FAILED for row in self._others):
            self._give_up_if_hopeless(lambda: "", 0.0)  # it had come, and has given up since
        if self.link is not None:
            self._check_hosts(self.link, equal)
        elif not equal:
            self._refuse(self._groups())

    def leave(self, reason: str) -> None:
        """Tell the others that this rank will make no further call."""
        self.board.leave(reason)

    def fail(self, message: str) -> DesyncError:
        """Post `message`, so that every rank raises it too, and return it as an error.

        There is no way back: what was launched can no longer be matched. Later calls raise too.
        """
        self._failure = self._failure or message
        self.board.leave(message, FAILED)
        if self.link is not None:
            self.link.post_failure(message)
        return DesyncError(message)

    def lost(self, number: int = 0, broken: bool = False) -> str | None:
        """Return what is known of a rank that will not come any more, None if all may.

        A rank that has announced this call and launched collective `number` has done its part and
        may end; unless the transfer is `broken`.
        """
        for row in self._others:
            state = self.board.state(row)
            if state == FAILED:
                return self.board.reason(row)
            behind = self.board.call(row) < self.call or self.board.launched(row) < number
            if state == ABSENT or not (behind or broken):
                continue
            if state == LEFT:
                return f"{self._place(row)} has left ({self.board.reason(row)})"
            if not self.board.is_alive(row):
                return f"{self._place(row)} died (process {self.board.pid(row)})"
        return self.link.failure() if self.link is not None else None

    def _place(self, row: int) -> str:
        """Name the rank of a row with the last call it announced."""
        entry = self.board.entry(row, self.board.call(row))
        if entry is None:
            return f"rank {self.ranks[row]}, before its first call,"
        return f"rank {self.ranks[row]}, last at {entry.what} (call {entry.call}),"

    def _same(self, row: int) -> bool | None:
        """Return whether the rank of `row` announced the same; None while it has not."""
        same = self.board.has(row, self.call, self._hash)
        # Read a difference twice: on some processors the number may land before the hash does.
        return same if same is not False else self.board.has(row, self.call, self._hash)

    def _await(self, look: Callable[[], T | None], late: Callable[[], str], spins: int) -> T:
        """Look until there is something; `late` says who is missing if that takes too long."""
        for _ in range(spins):
            found = look()
            if found is not None:
                return found
        started = checked = time.monotonic()
        nap, longest = _SLEEP_S
        while True:
            time.sleep(nap)
            found = look()
            if found is not None:
                return found
            now = time.monotonic()
            nap = min(longest, nap * 1.5)
            if now - checked > _CHECK_S:
                checked = now
                self._give_up_if_hopeless(late, now - started)

    def _give_up_if_hopeless(self, late: Callable[[], str], waited_s: float) -> None:
        lost = self.lost()
        if lost is None and waited_s > self.timeout_s:
            lost = f"{late()} did not arrive within {self.timeout_s:g} s (ZEROFX_TIMEOUT_S)"
        if lost is not None:
            here = f"rank {self.rank} is about to run {self.what} (call {self.call})"
            raise self.fail(f"{lost}; {here}")

    def _groups(self) -> dict[Entry, list[int]]:
        """Return who announced what at this call, after giving the last ones time to arrive."""
        deadline = time.monotonic() + _STRAGGLERS_S
        groups: dict[Entry, list[int]] = {}
        for row in range(self.board.size):
            entry = self.board.entry(row, self.call)
            while entry is None and time.monotonic() < deadline:
                time.sleep(_SLEEP_S[1])
                entry = self.board.entry(row, self.call)
            if entry is not None:
                groups.setdefault(entry, []).append(self.ranks[row])
        return groups

    def _check_hosts(self, link: HostLink, equal: bool) -> None:
        """Compare with the other hosts: their leaders meet, and tell the rest the verdict."""
        merged = {self._mine(): [self.rank]}
        if link.is_leader:
            link.post(self.call, {self._mine(): self.ranks} if equal else self._groups())
            late = partial(link.absent, self.call)
            self._await(lambda: link.have_all(self.call) or None, late, spins=0)
            merged = link.read(self.call)
            link.tell(self.call, _SAME if len(merged) == 1 else _DIFFERENT)
        elif self._await(partial(link.told, self.call), lambda: "another host", _SPINS) != _SAME:
            merged = link.read(self.call)
        if len(merged) > 1:
            self._refuse(merged)

    def _mine(self) -> Entry:
        entry = self.board.entry(self.board.rank, self.call)
        assert entry is not None
        return entry

    def _refuse(self, groups: dict[Entry, list[int]]) -> None:
        """Raise for ranks that differ; every rank finds the same difference by itself."""
        message = describe_difference(groups, self.call)
        if self.board.launched(self.board.rank) != self._launched:
            raise self.fail(message)  # what was launched for this call can never complete
        raise DesyncError(message)


def describe_difference(groups: dict[Entry, list[int]], call: int) -> str:
    """Say which ranks are about to run what; the largest group (rank 0's on a tie) comes last."""
    order = sorted(groups.items(), key=lambda item: (len(item[1]), -min(item[1])))
    (common, majority), odd = order[-1], order[:-1]
    parts = []
    for entry, ranks in odd:
        detail = ""
        if entry.what == common.what:
            detail = f" with {_only_in(entry.digest, common.digest)}"
        parts.append(f"{name_ranks(ranks)} about to run {entry.what} (call {call}){detail}")
    last = f"{name_ranks(majority, 'runs', 'run')} {common.what}"
    if any(entry.what == common.what for entry, _ in odd):
        last += f" with {_only_in(common.digest, odd[0][0].digest)}"
    return (
        f"{', '.join(parts)} while {last}; "
        "every rank must make the same calls in the same order, with the same model and plan"
    )


def name_ranks(ranks: Iterable[int], one: str = "is", many: str = "are") -> str:
    """Return "rank 3 is" or "ranks 0, 1, 2 are"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]} {one}"
    if len(names) > 8:
        names = [*names[:7], f"... ({len(names)} in all)"]
    return f"ranks {', '.join(names)} {many}"


def _only_in(digest: str, other: str) -> str:
    """Return the items of `digest` that `other` lacks, the first six."""
    theirs = set(re.split(r"[;\n]", other))
    items = [item.strip() for item in re.split(r"[;\n]", digest) if item not in theirs]
    shown = ", ".join(item for item in items[:6] if item)
    return (shown or "other contents") + (f" and {len(items) - 6} more" if items[6:] else "")
