"""One simulated rank's memory in the oracle: slots that share bytes, and garbage everywhere else.

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
    """Slots as byte buffers, the resident copies, and the gradient slices that backward stored."""

    def __init__(self, slot_bytes: Sequence[int]) -> None:
        self.slots = [garbage(size, torch.uint8) for size in slot_bytes]
        self.resident: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}

    def place(self, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a launch, destroyed: the slot's bytes, or fresh memory for -1."""
        if slot < 0:
            return garbage(numel, dtype)
        size = numel * dtype.itemsize
        if slot >= len(self.slots) or size > len(self.slots[slot]):
            raise OracleError(f"slot {slot} cannot hold {size} bytes: {len(self.slots)} slots")
        tensor = self.slots[slot][:size].view(dtype)
        poison(tensor)
        return tensor

    def resident_copy(self, bucket: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the resident memory of a bucket, garbage until a refresh has landed in it."""
        if bucket not in self.resident:
            self.resident[bucket] = garbage(numel, dtype)
        return self.resident[bucket]

    def end_call(self) -> None:
        """Destroy what does not outlive a program call: another call may run before the next."""
        for slot in self.slots:
            poison(slot)
