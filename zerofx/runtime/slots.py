"""Slots: fixed places in memory for gathered buckets and gradient buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SlotPool:
    """Byte buffers, allocated once, that gathered buckets and gradient buffers share in turn.

    A slot holds data only within one program call. With `poison`, a returned slot is filled with
    NaN, so that a read after its release does not go unnoticed.
    """

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        self.device = device
        self.poison = poison
        self.moves = 0  # how often a slot has moved
        self._bytes: list[Tensor] = []
        self._owned: set[int] = set()
        self._asleep: set[int] = set()
        self._typed: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def reserve(self, sizes: Sequence[int]) -> bool:
        """Grow the pool so that slot i holds at least sizes[i] bytes; return whether a slot moved.

        Call it only between calls of a program, because a moved slot loses its contents.
        """
        moved = False
        for i, size in enumerate(sizes):
            if i < len(self._bytes) and self._bytes[i].numel() >= size:
                continue
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            if i < len(self._bytes):
                moved = True
                self.moves += 1
                self._bytes[i] = buffer
                self._asleep.discard(i)
                self._typed = {k: v for k, v in self._typed.items() if k[0] != i}
                self._owned = {id(t) for t in self._typed.values()}
            else:
                self._bytes.append(buffer)
        return moved

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each slot in bytes, whether freed by `rest` or not."""
        return tuple(b.numel() for b in self._bytes)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def clear(self) -> None:
        """Forget all slots. Call it only between calls of a program, as their contents are lost."""
        self.moves += 1
        self._bytes.clear()
        self._asleep.clear()
        self._typed.clear()
        self._owned.clear()

    def take(self, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return `numel` elements in the slot; slot -1 allocates new memory."""
        if slot < 0:
            return torch.empty(numel, dtype=dtype, device=self.device)
        if slot in self._asleep:
            self._bytes[slot].untyped_storage().resize_(self._bytes[slot].numel())
            self._asleep.discard(slot)
        key = (slot, numel, dtype)
        tensor = self._typed.get(key)
        if tensor is None:
            assert slot < len(self._bytes), f"slot {slot} was not reserved"
            with torch.inference_mode(False):  # the slot would be an inference tensor otherwise
                tensor = self._bytes[slot][: numel * dtype.itemsize].view(dtype)
            self._typed[key] = tensor
            self._owned.add(id(tensor))
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        """Return whether this tensor is the one that `take` returns for a slot in every step."""
        return id(tensor) in self._owned

    def rest(self, frees: Callable[[int, int], bool]) -> None:
        """Free the slots for whose number and size in bytes `frees` returns true, until next taken.

        Call it only between calls of a program.
        """
        for slot, buffer in enumerate(self._bytes):
            if slot not in self._asleep and frees(slot, buffer.numel()):
                buffer.untyped_storage().resize_(0)
                self._asleep.add(slot)

    def give(self, slot: int, tensor: Tensor) -> None:
        """Take back the contents of a slot."""
        if self.poison and tensor.is_floating_point():
            tensor.fill_(float("nan"))
