"""A read from NVMe under way, and what becomes of it where it fails."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerofx.errors import NvmeError
from zerofx.nvme.request import Request


class Arrival:
    """A read under way: `tensor`, in host memory, may be used only after `wait`.

    on_fault: told of a read that failed, in place of who waits for it, who is given NaN.
    """

    __slots__ = ("_request", "on_fault", "tensor")

    def __init__(self, tensor: Tensor, request: Request | None) -> None:
        self.tensor: Tensor | None = tensor
        self._request = request
        self.on_fault: Callable[[NvmeError], None] | None = None

    def wait(self) -> Tensor:
        """Return what has arrived, once it has; the host waits.

        Raises:
            NvmeError: the read failed, or what was read is damaged.
        """
        tensor, request = self.tensor, self._request
        assert tensor is not None, "a read was waited for before"
        self.tensor = self._request = None  # the schedule's name for this outlives it
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
        """Wait for the end of a read whose result is not taken, whether it succeeds or fails."""
        if self._request is not None:
            self._request.join()
        self.tensor = self._request = None
