"""States in 8 bits: blocks of 256 elements share their largest magnitude; codes are fourth roots.

    a = max |x| over a block
    signed:    x = a sign(k) (|k| / 127)^4,   k = -127 .. 127, stored as k + 128
    unsigned:  x = a ((k + 1) / 256)^4,       k = 0 .. 255

The relative error is therefore 1.6 % (signed) or 0.8 % at the block's largest value, and 5 or 2.5 %
at a hundredth of it. No unsigned code is 0 while a > 0: if a second moment became 0 while its first
moment did not, the step would be m / eps. Coding decoded values again gives the same codes.

Blocks begin at multiples of 256 of the parameter's own elements, or of the elements of its part if
it is cut over the tensor axis. If the boundary between two ranks is inside a block, each rank codes
its part separately. The share of a tiled parameter that a rank holds counts as one part.

Source: "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), sections 2.1 and 3, with
a different non-linear map than its dynamic tree: this one needs two square roots and no search.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.kernels.launch import use_triton
from zerofx.kernels.quantise import dequantise, quantise
from zerofx.layout.tiers import Tier
from zerofx.optim.runs import (
    FlatRun,
    FlatStretch,
    Holding,
    StretchStates,
    fill,
    overlaps,
    parts,
)

BLOCK = 256


@dataclass(frozen=True)
class Codes:
    """One state of neighbouring parameters.

    Shapes: codes uint8 [blocks * 256], absmax float32 [blocks]; spans holds the half-open range of
    elements of each parameter in `codes`. Elements between the ranges belong to no parameter.
    """

    codes: Tensor
    absmax: Tensor
    spans: tuple[tuple[int, int], ...]
    is_signed: bool

    @classmethod
    def zeros(
        cls, pieces: Sequence[tuple[int, int]], is_signed: bool, device: torch.device
    ) -> Codes:
        """Return codes of zeros for pieces of parameters, each (first element, length)."""
        spans, base = [], 0
        for start, length in pieces:
            begin = base + start % BLOCK
            spans.append((begin, begin + length))
            base += _whole_blocks(start % BLOCK + length if length else 0)
        codes = torch.zeros(base, dtype=torch.uint8, device=device)
        absmax = torch.zeros(base // BLOCK, device=device)
        return cls(codes, absmax, tuple(spans), is_signed)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes

    def of(self, first: int, last: int) -> Codes:
        """Return the codes of the parameters first:last, over the same memory."""
        begin = self.spans[first][0] // BLOCK * BLOCK
        end = max(begin, _whole_blocks(self.spans[last - 1][1]))
        spans = tuple((a - begin, b - begin) for a, b in self.spans[first:last])
        absmax = self.absmax[begin // BLOCK : end // BLOCK]
        return Codes(self.codes[begin:end], absmax, spans, self.is_signed)

    def values(self, start: int, stop: int) -> Tensor:
        """Return the values of the codes start:stop, float32; both are multiples of 256."""
        codes, absmax = self._part(start, stop)
        if use_triton(codes.device):
            return dequantise(codes, absmax, code_book(self.is_signed, codes.device), BLOCK)
        if self.is_signed:
            k = codes.float().sub_(128.0).div_(127.0)
            x = k.square().square_().copysign_(k)
        else:
            x = codes.float().add_(1.0).div_(256.0).square_().square_()
        return x.view(-1, BLOCK).mul_(absmax[:, None]).view(-1)

    def store(self, start: int, stop: int, values: Tensor) -> None:
        """Code float32 `values` as start:stop; both are multiples of 256."""
        codes, absmax = self._part(start, stop)
        if use_triton(codes.device):
            book = code_book(self.is_signed, codes.device)
            for target, found in zip((codes, absmax), quantise(values, book, BLOCK), strict=True):
                target.copy_(found)
            return
        rows = values.view(-1, BLOCK)
        torch.amax(rows.abs(), 1, out=absmax)
        scaled = rows / torch.where(absmax > 0.0, absmax, 1.0)[:, None]
        if self.is_signed:
            k = scaled.abs().sqrt_().sqrt_().mul_(127.0).round_().copysign_(scaled).add_(128.0)
        else:
            k = scaled.sqrt_().sqrt_().mul_(256.0).round_().sub_(1.0).clamp_(min=0.0)
        codes.copy_(k.view(-1))

    def read(self, number: int) -> Tensor:
        """Return one parameter's values, float32 [length]."""
        mine = self.of(number, number + 1)
        begin, end = mine.spans[0]
        return mine.values(0, mine.codes.numel())[begin:end]

    def write(self, number: int, values: Tensor) -> None:
        """Code one parameter's values [length]."""
        mine = self.of(number, number + 1)
        begin, end = mine.spans[0]
        room = values.new_zeros(mine.codes.numel(), dtype=torch.float32)
        room[begin:end] = values
        mine.store(0, room.numel(), room)

    def _part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.codes[start:stop], self.absmax[start // BLOCK : stop // BLOCK]


def _whole_blocks(numel: int) -> int:
    return -(-numel // BLOCK) * BLOCK


@functools.cache
def code_book(is_signed: bool, device: torch.device) -> Tensor:
    """Return the value of each code in a block whose largest is 1: float32 [256], ascending."""
    k = torch.arange(256, dtype=torch.float64, device=device)
    if is_signed:
        root = ((k - 128.0) / 127.0).clamp(min=-1.0)
        return (root.abs() ** 4).copysign(root).float()
    return (((k + 1.0) / 256.0) ** 4).float()


# -- codes as an optimizer's states ----------------------------------------------------------------
# The states that can be kept in 8 bits, and whether each has both signs.
IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True, eq=False)
class _Coded:
    """One parameter's part of a state in 8 bits."""

    codes: Codes
    number: int
    holding: Holding

    def decoded(self) -> Tensor:
        return self.holding.show(self.codes.read(self.number))


class CodedStates(MutableMapping[str, Any]):
    """The states of one parameter: reading an 8-bit state gives a new float32 tensor.

    What is saved is therefore what torch's optimizer would save. Writing into that tensor changes
    nothing; assign to the key to change a state.
    """

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        value = self.held[key]
        return value.decoded() if isinstance(value, _Coded) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class EightBitStates(StretchStates):
    """States of a stretch in 8 bits; step counts keep their usual form."""

    def __init__(self) -> None:
        self._coded: dict[str, Codes] = {}

    def adopt(
        self,
        stretch: FlatStretch,
        old: Sequence[MutableMapping[str, Any]],
        keys: Sequence[str],
    ) -> list[MutableMapping[str, Any]]:
        if stretch.bucket is not None and stretch.bucket.home is Tier.NVME:
            raise OptimizerError(
                f"{stretch.bucket.label()}: 8-bit states cannot be on NVMe. Use state_bits=32, or "
                "Plan.offload.optimizer = 'cpu'."
            )
        pieces = [
            (held.own[0][0], stop - start)
            for held, (start, stop) in zip(stretch.holdings, stretch.bounds, strict=True)
        ]
        device = stretch.flat.device
        self._coded = {key: Codes.zeros(pieces, IS_SIGNED[key], device) for key in keys}
        new: list[MutableMapping[str, Any]] = []
        rows = zip(stretch.holdings, stretch.params, old, strict=True)
        for number, (holding, param, values) in enumerate(rows):
            held = dict(values.held if isinstance(values, CodedStates) else values)
            for key, codes in self._coded.items():
                if (value := values.get(key)) is not None:
                    view = holding.show(torch.empty(pieces[number][1], device=device))
                    fill(view, value, param, key)
                    codes.write(number, holding.local(view).reshape(-1))
                held[key] = _Coded(codes, number, holding)
            new.append(CodedStates(held))
        return new

    def of(self, first: int, last: int) -> dict[str, Any]:
        return {key: codes.of(first, last) for key, codes in self._coded.items()}

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes for codes in self._coded.values())


