"""Start-up of ranks: before they share a board, they find each other through the store.

A wait here polls the store instead of blocking in it. It therefore has a limit, whatever timeout
the store has, names the missing ranks, and ends immediately if a rank reports that it has raised.
Single requests have a limit too, because a store whose server was stopped never answers.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from zerofx.comm.differences import name_ranks
from zerofx.errors import DesyncError, PlanError, as_sentence

T = TypeVar("T")
STORE_GONE = "the store of the job no longer answers (the process that serves it has ended)"
_NAP_S = (2e-3, 0.1)  # first and longest sleep between two looks at the store
_LOOK_S = 0.25  # between two looks at the other ranks during a creation
_LEAST_S = 2.0  # the least time that a request gets, however late it is made
_FAREWELL_S = 3.0  # how long ranks wait for each other to report a failed creation
_PATIENCE = 3  # times torch's own limit of a creation, after which it is not waited for
_YEAR_S = 365 * 86400.0


def timeout_s() -> float:
    """Return how long a rank waits for the others: ZEROFX_TIMEOUT_S seconds, 300 if unset.

    Raises:
        PlanError: the variable is not a number of seconds above 0, or is more than a year.
    """
    text = os.environ.get("ZEROFX_TIMEOUT_S", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _YEAR_S:
        raise PlanError(
            f"ZEROFX_TIMEOUT_S is {text!r}. It must be a number of seconds above 0 and at most "
            f"{_YEAR_S:.0f} (a year). Set it to such a number, or leave it unset for 300."
        )
    return seconds


def from_environment(name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a number that torchrun sets; `default` if the variable is unset.

    Raises:
        PlanError: the variable is not a whole number within the limits.
    """
    text = os.environ[name] if default is None else os.environ.get(name, str(default))
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not is_number or not least <= int(text) <= most:
        raise PlanError(
            f"{name} is {text[:_MOST_DIGITS]!r}. It must be a whole number from {least} to {most}. "
            "Launch the ranks with torchrun, or set it on every rank."
        )
    return int(text)


_MOST_DIGITS = 20


