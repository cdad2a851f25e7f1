"""Find the plans that fit and the fastest of them, for a model, a hardware and a world."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from zerofx.api import PlanLike
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, load_hardware
from zerofx.plan.fields import whole
from zerofx.plan.plan import Plan, as_plan
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search
from zerofx.tools.search.family import Family, ModelFamily, Says, silent
from zerofx.tools.search.nearest import (
    Nearest,
    differing,
    more_ranks,
    nearest,
    ranks_needed,
    written,
)
from zerofx.tools.search.outcome import Outcome
from zerofx.tools.search.space import NVME, Space
from zerofx.tools.search.view import SearchView
from zerofx.tools.targets import Target, resolve

# -- What to say where nothing fits: how much is missing, and the nearest plan that fits -----------


TRIED = 40  # plans that are priced to find the nearest one that fits


def too_large(search: Search) -> PlanError:
    """Return the error of a search that found nothing: what is missing, and the suggestion."""
    space = search.space
    where = f"{space.world_size} ranks of {space.hardware.name}"
    search.says(
        f"nothing fits {where}: looking for what misses least, and the nearest that fits", False
    )
    least = _least(search)
    if least is None and search.refused:
        return PlanError(f"search: no plan can be: {next(iter(search.refused.values()))}")
    lines = [f"search: no plan fits {where}"]
    if space.settled:
        lines[0] += f" with {', '.join(sorted(space.settled))} as given"
    if least is not None:
        lines.append(f"closest is: {least.choice.words()}")
        lines += [f"  {shortage}" for shortage in least.shortages]
    found = _nearest(search)
    if found is not None:
        lines.append(written(found))
    elif least is not None:
        lines.append(more_ranks(ranks_needed(search, least)))
    return PlanError("\n".join(lines))


def _least(search: Search) -> Outcome | None:
    """Return the priced plan that misses least; price the one with the least bound as well."""
    choices = sorted(
        search.space.choices(), key=lambda c: (search.bounds.rough(c).peak_bytes, c.place)
    )
    for choice in choices[:TRIED]:
        if search.price(choice) is not None:
            break
    return min(search.priced.values(), key=lambda o: o.missing_bytes, default=None)


def _nearest(search: Search) -> Nearest | None:
    """Return a plan that fits and changes as few of the settled fields as any that was tried."""
    space = search.space
    if not space.settled:
        return None
    free = replace(space, settled=frozenset())
    return nearest(
        search, list(free.choices()), lambda c: differing(space.base, c, space.settled), TRIED
    )


# -- Find the plans that fit and the fastest of them, for a model, a hardware and a world ----------


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
