"""FLOP formulas: torch's formulas for the operations of its operators, by overload packet."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from zerofx.compat.graphs import OpOverload


def counted_flops(target: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the operations of one call on (fake) tensors; None if torch has no formula."""
    formula = flop_registry.get(target.overloadpacket) if isinstance(target, OpOverload) else None
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))
