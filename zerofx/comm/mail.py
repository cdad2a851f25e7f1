"""Messages between processes of one host: the receiver copies them out of the sender's memory.

Over gloo's sockets the kernel copies each byte twice, and threads of gloo wake up for it on the
cores that compute. Here a rank only posts where its tensor is, and the other one copies it once
(Linux's `process_vm_readv`, as in MPI libraries), as soon as both have launched: on the spot if it
launches second, otherwise at its next launch or in its wait. Short messages are sent with the post.

Each pair of ranks has a Unix socket for posts and receipts: the end of a process is noticed at
once, and `wait` sleeps in the kernel. All ranks of a world must be on one host and be able to read
each other's memory; otherwise gloo carries all messages.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from zerofx.comm.meeting import Meeting
from zerofx.errors import PlanError, ShardError, as_sentence

VARIABLE = "ZEROFX_TRANSPORT"
"""`memory` (the default) or `gloo`: what carries messages between ranks of one host."""

_SHORT = 16 << 10  # bytes of a message that is sent with its post
_HEADER = struct.Struct("<BBIQQQ")  # kind, channel, tag, number, address, bytes
_POST, _RECEIPT, _FAREWELL = range(3)
_HELLO = struct.Struct("<QQ16s")  # rank, and the address and the value of a token to read
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_PATIENCE_S = 30.0  # for an answer of a process that is known to be connecting
_FAREWELL_S = 2.0  # for what is left to send when a connection is closed
_ONCE = 1 << 30  # bytes that one system call reads; Linux limits it to 2 GiB less a page
_LONGEST_S = 3600.0  # of one sleep; the kernel counts its milliseconds in 31 bits
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_SET_READERS, _ANY = 0x59616D61, -1  # of prctl: which processes may read this one's memory


class _Extent(ctypes.Structure):
    """Linux's `struct iovec`: a stretch of memory."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _memory_reader() -> Any:
    """Return Linux's `process_vm_readv`, or None where there is none."""
    if not (hasattr(select, "epoll") and hasattr(socket, "SO_PEERCRED")):
        return None
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is not None:
        number, place = ctypes.c_ulong, ctypes.POINTER(_Extent)
        read.argtypes = [ctypes.c_int, place, number, place, number, number]
        read.restype = ctypes.c_ssize_t
    return read


_READ = _memory_reader()


