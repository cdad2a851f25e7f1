"""Find the plans that fit and the fastest of them, for a model, a hardware and a world."""

from __future__ import annotations

import os
from collections.abc import Mapping

from zerofx.api import PlanLike
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, load_hardware
from zerofx.plan.fields import whole
from zerofx.plan.plan import Plan, as_plan
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search
from zerofx.tools.search.family import Family, ModelFamily, Says, silent
from zerofx.tools.search.refusals import too_large
from zerofx.tools.search.space import NVME, Space
from zerofx.tools.search.view import SearchView
from zerofx.tools.targets import Target, resolve

FORMATS = ("bf16", "fp16", "fp32")  # the first of equally fast ones


def search(
    target: str | Target,
    *,
    hardware: Hardware | str | os.PathLike[str],
    world_size: int = 1,
    global_samples: int | None = None,
    batch_tokens: int | None = None,
    plan: PlanLike = None,
    batch: int = 1,
    seq: int = 128,
    nvme: str = NVME,
    says: Says = silent,
) -> SearchView:
    """Return the plans that fit and the fastest of them; nothing is run or allocated.

    target: what the command line takes, `package:function`, `file.py:function` or `hf:config.json`.
    hardware: a description, a preset's name, or a file.
    global_samples, batch_tokens: what all ranks train on in a step, in samples or in tokens; by
        default the example call's samples on every rank. Micro-batches and their accumulation are
        chosen so that a step has that many.
    plan: its fields stay as they are. Without a precision the fastest format of the hardware is
        taken. batch, seq: of an `hf:` model's call. nvme: the folder that plans name.
    says: told what is done next, and whether that is of interest until the next thing only.

    Raises:
        PlanError: the hardware is unknown, the world is empty, the batch cannot be divided, or
            nothing fits: what is missing, and the nearest plan that fits.
    """
    whole(1)("world_size", world_size)
    described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    described.check_world(world_size)
    base, settled = _settled(plan, described)
    named = resolve(target, batch, seq) if isinstance(target, str) else target
    family = ModelFamily(base, says=says, target=named)
    samples, notes = _global_samples(family, world_size, global_samples, batch_tokens)
    space = Space(described, world_size, samples, base, settled, family.tiled, nvme)
    bounds = Bounds(family, described, world_size, space.plainest)
    under_way = Search(family, space, bounds, says=says)
    found = under_way.run()
    if not found.fits:
        raise too_large(under_way)
    return SearchView(found, notes)


def _settled(plan: PlanLike, hardware: Hardware) -> tuple[Plan, frozenset[str]]:
    """Return the plan to start from, and which of its fields the user has settled."""
    given = dict(plan) if isinstance(plan, Mapping) else as_plan(plan).to_dict()
    default = Plan().to_dict()
    settled = {n for n, v in given.items() if isinstance(plan, Mapping) or v != default[n]}
    if "precision" not in settled and hardware.device_type == "cuda":
        given["precision"] = max(FORMATS, key=lambda f: hardware.dense_flops_per_s.get(f, 0.0))
    return Plan.from_dict(given), frozenset(settled)


def _global_samples(
    family: Family, world_size: int, samples: int | None, tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return the samples of a step of all ranks, and what was made of the tokens asked for."""
    if samples is not None and tokens is not None:
        raise PlanError("search: give the global batch in samples or in tokens, not in both")
    if tokens is not None:
        return _of_tokens(family, world_size, tokens)
    if samples is None:
        samples = family.samples * world_size
    if samples < world_size or samples % world_size:
        raise PlanError(
            f"search: a global batch of {samples} samples cannot be divided among {world_size} "
            f"ranks; the nearest is {max(1, round(samples / world_size)) * world_size}"
        )
    return samples, ()


def _of_tokens(family: Family, world_size: int, tokens: int) -> tuple[int, tuple[str, ...]]:
    """Return the most samples, alike on all ranks, that have no more tokens than asked for."""
    if not family.tokens:
        raise PlanError(
            f"search: a global batch of {tokens:,} tokens was asked for, and no input of "
            f"{family.name} is a matrix of whole numbers, samples by tokens; give it in samples"
        )
    least = family.tokens * world_size
    if tokens < least:
        raise PlanError(
            f"search: a global batch of {tokens:,} tokens is less than a sample of "
            f"{family.tokens:,} on each of {world_size} ranks; give {least:,} or more"
        )
    samples = tokens // least * world_size
    taken = samples * family.tokens
    if taken == tokens:
        return samples, ()
    return samples, (
        f"{tokens:,} tokens a step were asked for and {taken:,} are taken: {samples:,} samples of "
        f"{family.tokens:,}, alike on {world_size} ranks",
    )
