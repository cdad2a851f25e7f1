"""The fake value of a call, looked up where a call of the same form was made before.

Layers are alike, so that a pass over a deep model makes the same few calls thousands of times, and
each costs a fifth of a millisecond on fake tensors. A fake value says a form and nothing else:
nodes may share one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofx.compat.graphs import FakeTensor, OpOverload, argument_names, known_values, schema_of

# Arguments that say which buffer a zerofx op is about, and nothing of its result's form.
_FORMLESS = frozenset({"bucket", "slot", "zero", "scale", "offsets", "name"})


def fake_value(target: Any, values: Sequence[Any], named: Mapping[str, Any], rule: Any) -> Any:
    """Return what `rule` gives for the values of a call's arguments.

    Equal targets and forms give the same value, as long as a node has it.
    """
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None or not isinstance(target, OpOverload):
        return rule(*values, **named)
    if not schema_of(target).returns:
        return None
    read = [v for i, v in enumerate(values) if i not in _formless(target)]
    key = target, _form(read), _form(list(named.items()))
    known = known_values(mode)
    found = known.get(key)
    if found is None:
        found = rule(*values, **named)
        if isinstance(found, torch.Tensor):
            known[key] = found
    return found


@functools.cache
def _formless(target: OpOverload) -> frozenset[int]:
    if target.namespace != "zerofx":
        return frozenset()
    return frozenset(i for i, name in enumerate(argument_names(target)) if name in _FORMLESS)


def _form(given: Any) -> Any:
    """Return what two arguments have alike that give results alike."""
    if isinstance(given, torch.Tensor):
        where = given.storage_offset(), given.dtype, given.device
        return tuple(given.shape), given.stride(), *where, type(given)
    if isinstance(given, (list, tuple)):
        return tuple(map(_form, given))
    return type(given), given
