"""Arrivals: reads from NVMe in flight, and the handling of those that fail."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerofx.errors import NvmeError
from zerofx.nvme.request import Request


class Arrival:
    """A read in flight: `tensor`, in host memory, may be used only after `wait`.

    on_fault: called with the error of a failed read; the waiting caller then gets NaN instead.
    """

    __slots__ = ("_request", "on_fault", "tensor")

    def __init__(self, tensor: Tensor, request: Request | None) -> None:
        self.tensor: Tensor | None = tensor
        self._request = request
        self.on_fault: Callable[[NvmeError], None] | None = None

    def wait(self) -> Tensor:
        """Wait on the host for the read, and return its result.

        Raises:
            NvmeError: the read failed, or the data is damaged.
        """
        tensor, request = self.tensor, self._request
        assert tensor is not None, "the read was already waited for"
        self.tensor = self._request = None  # the schedule's variable outlives the read
        if request is None:
            return tensor
        try:
            request.wait()
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
        self.tensor = self._request = None
