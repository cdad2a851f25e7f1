"""A file of raw bytes, with tensors moved to and from it without blocking."""

from __future__ import annotations

import os

from torch import Tensor

from zerofx.errors import NvmeError
from zerofx.nvme.engine import IOEngine, default_engine
from zerofx.nvme.faults import path_error
from zerofx.nvme.handle import Handle
from zerofx.nvme.request import Request

_MODES = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
}


class File:
    """A file of raw bytes: tensors are read from and written to byte offsets of it.

    path: the path of the file.
    mode: "r" to read, "r+" to change, "w" to create or truncate it.
    engine: the threads that move the bytes; by default the engine of the process.
    direct: bypass the page cache (O_DIRECT) if the file system allows it. Ranges that do not begin
        or end at a page of 4096 bytes still go through the cache as far as necessary.

    Requests on the same bytes keep their order. A tensor must not change until its request has
    ended. Tensors of `aligned_empty` and pinned tensors move without a copy in memory.

    Example:
        >>> x = torch.randn(1000, 1000)
        >>> with zerofx.nvme.File(path, "w") as file:
        ...     written = file.submit_write(x, offset=0)
        ...     y = file.read(torch.empty(1000, 1000))  # waits for the write to the same bytes
        ...     written.wait()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        engine: IOEngine | None = None,
        direct: bool = True,
    ) -> None:
        if mode not in _MODES:
            raise NvmeError(f"mode = {mode!r}. Allowed are {', '.join(map(repr, _MODES))}.")
        self.path, self.mode = os.path.abspath(path), mode
        self._handle = Handle(self.path, _MODES[mode], direct=direct)
        self._engine = engine or default_engine()

    def submit_read(self, out: Tensor, offset: int = 0, label: str = "") -> Request:
        """Begin to fill `out`, a contiguous host tensor, from the bytes at `offset`.

        label: the name of the data in errors.

        Raises:
            NvmeError: the tensor or offset cannot be used; faults of the disk are raised by `wait`.
        """
        return self._engine.submit_read(self._handle, out, offset, label)

    def submit_write(self, tensor: Tensor, offset: int = 0, label: str = "") -> Request:
        """Begin to write a contiguous host tensor to the bytes at `offset`.

        Raises:
            NvmeError: as for `submit_read`, or the file is open for reading only.
        """
        if self.mode == "r":
            raise NvmeError(
                f"{self.path}: open for reading only. Open it with 'r+' or 'w' to write."
            )
        return self._engine.submit_write(self._handle, tensor, offset, label)

    def read(self, out: Tensor, offset: int = 0, label: str = "") -> Tensor:
        """Fill `out` from the bytes at `offset`, and return it."""
        return self.submit_read(out, offset, label).wait()

    def write(self, tensor: Tensor, offset: int = 0, label: str = "") -> None:
        """Write a tensor to the bytes at `offset`; `flush` makes the write durable."""
        self.submit_write(tensor, offset, label).wait()

    def wait(self) -> None:
        """Wait until no request is in flight; raise the first unreported fault."""
        self._engine.wait(self._handle)

    def flush(self) -> None:
        """Wait, and make everything that was written durable."""
        self._engine.flush(self._handle)

    def reserve(self, nbytes: int) -> None:
        """Reserve the space of `nbytes`, so that no later write can find the device full.

        It also lets writes run in parallel that would otherwise extend the file one by one.
        """
        self._handle.need_open()
        try:
            os.posix_fallocate(self._handle.buffered, 0, nbytes)
        except OSError as error:
            raise path_error(f"cannot reserve {nbytes} bytes in", self.path, error) from error

    @property
    def nbytes(self) -> int:
        """The current size of the file in bytes."""
        self._handle.need_open()
        return os.fstat(self._handle.buffered).st_size

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._handle.is_direct

    def close(self) -> None:
        """Wait for requests in flight, close, and raise the first unreported fault."""
        if self._handle.is_closed:
            return
        try:
            self._engine.finish(self._handle)
        finally:
            self._handle.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self._handle.is_closed:  # do not hide the first exception
            self._engine.drain(self._handle)
            self._handle.failed.clear()
        self.close()
