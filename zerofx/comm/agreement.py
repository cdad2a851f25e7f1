"""Agreement before every call: if a rank is about to run something else, every rank names it.

Each rank posts (call number, description, digest) on a board shared by its host, and reads the
entries of the others. It never uses a collective for this: a collective that ranks do not share
hangs or aborts the process. Hosts compare through the store (see comm/hosts.py).
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx.comm.board import (
    ABSENT,
    FAILED,
    LEFT,
    NO_GRAPH,
    Entry,
    MemoryBoard,
    entry_key,
)
from zerofx.comm.differences import IF_RANK_0, describe_difference, describe_graphs
from zerofx.comm.flight_recorder import FlightRecorder
from zerofx.comm.hosts import Break, HostLink
from zerofx.comm.meeting import store_errors
from zerofx.errors import DesyncError, as_sentence

T = TypeVar("T")
_SAME, _DIFFERENT = "same", "different"  # results of comparing the hosts

_SPINS = 200  # looks without sleeping, about 60 us: ranks in step arrive within that time
_SLEEP_S = (20e-6, 2e-3)  # first and longest sleep between looks
_CHECK_S = 0.1  # how often a waiting rank checks whether the others are alive
_STRAGGLERS_S = 2.0  # how long the others may take to post once a difference is known
_WELL, _UNWELL = "well", "not well"  # the digests of `all_well`
_LETTER_NAP_S = (2e-3, 0.2)  # first and longest sleep between looks for letters
_BEAT_S = 0.25  # how often a busy rank gives a sign of life on the board
_POST_S = 2.0  # how often it gives one to the other hosts
ENDED = "its process ended, or its model was deleted"  # why a rank left, if it had no error
_AFTER_A_BREAK = "the call before=broken off;"  # in the digest of the next call


class Agreement:
    """One rank's side of the agreement; row i of the board belongs to world rank `ranks[i]`.

    store: through which ranks with different graphs read each other's graph, if there is one.
    hosts: the host of each rank, for messages.
    record: the record of this rank's actions, which remains after the job has died.
    """

    def __init__(
        self,
        board: MemoryBoard,
        ranks: list[int],
        timeout_s: float,
        link: HostLink | None = None,
        store: Any = None,
        hosts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.board = board
        self.hosts = hosts
        self.record = FlightRecorder(None, "", {})
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.link = link
        self.heartbeat = Heartbeat(board, link)
        self.rank = ranks[board.rank]
        self.call = 0
        self.what = "its first call"
        self._failure: str | None = None
        self._store = store
        self._key = b""
        self._agreed = 0  # the last call that every rank has begun
        self._differing: dict[Entry, list[int]] = {}  # entry -> ranks, if the ranks differed
        self._broken = 0  # the last call that this rank broke off
        self._others = [row for row in range(board.size) if row != board.rank]

    def agree(self, what: str, digest: str, graph: bytes = NO_GRAPH, steps: str = "") -> None:
        """Return once every rank has announced `what` with an equal `digest` and equal `steps`.

        Both may contain readable "name=value" items, separated by ";" or new lines. If ranks
        differ, the message shows the items that differ. `graph` is a hash of the sizes of the
        call's inputs (8 bytes), then a hash of its graph (8). Ranks with equal sizes must have
        equal graphs. Ranks with other sizes may run another graph, since sizes are part of it.

        Raises:
            DesyncError: a rank announced something else, left, died, or did not arrive in time.
        """
        if self._failure is not None:
            raise DesyncError(f"{what} cannot run: {as_sentence(self._failure)}")
        if self.has_broken_off:  # this differs from ranks that finished the previous call
            digest = _AFTER_A_BREAK + digest
        self.call += 1
        self.what = what
        self._key = entry_key(what, digest, graph, steps)
        self.board.post(self.call, what, digest, graph, steps)
        self.record.note(self.call, 0, what)
        equal = True
        for row in self._others:
            late = partial(self._place, row)
            equal = self._await(partial(self._same, row), late, _SPINS) and equal
        if any(self.board.state(row) == FAILED for row in self._others):
            self._give_up_if_hopeless(lambda: "", 0.0)  # it had arrived, but has given up since
        if self.link is not None:
            self._check_hosts(self.link, equal)
        elif not equal and not self._fit_here():
            self._refuse(self._groups())
        self._agreed = self.call

    def publish(self, digest: str, text: str) -> None:
        """Publish a text, so that ranks with another digest can compare it line by line."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # without the store, only the message is poorer
            if not self._store.check([_text_key(digest)]):
                packed = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
                self._store.set(_text_key(digest), packed)

    def all_well(self, what: str, is_well: bool, steps: str = "") -> bool:
        """Return, once every rank has reached `what`, whether `is_well` holds on all of them.

        Raises:
            DesyncError: as `agree`.
        """
        self._differing = {}
        try:
            self.agree(what, _WELL if is_well else _UNWELL, steps=steps)
        except DesyncError:
            found = {(entry.what, entry.digest) for entry in self._differing}
            same_steps = len({entry.steps for entry in self._differing}) == 1
            for before in ("", _AFTER_A_BREAK) if same_steps else ():
                if found == {(what, before + _WELL), (what, before + _UNWELL)}:
                    return False
            raise
        return is_well

    def agree_but_for(
        self, what: str, digest: str, choice: str, graph: bytes = NO_GRAPH, steps: str = ""
    ) -> set[str]:
        """Return the choices of all ranks, once each has announced `what` with an equal `digest`.

        choice: a "name=value" item, in which ranks may differ.

        Raises:
            DesyncError: as `agree`.
        """
        self._differing = {}
        before = _AFTER_A_BREAK if self.has_broken_off else ""
        try:
            self.agree(what, f"{choice};{digest}", graph, steps)
        except DesyncError:
            found = set()
            for entry in self._differing:
                other = entry.digest.removeprefix(before).partition(";")[0]
                # the hash covers the whole digest, of which the entry's text may be only a part
                texts = entry_key(what, f"{before}{other};{digest}", NO_GRAPH, steps)[:16]
                has_same_sizes = entry.sizes_hash == graph[:8]
                if entry.texts_hash != texts or (has_same_sizes and entry.graph_hash != graph[8:]):
                    raise
                found.add(other)
            if not found:
                raise
            self._agreed = self.call
            return found
        return {choice}

    @property
    def has_failed(self) -> bool:
        """Whether the ranks have lost each other permanently."""
        return self._failure is not None

    @property
    def has_broken_off(self) -> bool:
        """Whether this rank broke off its last call."""
        return self.call > 0 and self._broken == self.call

    def break_off(self, reason: str) -> None:
        """Tell the others that an exception ended this call on this rank.

        They raise if they wait for more of it, or have finished it. If every rank breaks it off
        after the same launches, all may continue with another call.
        """
        if self._failure is not None or self._agreed != self.call or self.call == 0:
            return
        self._broken = self.call
        self.board.break_off(self.call, reason)
        if self.link is not None:
            launched = self.board.launched(self.board.rank)
            self.link.post_break(Break(self.rank, self.call, launched, self.what, reason))

    def leave(self, reason: str) -> None:
        """Tell the others of this host that this rank makes no further call."""
        self.board.leave(reason)

    def quit(self, reason: str) -> None:
        """Leave, and tell the other hosts too, since the store still answers."""
        self.leave(reason)
        if self.link is not None and self._failure is None:
            launched = self.board.launched(self.board.rank)
            last = Break(self.rank, self.call, launched, self.what, reason, is_last=True)
            self.link.post_break(last)

    def fail(self, message: str) -> DesyncError:
        """Post `message`, so that every rank raises it too, and return it as an error.

        This is final: launched collectives can no longer be matched. Later calls raise too.
        """
        self._failure = self._failure or message
        self.board.leave(message, FAILED)
        self.record.end(message, is_own=False)
        if self.link is not None:
            self.link.post_failure(message)
        return DesyncError(message)

    def failed_elsewhere(self) -> str | None:
        """Return why another rank of this host has given up; None if none has."""
        for row in self._others:
            if self.board.state(row) == FAILED:
                return self.board.reason(row)
        return None

    def stopped(self) -> str:
        """Name the stopped processes of this host's ranks, and the command that continues them."""
        rows = [row for row in self._others if self.board.is_stopped(row)]
        if not rows:
            return ""
        names = " and ".join(self.name(self.ranks[row]) for row in rows)
        pids = " ".join(str(self.board.pid(row)) for row in rows)
        return (
            f"{names} {'is' if len(rows) == 1 else 'are'} stopped (kill -CONT {pids} continues it)"
        )

    def name(self, rank: int) -> str:
        """Name a rank with its process, if it is on this host, and its host."""
        where = [f"process {self.board.pid(self.ranks.index(rank))}"] if rank in self.ranks else []
        where += [f"on {self.hosts[rank]}"] if rank in self.hosts else []
        return f"rank {rank} ({' '.join(where)})" if where else f"rank {rank}"

    def letters(self, size: int) -> Letters:
        """Return the means by which threads of all `size` ranks exchange messages."""
        assert self._store is not None
        return Letters(self._store.raw, self.rank, size, self.dead)

    def dead(self) -> str | None:
        """Name a rank that has died. A rank that has left is fine: it has done its part."""
        for row in self._others:
            if self.board.state(row) != ABSENT and not self.board.is_alive(row):
                return f"{self._place(row)} died"
        told = "" if self.link is None else self._store.raw.get("failure").decode()
        return self._failure or told or None

    def lost(self, number: int = 0, broken: bool = False) -> str | None:
        """Return the reason why a rank will not arrive any more; None if all may still arrive.

        A rank that has announced this call and launched collective `number` has done its part. It
        may end, or break the call off, unless the transfer is `broken`.
        """
        if (failure := self.failed_elsewhere()) is not None:
            return failure
        for row in self._others:
            state = self.board.state(row)
            behind = self.board.call(row) < self.call or self.board.launched(row) < number
            if state == ABSENT or not (behind or broken):
                continue
            if state == LEFT:
                return f"{self._place(row)} has left ({self.board.reason(row)})"
            if not self.board.is_alive(row):
                return f"{self._place(row)} died"
            call = self.board.call(row)
            if self.board.broke_off(row, call) is not None and self._is_missed(call):
                return f"{self._place(row)} does not continue"
        return self._lost_elsewhere(number) if self.link is not None else None

    def _is_missed(self, call: int) -> bool:
        """Return whether this rank needs collectives of `call` that were not launched."""
        return call == self.call or (call == self.call - 1 and self._broken != call)

    def _lost_elsewhere(self, number: int) -> str | None:
        """Return the reason, reported by another host, why a rank will not arrive any more."""
        assert self.link is not None
        failure = self.link.failure()
        if failure is not None:
            return failure
        for broken in self.link.breaks():
            is_behind = broken.call < self.call or broken.launched < number
            if broken.rank == self.rank or not is_behind:
                continue
            place = f"{self.name(broken.rank)}, last at {broken.what} (call {broken.call})"
            if broken.is_last:
                return f"{place}, has left ({broken.reason})"
            if self._is_missed(broken.call):
                return f"{place}, broken off by {broken.reason}, does not continue"
        return None

    def _place(self, row: int) -> str:
        """Name the rank of a row with the last call that it announced, and its outcome."""
        entry = self.board.entry(row, self.board.call(row))
        where = f"last at {entry.what} (call {entry.call})" if entry else "before its first call"
        reason = self.board.broke_off(row, self.board.call(row))
        if reason is not None:
            where += f", broken off by {reason}"
        if self.board.busy(row):
            where += f", busy {self.board.busy(row)}"
        return f"{self.name(self.ranks[row])}, {where},"

    def _same(self, row: int) -> bool | None:
        """Return whether the rank of `row` announced the same; None if it announced nothing yet."""
        same = self.board.has(row, self.call, self._key)
        # Read a difference twice: on some processors, the number may be visible before the key.
        return same if same is not False else self.board.has(row, self.call, self._key)

    def _fit_here(self) -> bool:
        """Return whether the ranks of this host, which have all announced this call, fit."""
        return _fit(self.board.key(row, self.call) for row in range(self.board.size))

    def _await(self, look: Callable[[], T | None], late: Callable[[], str], spins: int) -> T:
        """Call `look` until it returns a result; `late` names the missing rank after the limit.

        The limit counts from the last sign of life of any busy rank.
        """
        for _ in range(spins):
            found = look()
            if found is not None:
                return found
        started = checked = time.monotonic()
        nap, longest = _SLEEP_S
        beats = self.heartbeat.count()
        while True:
            time.sleep(nap)
            found = look()
            if found is not None:
                return found
            now = time.monotonic()
            nap = min(longest, nap * 1.5)
            if now - checked > _CHECK_S:
                checked = now
                if (heard := self.heartbeat.count()) != beats:
                    beats, started = heard, now
                self._give_up_if_hopeless(late, now - started)

    def _give_up_if_hopeless(self, late: Callable[[], str], waited_s: float) -> None:
        lost, rule = self.lost(), ""
        if lost is None and waited_s > self.timeout_s:
            lost = f"{late()} did not arrive within {self.timeout_s:g} s (ZEROFX_TIMEOUT_S)"
            if stopped := self.stopped():
                lost += f". {stopped}"
            rule = (
                " Every rank must make as many calls, and use several models in the same order. "
                f"{IF_RANK_0}"
            )
        elif lost is not None and lost.endswith(f"has left ({ENDED})"):
            rule = f" {IF_RANK_0}"
        if lost is not None:
            here = f"{self.name(self.rank)} is about to run {self.what} (call {self.call})."
            raise self.fail(f"{as_sentence(lost)} {here[0].upper()}{here[1:]}{rule}")

    def _groups(self) -> dict[Entry, list[int]]:
        """Return each announcement of this call with its ranks, after waiting for late ones."""
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
        """Compare with the other hosts: their leaders meet, and tell the others the verdict."""
        merged = {self._mine(): [self.rank]}
        if link.is_leader:
            link.post(self.call, {self._mine(): self.ranks} if equal else self._groups())
            late = partial(link.absent, self.call)
            self._await(lambda: link.have_all(self.call) or None, late, spins=0)
            merged = link.read(self.call)
            link.tell(self.call, _SAME if _fit(e.key for e in merged) else _DIFFERENT)
        elif self._await(partial(link.told, self.call), lambda: "another host", _SPINS) != _SAME:
            merged = link.read(self.call)
        if not _fit(entry.key for entry in merged):
            self._refuse(merged)

    def _mine(self) -> Entry:
        entry = self.board.entry(self.board.rank, self.call)
        assert entry is not None
        return entry

    def _refuse(self, groups: dict[Entry, list[int]]) -> None:
        """Raise an error for ranks that differ; every rank finds the same difference by itself."""
        if len({entry.texts_hash for entry in groups}) == 1:
            message = describe_graphs(groups, self.call, self._published)
        else:
            message = describe_difference(groups, self.call, self._published)
        for row, rank in enumerate(self.ranks):
            reason = self.board.broke_off(row, self.call - 1)
            if reason is not None:
                message += f" Rank {rank} broke off call {self.call - 1}: {as_sentence(reason)}"
        self._differing = groups
        raise DesyncError(message)

    def _published(self, digest: str) -> list[str]:
        """Return the lines that a rank has published under a digest; none if unavailable."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([_text_key(digest)]):
                    packed = self._store.get(_text_key(digest))
                    return zlib.decompress(base64.b64decode(packed)).decode().split("\n")
        return []


def _text_key(digest: str) -> str:
    return f"text/{digest}"


def _fit(keys: Iterable[bytes]) -> bool:
    """Return whether ranks with these keys may run together (see `Agreement.agree`)."""
    graphs: dict[bytes, bytes] = {}
    texts: bytes | None = None
    for key in keys:
        if texts is None:
            texts = key[:16]
        if key[:16] != texts or graphs.setdefault(key[16:24], key[24:]) != key[24:]:
            return False
    return True


class Letters:
    """Messages between threads of all ranks, through the store: without a collective or call.

    lost: returns why a rank will write no more; None if all may still write.
    """

    def __init__(self, store: Any, rank: int, size: int, lost: Callable[[], str | None]) -> None:
        self._store, self._rank, self._size, self._lost = store, rank, size, lost

    def exchange(self, topic: str, letter: bytes) -> list[bytes]:
        """Return the letters of all ranks, in rank order, once all have written.

        topic: a name that is used for this exchange only.

        Raises:
            DesyncError: a rank died before it wrote, or the store does not answer.
        """
        keys = [f"letters/{topic}/{rank}" for rank in range(self._size)]
        nap, longest = _LETTER_NAP_S
        with store_errors():
            self._store.set(keys[self._rank], base64.b64encode(letter).decode())
            while not self._store.check(keys):
                if (lost := self._lost()) is not None and not self._store.check(keys):
                    raise DesyncError(as_sentence(lost))
                time.sleep(nap)
                nap = min(longest, nap * 1.5)
            found = [base64.b64decode(text) for text in self._store.multi_get(keys)]
            if self._store.add(f"letters/{topic}/read", 1) == self._size:
                for key in (*keys, f"letters/{topic}/read"):
                    self._store.delete_key(key)
        return found


class Heartbeat:
    """Signs of life from a rank that is busy for long, which the others keep waiting for.

    They are given by a thread, so that a process that is stopped or has ended gives none.
    """

    def __init__(self, board: MemoryBoard, link: HostLink | None) -> None:
        self._board, self._link = board, link

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Give signs of life while the body runs."""
        ended = threading.Event()
        thread = threading.Thread(
            target=self._beat, args=(ended,), name="zerofx-heartbeat", daemon=True
        )
        self._board.set_busy(what)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._board.set_busy("")

    def count(self) -> int:
        """Return how many signs of life all ranks have given; it grows while any rank is busy."""
        here = sum(self._board.beats(row) for row in range(self._board.size))
        return here + (self._link.beats() if self._link is not None else 0)

    def _beat(self, ended: threading.Event) -> None:
        posted = time.monotonic() - _POST_S
        while not ended.wait(_BEAT_S):
            self._board.beat()
            now = time.monotonic()
            if self._link is not None and now - posted >= _POST_S:
                posted = now
                self._link.beat()