class BoundedStore:
    """A torch store whose requests end within a limit, counted from the last `allow`.

    Within a request, torch neither has a limit nor reacts to Ctrl-C, so a thread makes the request.
    After a request without an answer no more are made, because they would queue up after it.
    """

    def __init__(self, store: Any, limit_s: float) -> None:
        self.raw, self.limit_s = store, limit_s
        self._silent = ""
        self.allow(limit_s)

    def allow(self, seconds: float) -> None:
        """Let the next requests together take up to `seconds` from now."""
        self._until = time.monotonic() + seconds

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self.raw.add, key, amount))

    def set(self, key: str, value: str) -> None:
        self._ask(self.raw.set, key, value)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self._ask(self.raw.compare_set, key, expected, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(self.raw.check, keys))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(self.raw.get, key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask(self.raw.multi_get, keys))

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a request.

        Raises:
            DesyncError: this or an earlier request was not answered within the limit.
            RuntimeError: raised by the request itself, for example if the server has ended.
        """
        if self._silent:
            raise DesyncError(self._silent)
        try:
            return within(max(self._until - time.monotonic(), _LEAST_S), request, *args)
        except TimeoutError as error:
            self._silent = (
                f"the store of the job did not answer within {self.limit_s:g} s "
                f"(ZEROFX_TIMEOUT_S). The process that serves it ({_server()}) may have been "
                "stopped. Continue it, or end the job"
            )
            raise DesyncError(self._silent) from error


def within(
    limit_s: float, request: Callable[..., T], *args: Any, look: Callable[[], None] | None = None
) -> T:
    """Return the result of `request(*args)`, run by a thread; Ctrl-C ends the wait.

    look: is called several times per second meanwhile; what it raises ends the wait too.

    Raises:
        TimeoutError: the request has not ended within the limit. The thread stays.
    """
    answers: list[T] = []
    errors: list[Exception] = []
    ended = threading.Event()

    def run() -> None:
        try:
            answers.append(request(*args))
        except Exception as error:  # noqa: BLE001  (raised below)
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="zerofx-store", daemon=True).start()
    until = time.monotonic() + limit_s
    while not ended.wait(limit_s if look is None else min(limit_s, _LOOK_S)):
        if time.monotonic() >= until:
            raise TimeoutError(f"no answer within {limit_s:.1f} s.")
        if look is not None:
            look()
    if errors:
        raise errors[0]
    return answers[0]


class Meeting:
    """One start-up of `size` ranks that have `store` to themselves, seen from rank `rank`.

    hosts: the known hosts of ranks, for messages. elsewhere: the ranks on other hosts than this.
    lost: returns the description of a lost rank; asked now and then during every wait.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        size: int,
        limit_s: float,
        hosts: dict[int, str] | None = None,
    ) -> None:
        self.store, self.rank, self.size, self.limit_s = store, rank, size, limit_s
        self.hosts: dict[int, str] = {} if hosts is None else hosts
        self.elsewhere: set[int] = set()
        self.lost: Callable[[], str | None] = lambda: None
        self._looked = time.monotonic()

    def share(self, topic: str, value: str) -> list[str]:
        """Return what every rank shares under a topic, in rank order, once all have shared.

        Raises:
            DesyncError: a rank did not arrive within the limit, or has raised; names it.
        """
        self.store.allow(self.limit_s)
        with store_errors():
            self.store.set(f"{topic}/{self.rank}", value)
            if self.store.add(f"{topic}/count", 1) == self.size:
                self.store.set(f"{topic}/complete", "")
        self._await(f"{topic}/complete", topic)
        with store_errors():
            return [text.decode() for text in self.store.multi_get(self._keys(topic))]

    def get(self, key: str, source: int) -> str:
        """Return the value that rank `source` sets for a key, once it has set it.

        Raises:
            DesyncError: it was not set within the limit, or a rank has raised; names it.
        """
        self._await(key, key, source)
        with store_errors():
            return self.store.get(key).decode()

    def tell(self, reason: str) -> None:
        """Make the ranks that wait in this meeting, or reach it later, raise `reason`.

        The first reason is kept.
        """
        self.store.allow(_LEAST_S)
        with contextlib.suppress(RuntimeError):  # without a store, they notice by themselves
            self.store.compare_set("raised", "", reason)

    def fail(self, message: str) -> DesyncError:
        """Return `message` as an error, after reporting it to the other ranks."""
        self.tell(message)
        return DesyncError(message)

    def check(self) -> None:
        """Raise if another rank has reported an error, or is known to be lost."""
        with store_errors():
            told = self.store.get("raised").decode() if self.store.check(["raised"]) else None
        if told is not None:
            raise DesyncError(f"{as_sentence(told)} Rank {self.rank} waited for it to start up.")
        if time.monotonic() - self._looked < _LOOK_S:
            return
        lost, self._looked = self.lost(), time.monotonic()
        if lost is not None:
            raise self.fail(f"{as_sentence(lost)} Rank {self.rank} waits for it to start up.")

    @contextlib.contextmanager
    def making(self, what: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
        """Run something that torch does with all ranks; its errors then name the missing ranks.

        ranks: those that take part, if not all do.

        Raises:
            DesyncError: in place of a RuntimeError of torch.
        """
        started = time.monotonic()
        try:
            yield
        except DesyncError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self._explain(what, time.monotonic() - started, error, ranks) from error
        with store_errors():
            self.store.set(f"{what}/{self.rank}", "")

    def made(self, what: str, make: Callable[[], T], ranks: Sequence[int] | None = None) -> T:
        """Return what `make` creates with all ranks, or `ranks`; look at the others meanwhile.

        torch waits for them until its own limit, even if one has died, so a thread makes the call.
        It stays until that limit if another rank is lost.

        Raises:
            DesyncError: in place of a RuntimeError of torch; or another rank is lost.
        """
        with self.making(what, ranks):
            return within(_PATIENCE * self.limit_s, make, look=self.check)

    def name(self, ranks: list[int]) -> str:
        """Return "rank 1 (host a)" or "ranks 1, 2"; with the host of a single rank if known."""
        named = name_ranks(ranks, "", "").strip()
        host = self.hosts.get(ranks[0]) if len(ranks) == 1 else None
        return named + (f" (host {host})" if host else "")

    def _explain(
        self, what: str, waited_s: float, error: Exception, ranks: Sequence[int] | None
    ) -> DesyncError:
        """Name the ranks that neither succeeded nor failed: the others fail at about this time."""
        self.check()
        with store_errors():
            self.store.set(f"{what}/{self.rank}", "")
        deadline = time.monotonic() + _FAREWELL_S
        while (missing := self._missing(what, ranks)) and time.monotonic() < deadline:
            time.sleep(_NAP_S[1])
            self.check()
        doing = f"while rank {self.rank} was making {what}, for {waited_s:.1f} s"
        if missing:
            return self.fail(f"{self.name(missing)} did not take part {doing} (ZEROFX_TIMEOUT_S).")
        return self.fail(
            f"every rank came {doing}, but they could not be connected: {as_sentence(error)} Check "
            "the ..._SOCKET_IFNAME variables and the network between the hosts."
        )

    def _await(self, key: str, topic: str, source: int | None = None) -> None:
        self.store.allow(self.limit_s)
        deadline = time.monotonic() + self.limit_s
        nap, longest = _NAP_S[0], max(_NAP_S[1], self.size / 2000)
        while True:
            with store_errors():
                if self.store.check([key]):
                    return
            self.check()
            if time.monotonic() > deadline:
                missing = self._missing(topic) if source is None else [source]
                late = self.name(missing) if missing else "a rank that ended when it arrived"
                raise self.fail(
                    f"{late} did not come within "
                    f"{self.limit_s:g} s (ZEROFX_TIMEOUT_S). Rank {self.rank} waits for it to "
                    "start up."
                )
            time.sleep(nap)
            nap = min(longest, nap * 1.5)

    def _keys(self, topic: str) -> list[str]:
        return [f"{topic}/{rank}" for rank in range(self.size)]

    def _missing(self, topic: str, ranks: Sequence[int] | None = None) -> list[int]:
        """Return the ranks, of `ranks` or of all, that have shared nothing under a topic."""
        with store_errors():
            keys = enumerate(self._keys(topic))
            late = [rank for rank, key in keys if not self.store.check([key])]
        return late if ranks is None else [rank for rank in late if rank in ranks]


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn errors of the store into errors that say what they mean, and who serves the store."""
    try:
        yield
    except DesyncError:
        raise
    except RuntimeError as error:
        raise DesyncError(f"{store_gone()}: {as_sentence(error)}") from error


def store_gone() -> str:
    """Return the message that the store is gone, with the process that served it, if known."""
    return f"{STORE_GONE[:-1]}: {_server()})"


def _server() -> str:
    """Return the name of the process that serves the store of the job."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun's"
    return "rank 0, unless the script made the store itself"