def read_memory(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy bytes from an address of process `pid` to an address of this one.

    Raises:
        OSError: the process has ended, or may not be read.
    """
    done = 0
    while done < nbytes:
        length = min(nbytes - done, _ONCE)
        here, there = _Extent(target + done, length), _Extent(source + done, length)
        got = _READ(pid, here, 1, there, 1, 0)
        if got <= 0:
            raise OSError(as_sentence(os.strerror(ctypes.get_errno())))
        done += got


def check_memory(*tensors: Tensor) -> None:
    """Raise if a tensor has no memory that a message could be read from, or written to.

    A tensor of `torch.compile`'s, `torch.export`'s or zerofx's tracing has none: its address is 0.

    Raises:
        ShardError: one has none.
    """
    for tensor in tensors:
        if tensor.nbytes and not _address(tensor):
            raise ShardError(
                f"a collective was called on a tensor of shape {list(tensor.shape)} that has no "
                "memory, as in code that a compiler is tracing (FakeTensorMode, torch.export). "
                "Call the compiled model, and whatever gathers its parameters, outside of it."
            )


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has no memory."""
    try:
        return tensor.untyped_storage().data_ptr()  # a view begins after it
    except RuntimeError:  # a wrapper without a storage
        return 0


class Transfer:
    """A message on its way to or from another rank."""

    __slots__ = ("_tensor", "address", "is_done", "nbytes", "peer")

    def __init__(self, peer: _Peer, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a message is one stretch of memory"
        check_memory(tensor)
        self.peer = peer
        self.nbytes = tensor.nbytes
        self.address = tensor.data_ptr()
        self.is_done = False
        self._tensor: Tensor | None = tensor  # its memory must stay until the end

    def end(self) -> None:
        self.is_done, self._tensor = True, None

    def is_completed(self) -> bool:
        """Return whether the message has arrived, without a look at new posts."""
        return self.is_done

    def wait(self, timeout: timedelta) -> bool:
        """Wait until the message has arrived.

        Raises:
            RuntimeError: the other process has ended or closed the connection, or the time is up.
        """
        if not self.is_done:
            _OFFICE.wait(self, timeout.total_seconds())
        return True


class _Post(NamedTuple):
    """A message that the other process has posted; `content` is a short one itself."""

    number: int
    address: int
    nbytes: int
    content: bytes


class _Peer:
    """The other process of a connection: what was posted on both sides and is not yet done."""

    def __init__(self, rank: int, pid: int, connection: socket.socket) -> None:
        self.rank, self.pid, self.connection = rank, pid, connection
        self.fileno = connection.fileno()
        connection.setblocking(False)
        self.ended = ""  # why no further message comes or goes
        self.gave_up = False
        self._number = 0
        self._unsent: deque[tuple[bytes, Transfer | None]] = deque()
        self._sent: dict[int, Transfer] = {}
        self._expected: dict[tuple[int, int], deque[Transfer]] = {}
        self._arrived: dict[tuple[int, int], deque[_Post]] = {}

    def send(self, tensor: Tensor, channel: int, tag: int) -> Transfer:
        transfer = Transfer(self, tensor)
        if self.ended:
            raise RuntimeError(as_sentence(self.ended))
        self._number += 1
        self._sent[self._number] = transfer
        place = transfer.address, transfer.nbytes
        post = _HEADER.pack(_POST, channel, tag, self._number, *place)
        if transfer.nbytes <= _SHORT:
            post += ctypes.string_at(*place)
        self.write(post)
        return transfer

    def receive(self, tensor: Tensor, channel: int, tag: int) -> Transfer:
        transfer = Transfer(self, tensor)
        arrived = self._arrived.get((channel, tag))
        if self.gave_up or (self.ended and not arrived):
            raise RuntimeError(as_sentence(self.ended))
        if arrived:
            self._take(transfer, arrived.popleft())
        else:
            self._expected.setdefault((channel, tag), deque()).append(transfer)
        return transfer

    def handle(self, message: bytes) -> None:
        """React to a post or a receipt of the other process."""
        kind, channel, tag, number, address, nbytes = _HEADER.unpack_from(message)
        if kind == _RECEIPT:
            self._sent.pop(number).end()
            return
        if kind == _FAREWELL:
            self.gave_up = True
            self.end(f"process {self.pid} gave up")
            return
        post = _Post(number, address, nbytes, message[_HEADER.size :])
        expected = self._expected.get((channel, tag))
        if expected:
            self._take(expected.popleft(), post)
        else:
            self._arrived.setdefault((channel, tag), deque()).append(post)

    def _take(self, transfer: Transfer, post: _Post) -> None:
        """Copy a message to its place, and tell the sender that its memory may change.

        The message has arrived once the receipt has left, since a rank whose messages have all
        arrived may do something else than to serve its sockets.
        """
        if post.nbytes != transfer.nbytes:  # tags of messages over 1 GiB may be equal by chance
            self.end(f"process {self.pid} sent {post.nbytes} bytes for {transfer.nbytes}")
            return
        if post.content:
            ctypes.memmove(transfer.address, post.content, transfer.nbytes)
        else:
            try:
                read_memory(self.pid, post.address, transfer.address, transfer.nbytes)
            except OSError as error:
                self.end(f"the memory of process {self.pid} could not be read: {error}")
                return
        self.write(_HEADER.pack(_RECEIPT, 0, 0, post.number, 0, 0), transfer)

    def write(self, message: bytes, ended: Transfer | None = None) -> None:
        """Write a message, or keep it until there is room; it ends a transfer once it is gone."""
        self._unsent.append((message, ended))
        if len(self._unsent) == 1 and not self.flush():
            _OFFICE.watch(self, writes=True)

    def flush(self) -> bool:
        """Write what waits for room in the socket; return whether nothing is left."""
        while self._unsent and not self.ended:
            message, ended = self._unsent[0]
            try:
                self.connection.send(message)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):  # what it sent before can still be read
                self._unsent.clear()
                return True
            except OSError as error:
                self.end(f"the connection to process {self.pid} broke: {error}")
                return True
            self._unsent.popleft()
            if ended is not None:
                ended.end()
        return True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """End the connection if an exception, such as Ctrl-C, leaves a message half done."""
        try:
            yield
        except RuntimeError:  # of `send` and `receive`: nothing was begun
            raise
        except BaseException as error:
            self.end(f"{type(error).__name__} interrupted a message of process {self.pid}")
            raise

    def close(self) -> None:
        """End the connection, once what was written has left: the other process may need it."""
        with suppress(OSError):  # it is closed already
            self.connection.settimeout(_FAREWELL_S)
            self.flush()
        self.end("the connection was closed")
        self.connection.close()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        _OFFICE.forget(self)


class _Office:
    """All connections of this process: whoever waits for one message serves every other too."""

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}
        self._page = bytearray(_HEADER.size + _SHORT)
        self.renew()

    def renew(self) -> None:
        """Begin with no connection. A forked child does: the parent's sockets are not its own."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_served = False  # a thread waits for sockets; the others wait for that thread
        self._poll: Any = None
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.ended = "this process was forked from a rank"
            peer.connection.close()

    def open(self, peer: _Peer) -> None:
        with self._lock:
            if self._poll is None:
                self._poll = select.epoll()
            self._peers[peer.fileno] = peer
            self._poll.register(peer.fileno, select.EPOLLIN)

    def watch(self, peer: _Peer, writes: bool) -> None:
        if peer.fileno in self._peers:
            self._poll.modify(peer.fileno, select.EPOLLIN | (select.EPOLLOUT if writes else 0))

    def give_up(self, peer: _Peer) -> None:
        with self._lock, suppress(OSError):  # the other process may have closed it already
            peer.write(_HEADER.pack(_FAREWELL, 0, 0, 0, 0, 0))
            peer.connection.shutdown(socket.SHUT_RDWR)

    def forget(self, peer: _Peer) -> None:
        with self._lock:
            if self._peers.pop(peer.fileno, None) is not None:
                self._poll.unregister(peer.fileno)

    def send(self, peer: _Peer, tensor: Tensor, channel: int, tag: int) -> Transfer:
        with self._lock, peer.whole():
            return peer.send(tensor, channel, tag)

    def receive(self, peer: _Peer, tensor: Tensor, channel: int, tag: int) -> Transfer:
        with self._lock:
            while not self._is_served and self._serve(0):
                pass
            with peer.whole():
                return peer.receive(tensor, channel, tag)

    def wait(self, transfer: Transfer, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while True:
            with self._changed:
                while not transfer.is_done:
                    if transfer.peer.ended:
                        raise RuntimeError(as_sentence(transfer.peer.ended))
                    left = until - time.monotonic()
                    if left <= 0:
                        pid = transfer.peer.pid
                        raise RuntimeError(f"process {pid} took over {limit_s:g} seconds.")
                    if not self._is_served:
                        break
                    self._changed.wait(left)
                if transfer.is_done:
                    return
                self._is_served = True
            try:
                self._serve(min(left, _LONGEST_S))
            finally:
                with self._changed:
                    self._is_served = False
                    self._changed.notify_all()

    def _serve(self, limit_s: float) -> bool:
        """Handle one message of each process that has written; wait up to a limit for the first.

        Return whether there was one.
        """
        found = self._poll.poll(limit_s)
        for fileno, events in found:
            with self._lock:
                peer = self._peers.get(fileno)
                if peer is None:  # it has ended meanwhile
                    continue
                with peer.whole():
                    if events & select.EPOLLOUT and peer.flush():
                        self.watch(peer, writes=False)
                    if events & ~select.EPOLLOUT:
                        self._read(peer)
        return bool(found)

    def _read(self, peer: _Peer) -> None:
        try:
            length = peer.connection.recv_into(self._page)
        except (BlockingIOError, ConnectionResetError):  # after the latter, what was sent follows
            return
        except OSError as error:
            peer.end(f"the connection to process {peer.pid} broke: {error}")
            return
        if length:
            peer.handle(bytes(self._page[:length]))
        else:
            peer.end(f"process {peer.pid} closed the connection")


_OFFICE = _Office()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_OFFICE.renew)


class Mail:
    """This rank's connections to the others of a world, by their ranks in it."""

    def __init__(self, peers: dict[int, _Peer]) -> None:
        self._peers = peers
        self._owner = os.getpid()
        for peer in peers.values():
            _OFFICE.open(peer)
        weakref.finalize(self, _close, list(peers.values()), self._owner)

    def wire(self, channel: int, members: Sequence[int]) -> MemoryWire:
        """Return a wire to some ranks; those of one channel see only each other's messages."""
        return MemoryWire(self, channel, [self._peers.get(rank) for rank in members])

    def break_off(self) -> None:
        """End every wait with an error, here and on the other ranks; this is final."""
        if os.getpid() != self._owner:
            return  # a forked child, such as a loader's worker, shares the sockets
        for peer in self._peers.values():
            _OFFICE.give_up(peer)