# -- optimizer steps ------------------------------------------------------------------------------
# Steps are announced with the next call, so that comparing them needs no message of its own. A rank
# that steps with other options, more often or not at all is named before its parameters are next
# gathered.
_MANNER = frozenset({"foreach", "fused", "capturable"})  # how a step is computed, not its result


class StepLog:
    """The steps over one world's parameters since the last agreement."""

    def __init__(self) -> None:
        self._since: list[str] = []
        self._last: tuple[Any, str] = ((), "")

    def note(self, optimizer: Optimizer) -> None:
        """Record a step that has just been made."""
        options = options_of(optimizer)
        if options != self._last[0]:  # they change only if something schedules them
            self._last = options, _text(options)
        self._since.append(self._last[1])

    def take(self) -> str:
        """Return the steps since the last call as readable "name=value" items, and forget them."""
        if not self._since:
            return ""
        since, self._since = self._since, []
        return f"optimizer steps={len(since)};{';'.join(dict.fromkeys(since))}"


def options_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return an optimizer's class, and the values of its options in each parameter group.

    Options are those with defaults in the constructor; other keys of groups belong to the user. The
    implementation of a step (`foreach`, `fused`, `capturable`) may differ between ranks.
    """
    names = [name for name in optimizer.defaults if name not in _MANNER]
    groups = [
        tuple([_plain(group.get(name)) for name in names]) for group in optimizer.param_groups
    ]
    return type(optimizer).__name__, tuple(names), tuple(groups)


def describe_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Return the options as readable "name=value" items; several optimizers are numbered."""
    if len(optimizers) == 1:
        return _text(options_of(optimizers[0]))
    texts = [_text(options_of(each)).split(";") for each in optimizers]
    items = [f"optimizers[{i}].{item}" for i, text in enumerate(texts) for item in text]
    return ";".join(items) or "optimizer=None"


def _plain(value: Any) -> Any:
    """Return the value of an option; for a tensor on a device only "tensor", as reading waits."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "tensor"
    if isinstance(value, (tuple, list)):
        return tuple([_plain(v) for v in value])
    is_simple = value is None or isinstance(value, (bool, int, float, str))
    return value if is_simple else type(value).__name__


def _text(options: tuple[Any, ...]) -> str:
    kind, names, groups = options
    items = [f"optimizer={kind}", f"param_groups={len(groups)}"]
    for i, values in enumerate(groups):
        where = f"param_groups[{i}]." if len(groups) > 1 else ""
        pairs = zip(names, values, strict=True)
        items += [f"{where}{name}={value}" for name, value in pairs]
    return ";".join(items)
