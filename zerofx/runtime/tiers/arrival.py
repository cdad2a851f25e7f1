"""Arrivals: reads from NVMe in flight, and the handling of those that fail."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerofx.errors import NvmeError
from zerofx.nvme.request import Request


class Arrival:
    """A read in flight: `tensor`, in host memory, may be used only after `wait`.

    under_way: holds this read until it has ended. Its memory is free for others once `tensor` is
        dropped, as it is by an exception in the code that waits. The rest of the read would then
        overwrite their values.
    on_fault: called with the error of a failed read; the waiting caller then gets NaN instead.
    """

    __slots__ = ("_request", "_under_way", "on_fault", "tensor")

    def __init__(self, tensor: Tensor, request: Request | None, under_way: set[Arrival]) -> None:
        self.tensor: Tensor | None = tensor
        self._request, self._under_way = request, under_way
        self.on_fault: Callable[[NvmeError], None] | None = None
        if request is not None:
            under_way.add(self)

    def wait(self) -> Tensor:
        """Wait on the host for the read, and return its result.

        Raises:
            NvmeError: the read failed, or the data is damaged.
        """
        tensor, request = self.tensor, self._request
        assert tensor is not None, "the read was already waited for"
        if request is not None:
            request.join()
        self._end()
        try:
            if request is not None:
                request.wait()  # which raises its fault
        except NvmeError as error:
            if self.on_fault is None:
                raise
            self.on_fault(error)
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    def drop(self) -> None:
        """Wait for the end of a read whose result is not needed, whether it succeeds or fails."""
        if self._request is not None:
            self._request.join()
        self._end()

    def _end(self) -> None:
        self.tensor = self._request = None  # the schedule's variable outlives the read
        self._under_way.discard(self)