def _close(peers: list[_Peer], owner: int) -> None:
    if os.getpid() == owner:
        for peer in peers:
            peer.close()


class MemoryWire:
    """The messages of one axis: `send` and `recv` have the form of torch's gloo backend."""

    def __init__(self, mail: Mail, channel: int, peers: Sequence[_Peer | None]) -> None:
        self._mail = mail  # it closes the connections when it is dropped
        self._channel = channel
        self._peers = peers

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        to = self._peers[peer]
        assert to is not None, "a rank sends nothing to itself"
        return _OFFICE.send(to, tensors[0], self._channel, tag)

    def cut(self, error: BaseException) -> None:
        """End the connections, because an exception has left a collective half launched."""
        for peer in self._peers:
            if peer is not None:
                peer.end(f"{type(error).__name__} interrupted a launch")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        source = self._peers[peer]
        assert source is not None, "a rank receives nothing from itself"
        return _OFFICE.receive(source, tensors[0], self._channel, tag)


# -- connecting -----------------------------------------------------------------------------------
def connect(meeting: Meeting) -> tuple[Mail | None, str]:
    """Connect all ranks of a meeting, which all call this; or say why gloo must carry messages.

    Raises:
        DesyncError: a rank did not arrive, or has raised; names it.
        PlanError: ZEROFX_TRANSPORT is neither `memory` nor `gloo`.
    """
    transport = os.environ.get(VARIABLE, "memory")
    if transport not in ("memory", "gloo"):
        raise PlanError(f"{VARIABLE} is {transport!r}. Set it to 'memory' or 'gloo', or unset it.")
    if meeting.elsewhere:
        return None, "the ranks are on several hosts"
    name, why = f"zerofx-{secrets.token_hex(16)}", ""
    connected: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        if transport == "gloo":
            why = f"{VARIABLE} is 'gloo' on a rank"
        elif _READ is None:
            why = "the system cannot read the memory of other processes"
        else:
            try:
                listens = stack.enter_context(_listener(name, meeting.size))
            except OSError as error:  # a sandbox, or no descriptor is left
                why = f"rank {meeting.rank} cannot listen: {as_sentence(error)}"
        places = [
            json.loads(text) for text in meeting.share("mail", json.dumps([os.getpid(), name, why]))
        ]
        steps = (
            ("cannot connect to an earlier rank", lambda: _call(connected, places[: meeting.rank])),
            ("cannot read another's memory", lambda: _greet(connected, listens, meeting, places)),
        )
        why = next((said for _, _, said in places if said), "")
        for what, step in steps:
            if why:
                break
            try:
                step()
            except (OSError, struct.error, LookupError) as error:
                why = f"rank {meeting.rank} {what}: {as_sentence(error)}"
                _hang_up(connected)  # the other ranks notice at once
            why = next(filter(None, meeting.share(f"mail: {what}", why)), "")
    if why:
        _hang_up(connected)
        return None, why
    return Mail({rank: _Peer(rank, places[rank][0], c) for rank, c in connected.items()}), ""


