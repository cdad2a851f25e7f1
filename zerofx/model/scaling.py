"""From a plan's loss scale to the scaler that runs."""

from __future__ import annotations

from zerofx.comm.world import World
from zerofx.errors import PlanError
from zerofx.plan.parts import LossScale
from zerofx.plan.plan import Plan
from zerofx.runtime.loss_scale import LossScaler, ScaleRule


def make_scaler(plan: Plan, world: World) -> LossScaler | None:
    """Return the scaler that a plan asks for, None where nothing is scaled here."""
    asked = plan.precision.loss_scale
    if not plan.precision.is_scaled:
        return None
    assert isinstance(asked, LossScale)
    if world.other_axes:
        raise PlanError(
            f"Plan(precision='fp16') skips a step whose gradients overflow. The ranks along the "
            f"mesh axes {world.other_axes} would not skip it too, since the model is compiled over "
            "a slice of that mesh. Compute in bf16."
        )
    return LossScaler(rule_of(asked), world.device)


def rule_of(asked: LossScale) -> ScaleRule:
    """Return a plan's loss scale as the runtime, which knows no plans, takes it."""
    return ScaleRule(
        initial=asked.initial,
        growth_interval=asked.growth_interval if asked.dynamic else 0,
        growth=asked.growth,
        backoff=asked.backoff,
        minimum=asked.minimum,
        hysteresis=asked.hysteresis,
    )
