"""Neighbouring parameters whose states lie in 8 bits, and what users see of such states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.optim.codes import Codes
from zerofx.optim.parts import overlaps, parts
from zerofx.optim.places import local_of, shown
from zerofx.optim.runs import Run
from zerofx.optim.stretch import Stretch, fill
from zerofx.runtime.param_tensor import ShardedTensor
from zerofx.runtime.tiers import Tier

# Whether a state has both signs: those that are kept in 8 bits.
IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True, eq=False)
class _Coded:
    """One parameter's part of a state in 8 bits."""

    codes: Codes
    number: int
    param: Tensor

    def decoded(self) -> Tensor:
        return shown(self.codes.read(self.number), self.param)


class CodedStates(MutableMapping[str, Any]):
    """The states of one parameter: reading one that lies in 8 bits gives a new float32 tensor.

    So what is saved is what torch's optimizer would save. Writing into that tensor changes nothing;
    assign it.
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


class CodedStretch(Stretch):
    """A stretch whose states lie in 8 bits; step counts are as they always are."""

    coded: dict[str, Codes]

    def _adopt_states(
        self, old: Sequence[MutableMapping[str, Any]], keys: Sequence[str]
    ) -> list[MutableMapping[str, Any]]:
        pieces = [
            (p.zfx.ranges[0][0] if isinstance(p, ShardedTensor) else 0, stop - start)
            for p, (start, stop) in zip(self.params, self._bounds, strict=True)
        ]
        if self.bucket is not None and self.bucket.home is Tier.NVME:
            raise OptimizerError(
                f"{self.bucket.label()}: 8-bit states do not go to NVMe; use state_bits=32, or "
                "Plan.offload.optimizer = 'cpu'"
            )
        device = self.flat.device
        self.coded = {key: Codes.zeros(pieces, IS_SIGNED[key], device) for key in keys}
        new: list[MutableMapping[str, Any]] = []
        for number, (param, values) in enumerate(zip(self.params, old, strict=True)):
            held = dict(values.held if isinstance(values, CodedStates) else values)
            for key, codes in self.coded.items():
                if values.get(key) is not None:
                    self._code(codes, number, values[key], key)
                held[key] = _Coded(codes, number, param)
            new.append(CodedStates(held))
        return new

    def _code(self, codes: Codes, number: int, value: Tensor, key: str) -> None:
        param = self.params[number]
        start, stop = self._bounds[number]
        view = shown(torch.empty(stop - start, device=self.flat.device), param)
        fill(view, value, param, key)
        codes.write(number, local_of(view).reshape(-1))

    def _states_of(self, first: int, last: int) -> dict[str, Any]:
        return {key: codes.of(first, last) for key, codes in self.coded.items()}

    @property
    def state_bytes(self) -> int:
        return sum(codes.nbytes for codes in self.coded.values())


def decoded_parts(
    run: Run, grad: Tensor
) -> Iterator[tuple[list[tuple[Run, Tensor]], Callable[[], None]]]:
    """Yield a run in short parts with decoded states, and what codes a part's states again.

    Each part is a list of runs, one a parameter, with their gradients.
    """
    any_codes = next(iter(run.states.values()))
    for start, stop in parts(any_codes.codes):
        decoded = {key: codes.values(start, stop) for key, codes in run.states.items()}
        found = []
        for number, begin, end in overlaps(any_codes.spans, start, stop):
            # from elements of the codes to elements of the run
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
