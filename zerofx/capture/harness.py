"""The traced module: the user's model between flat input tensors and flat output tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback
from torch.multiprocessing.reductions import StorageWeakRef

from zerofx.capture import call as trees
from zerofx.capture import guard
from zerofx.capture.call import KEYWORD, Call
from zerofx.capture.effects import Modes
from zerofx.capture.formats import cast_inputs, check_unwritten, counted_writes
from zerofx.capture.lines import LINE, MODULE, LineMode, forward_line
from zerofx.capture.original import MODEL, Entry
from zerofx.capture.swap import State, StateSwap
from zerofx.compat.graphs import TreeSpec
from zerofx.compat.tracing import is_symbolic, shown_by
from zerofx.errors import CaptureError

# Outputs of these types are equal for all calls with one signature.
_SCALARS = (bool, int, float, complex, str, bytes, NoneType, Enum)
_CONSTANTS = (*_SCALARS, torch.dtype, torch.device, torch.Size)


@dataclass
class Results:
    """The results of the model's forward in the last trace.

    tensors: leaf number of each tensor that the harness returns, in order.
    detached: leaf numbers of those tensors that require no grad.
    """

    spec: TreeSpec | None = None
    names: tuple[str, ...] = ()
    tensors: tuple[int, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    loss: int | None = None
    differentiable: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()

    def keep_constant(self, number: int, leaf: Any) -> None:
        """Record a leaf that is not a tensor; a leaf of an unknown type becomes None.

        A number that depends on sizes which vary is recorded with its symbols.
        """
        if isinstance(leaf, (Iterator, Callable, torch.distributions.Distribution)):  # type: ignore[arg-type]
            raise CaptureError(
                f"capture: output {self.names[number]} is a {type(leaf).__name__}, which a "
                "program cannot return. Return the tensors it is made of."
            )
        is_known = isinstance(leaf, _CONSTANTS) or is_symbolic(leaf)
        self.constants[number] = leaf if is_known else None
        if not is_known:
            self.dropped += (f"{self.names[number]} ({type(leaf).__name__})",)


class Harness(nn.Module):
    """A module that calls the model on flat tensors and returns the program's flat output tensors.

    numbers: the leaves that are varying numbers; they follow the tensors.
    ignored_dtypes: the formats of ignored parameters among the tensors, by name; others use
        `compute_dtype`.

    changed_mode, changed_state: the change that a forward made and that was undone, or "".
    says_compiling: the value of `torch.compiler.is_compiling()` that the model sees.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        swap: StateSwap,
        differentiate: str,
        outputs: str,
        compute_dtype: torch.dtype | None = None,
        entry: Entry = MODEL,
        numbers: Sequence[int] = (),
        ignored_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self._entry = entry
        self.model = model
        self._call, self._swap, self._links = call, swap, swap.links()
        self._differentiate, self._outputs = differentiate, outputs
        self._dtypes = [
            (ignored_dtypes or {}).get(call.names[i].removeprefix(f"{KEYWORD}."), compute_dtype)
            for i in call.tensors
        ]
        self._numbers = numbers
        self.lines = LineMode(guard.check_foreign_read)
        self.results = Results()
        self.changed_mode = ""
        self.changed_state = ""
        self.says_compiling = True

    def __call__(self, *inputs: Any) -> list[Tensor]:
        """Call forward directly: global module hooks are meant for the user's modules only."""
        return self.forward(*inputs)

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Run the model on tensors, and on symbols for the numbers that vary."""
        count = len(self._call.tensors)
        tensors = inputs[:count]
        self._swap.reset_attributes()  # every pass of the tracer begins as the call does
        pairs = zip(tensors, self._dtypes, strict=True)
        given = tuple(cast for t, dtype in pairs for cast in cast_inputs((t,), dtype))
        versions = counted_writes(tensors, given)
        numbers = dict(zip(self._numbers, inputs[count:], strict=True))
        args, kwargs = self._call.varied(numbers).rebuild(given)
        modes = Modes()
        running = guard.running(self.model, self._swap.ledger, is_traced=True)
        with running, self._swap.given(kwargs.pop(KEYWORD, {})), self._swap.layered():
            state = State(self.model)
            with self._links.followed():
                try:
                    with self.lines, shown_by(self.lines.show):
                        out = self._entry.call(self.model, args, kwargs)
                finally:
                    self.changed_mode = modes.restore() or self.changed_mode
            self.changed_state = state.settle() or self.changed_state
        check_unwritten(tensors, given, versions)
        with fx_traceback.annotate(
            {MODULE: "", LINE: forward_line(self._entry.function(self.model))}
        ):
            return self._hand_out(out, tensors)

    def _hand_out(self, out: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        names, leaves, spec = trees.flatten_named(out)
        names = [name or "output" for name in names]  # a bare result has no path
        only_loss = self._outputs == "loss"
        loss = None if self._differentiate == "all" else find_loss(names, leaves, only_loss)
        results = Results(spec=spec, names=tuple(names), loss=loss)
        results.differentiable = find_differentiable(leaves, loss)
        aliases = _Aliases(self.model, inputs)
        handed: list[Tensor] = []
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if not isinstance(leaf, Tensor):
                results.keep_constant(i, leaf)
            elif only_loss and loss not in (None, i):
                results.constants[i] = None
            else:
                check_output(name, leaf)
                results.tensors += (i,)
                results.detached += () if leaf.requires_grad else (i,)
                handed.append(aliases.separate(leaf, i in results.differentiable))
        if not handed:
            raise CaptureError(
                f"capture: {self._entry.describe(self.model)}.forward returns no tensor but "
                f"{type(out).__name__}. Return the loss, the outputs, or a container of them."
            )
        self.results = results
        return handed


class _Aliases:
    """Makes outputs independent of the parameters, the buffers and one another.

    A program's results must outlive the gathered parameters. Each differentiable output also needs
    a gradient of its own, which views of one tensor do not have in a traced graph.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        state = [*model.parameters(), *model.buffers()]
        self._state = {StorageWeakRef(t.untyped_storage()) for t in state}
        self._handed = {StorageWeakRef(t.untyped_storage()) for t in inputs}

    def separate(self, leaf: Tensor, is_differentiable: bool) -> Tensor:
        storage = StorageWeakRef(leaf.untyped_storage())
        if not is_differentiable:
            leaf = leaf.detach() if leaf.requires_grad else leaf
            return leaf.clone() if storage in self._state else leaf
        is_shared = storage in self._state or storage in self._handed
        self._handed.add(storage)
        return leaf.clone() if is_shared else leaf