def _hang_up(connected: dict[int, socket.socket]) -> None:
    for connection in connected.values():
        connection.close()


def _call(connected: dict[int, socket.socket], places: list[tuple[int, str, str]]) -> None:
    """Connect to the earlier ranks, which listen already.

    Raises:
        OSError: one cannot be reached, for example in another network namespace.
    """
    for rank, (pid, name, _) in enumerate(places):
        connected[rank] = _socket()
        connected[rank].connect("\0" + name)
        _check_process(connected[rank], pid)


def _socket() -> socket.socket:
    """Return a socket that keeps the borders of messages."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_PATIENCE_S)
    return made


def _listener(name: str, size: int) -> socket.socket:
    """Return a socket that listens at a name without a file, so that nothing is left behind."""
    made = _socket()
    made.bind("\0" + name)
    made.listen(size)
    return made


def _check_process(connection: socket.socket, pid: int) -> None:
    """Check who is at the other end: any process of the host can connect.

    Raises:
        OSError: it is not that process, or another user's.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    its_pid, its_user, _ = _CREDENTIALS.unpack(raw)
    if (its_pid, its_user) != (pid, os.getuid()):
        raise OSError(f"process {its_pid} of user {its_user} answered for process {pid}.")


def _allow_readers() -> None:
    """Let other processes of this user read this one, where only its parents may (Ubuntu)."""
    with suppress(OSError), open(_YAMA) as file:
        if file.read().strip() == "1":
            ctypes.CDLL(None).prctl(_SET_READERS, ctypes.c_ulong(_ANY), 0, 0, 0)