def decoded_parts(
    run: FlatRun, grad: Tensor
) -> Iterator[tuple[list[tuple[FlatRun, Tensor]], Callable[[], None]]]:
    """Yield a run in short parts with decoded states, and a function that codes them again.

    Each part is a list of runs, one per parameter, with their gradients.
    """
    any_codes = next(iter(run.states.values()))
    for start, stop in parts(any_codes.codes):
        decoded = {key: codes.values(start, stop) for key, codes in run.states.items()}
        found = []
        for number, begin, end in overlaps(any_codes.spans, start, stop):
            # from element numbers of the codes to those of the run
            first = run.bounds[number][0] + start + begin - any_codes.spans[number][0]
            last = first + end - begin
            piece = replace(
                run,
                first=run.first + number,
                last=run.first + number + 1,
                params=(run.params[number],),
                bounds=((0, end - begin),),
                param=run.param[first:last],
                offset=run.offset + first,
                states={key: flat[begin:end] for key, flat in decoded.items()},
                steps=run.steps[number : number + 1],
            )
            found.append((piece, grad[first:last]))

        def store(
            decoded: dict[str, Tensor] = decoded, start: int = start, stop: int = stop
        ) -> None:
            for key, flat in decoded.items():
                run.states[key].store(start, stop, flat)

        yield found, store
