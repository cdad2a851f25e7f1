"""One simulated rank's memory in the oracle: slots that tenants share, and garbage everywhere else.

Bytes that hold nothing are 0xFF: a NaN in every floating-point type, -1 in the integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class OracleError(Exception):
    """The program does something that no schedule may do: it hangs, or breaks an op's contract."""


def poison(tensor: Tensor) -> None:
    """Fill a tensor's memory with garbage."""
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(0xFF)


def garbage(numel: int, dtype: torch.dtype) -> Tensor:
    """Return fresh memory that nobody has written to."""
    tensor = torch.empty(numel, dtype=dtype)
    poison(tensor)
    return tensor


class Memory:
    """Slots with their tenants, the resident copies, and the gradient slices backward stored.

    A slot's memory belongs to its last tenant. Each has bytes of its own here, so that who reads a
    former one always gets garbage, never by luck what its successor brought; and who writes it, or
    gives it back, breaks the successor's memory, whether or not that shows in a number.
    """

    def __init__(self, slot_bytes: Sequence[int]) -> None:
        self.slot_bytes = list(slot_bytes)
        self.resident: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        self._present: dict[int, Tensor] = {}  # slot -> its tenant
        self._homes: dict[int, tuple[int, Tensor]] = {}  # address -> slot of every tenant so far

    def place(self, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a launch: in a slot, whose tenant it destroys, or fresh for -1."""
        made = garbage(numel, dtype)
        if slot < 0:
            return made
        if slot >= len(self.slot_bytes) or made.nbytes > self.slot_bytes[slot]:
            raise OracleError(f"no slot {slot} of {made.nbytes} bytes in {self.slot_bytes}")
        if slot in self._present:
            poison(self._present[slot])
        self._present[slot] = made
        self._homes[made.data_ptr()] = (slot, made)
        return made

    def own(self, tensor: Tensor) -> None:
        """Check that a buffer about to be written or given back still has its place.

        Raises:
            OracleError: another buffer has been put there.
        """
        slot = self.home(tensor)
        if slot >= 0 and self._present[slot].data_ptr() != tensor.data_ptr():
            raise OracleError(f"slot {slot} belongs to another buffer by now")

    def home(self, tensor: Tensor) -> int:
        """Return the slot in which a buffer begins, -1 for memory of its own."""
        return self._homes[tensor.data_ptr()][0] if tensor.data_ptr() in self._homes else -1

    def release(self, full: Tensor, slot: int) -> None:
        """Destroy a buffer.

        Raises:
            OracleError: the buffer lies elsewhere, or its slot has another tenant by now.
        """
        if self.home(full) != slot:
            raise OracleError(f"a release of slot {slot}, but the buffer lies in {self.home(full)}")
        self.own(full)
        poison(full)

    def resident_copy(self, bucket: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the resident memory of a bucket, garbage until a refresh has landed in it."""
        if bucket not in self.resident:
            self.resident[bucket] = garbage(numel, dtype)
        return self.resident[bucket]

    def end_call(self) -> None:
        """Destroy what does not outlive a program call: another call may run before the next."""
        for _, tenant in self._homes.values():
            poison(tenant)
        self._present.clear()
        self._homes.clear()