def _greet(
    connected: dict[int, socket.socket],
    listens: socket.socket,
    meeting: Meeting,
    places: list[tuple[int, str, str]],
) -> None:
    """Accept the connections of later ranks; then read a token in the memory of every other rank.

    Raises:
        OSError: one cannot be read, or another process connected.
        struct.error, LookupError: a greeting is none, because a rank has given up.
    """
    _allow_readers()
    rank, pids = meeting.rank, [pid for pid, _, _ in places]
    token = secrets.token_bytes(16)
    place = ctypes.create_string_buffer(token, 16)
    hello = _HELLO.pack(rank, ctypes.addressof(place), token)
    for each in connected.values():
        each.send(hello)
    hellos: dict[int, list[Any]] = {}
    for _ in range(len(pids) - rank - 1):
        connection, _ = listens.accept()
        connection.settimeout(_PATIENCE_S)
        other, address, its_token = _HELLO.unpack(connection.recv(_HELLO.size))
        connected[other] = connection
        _check_process(connection, pids[other])
        connection.send(hello)
        hellos[other] = [address, its_token]
    for other, connection in connected.items():
        if other not in hellos:
            _, *hellos[other] = _HELLO.unpack(connection.recv(_HELLO.size))
        address, its_token = hellos[other]
        found = ctypes.create_string_buffer(16)
        read_memory(pids[other], address, ctypes.addressof(found), 16)
        if found.raw != its_token:
            raise OSError(f"process {pids[other]} holds other bytes than it says.")
    for connection in connected.values():  # the token's place is needed until all have read it
        connection.send(hello)
    for connection in connected.values():
        if not connection.recv(_HELLO.size):
            raise OSError("another rank could not.")