def find_loss(names: list[str], leaves: list[Any], must_be: bool) -> int | None:
    """Return the leaf to differentiate: the `loss` field, or the only 0-d float output.

    If there are other outputs to differentiate, a scalar in a field of another name may be part of
    a loss that the caller computes (for example the commitment loss of a quantizer). Such a scalar
    counts only if the plan says that there is a loss (`must_be`).
    """
    floats = [
        i
        for i, v in enumerate(leaves)
        if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad
    ]
    named = [i for i in floats if names[i] == "loss" and leaves[i].numel() == 1]
    scalars = [i for i in floats if leaves[i].dim() == 0]
    found = named or scalars
    if len(found) != 1:
        return None
    is_field = names[found[0]] != "output" and not names[found[0]].endswith("]")
    is_clear = named or not is_field or len(floats) == 1 or must_be
    return found[0] if is_clear else None


def find_differentiable(leaves: list[Any], loss: int | None) -> tuple[int, ...]:
    """Return the leaves that receive gradients: the loss, or every output that requires grad."""
    if loss is not None:
        return (loss,)
    return tuple(i for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.requires_grad)


def check_output(name: str, leaf: Tensor) -> None:
    """Raise on tensors that a program cannot return.

    Raises:
        CaptureError: a sparse or nested tensor; the message names the output.
    """
    if leaf.layout is not torch.strided or leaf.is_quantized:
        layout = str(leaf.layout).removeprefix("torch.")
        raise CaptureError(
            f"capture: output {name} is a {layout} tensor. Return it dense "
            "(to_dense(), or its values and indices)."
        )
