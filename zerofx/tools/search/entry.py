"""Find the plans that fit and the fastest of them, for a model, a hardware and a world."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from zerofx.api import PlanLike
from zerofx.errors import PlanError, as_sentence
from zerofx.hardware import Hardware, load_hardware
from zerofx.plan.fields import whole
from zerofx.plan.plan import Plan, as_plan
from zerofx.process import rare_collections
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search
from zerofx.tools.search.family import Family, ModelFamily, Says, silent, warnings_of
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
from zerofx.tools.words import counted

# -- The error if nothing fits: the missing bytes, and the nearest plan that fits ------------------


TRIED = 40  # plans that are priced to find the nearest one that fits


def too_large(search: Search) -> PlanError:
    """Return the error of a search that found nothing: the missing bytes, and a suggestion."""
    space = search.space
    where = f"{counted(space.world_size, 'rank')} of {space.hardware.name}"
    search.says(f"no plan fits {where}: looking for the nearest one that fits", False)
    least = _least(search)
    if least is None and search.refused:
        refused = next(iter(search.refused.values()))
        return PlanError(f"search: no valid plan exists: {as_sentence(refused)}")
    lines = [f"search: no plan fits {where}"]
    if space.settled:
        lines[0] += f" with {', '.join(sorted(space.settled))} as given"
    if least is not None:
        lines.append(f"the closest plan: {least.choice.words()}")
        lines += [f"  {shortage}" for shortage in least.shortages]
    found = _nearest(search)
    if found is not None:
        lines.append(written(found))
    elif least is not None:
        lines.append(more_ranks(ranks_needed(search, least)))
    return PlanError("\n".join(lines))


def _least(search: Search) -> Outcome | None:
    """Return the priced plan that lacks the fewest bytes; price the one with the least bound."""
    choices = sorted(
        search.space.choices(), key=lambda c: (search.bounds.rough(c).peak_bytes, c.place)
    )
    for choice in choices[:TRIED]:
        if search.price(choice) is not None:
            break
    return min(search.priced.values(), key=lambda o: o.missing_bytes, default=None)


def _nearest(search: Search) -> Nearest | None:
    """Return the plan that fits and changes the fewest of the given fields, of those tried."""
    space = search.space
    if not space.settled:
        return None
    free = replace(space, settled=frozenset())
    return nearest(
        search, list(free.choices()), lambda c: differing(space.base, c, space.settled), TRIED
    )


# -- Find the plans that fit and the fastest of them, for a model, a hardware and a world ----------


FORMATS = ("bf16", "fp16", "fp32")  # the first of equally fast ones


@rare_collections()
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

    target: as on the command line, `package:function`, `file.py:function` or `hf:config.json`.
    hardware: a description, a preset's name, or a file.
    global_samples, batch_tokens: the batch of a step of all ranks, in samples or in tokens; by
        default the example call's samples on every rank. Micro-batches and their accumulation are
        chosen so that a step has that many.
    plan: its fields stay as given. Without a precision, the fastest format of the hardware is used.
    batch, seq: of an `hf:` model's call. nvme: the folder that plans use for the nvme tier.
    says: called with the next action, and whether it is of interest until the following one only.

    Of the warnings about plans that are tried, those about the fastest one are given.

    Returns:
        A view to print. `view.plan` is the fastest plan, as `zerofx.compile` takes it.

    Raises:
        PlanError: the hardware is unknown, the world is empty, the batch cannot be divided, or
            nothing fits; then the message has the missing bytes, and the nearest plan that fits.

    Example:
        plan = {"stage": 3, "precision": "bf16"}  # what stays as given
        view = zerofx.search("model.py:build", hardware="dgx-h100", world_size=8, plan=plan)
        print(view)
        Path("plan.yaml").write_text(view.to_yaml())
    """
    whole(1)("world_size", world_size)
    described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    described.check_world(world_size)
    base, settled = _settled(plan, described)
    named = resolve(target, batch, seq) if isinstance(target, str) else target
    if not isinstance(named, Target):
        raise PlanError(
            f"search was given an object of type {type(target).__name__}. It takes a name such as "
            "'file.py:function', or a Target with the model and the arguments of a call."
        )
    family = ModelFamily(base, says=says, target=named)
    space = Space(
        described, world_size, 0, base, settled, family.tiled, nvme,
        most_stages=_most_stages(family, settled), has_sequences=family.tokens > 0,
        has_loss="parallel" in settled or family.has_loss,
    )  # fmt: skip
    ranks = space.data_ranks()
    samples, notes = _global_samples(family, world_size, ranks, global_samples, batch_tokens)
    space = replace(space, global_samples=samples)
    bounds = Bounds(family, described, world_size, space.plainest)
    under_way = Search(family, space, bounds, says=says)
    found = under_way.run()
    if not found.fits:
        raise too_large(under_way)
    family.warned.give(warnings_of(found.best.choice.plan))
    return SearchView(found, notes)


def _settled(plan: PlanLike, hardware: Hardware) -> tuple[Plan, frozenset[str]]:
    """Return the plan to start from, and the fields that the user has given."""
    given = dict(plan) if isinstance(plan, Mapping) else as_plan(plan).to_dict()
    default = Plan().to_dict()
    settled = {n for n, v in given.items() if isinstance(plan, Mapping) or v != default[n]}
    if "precision" not in settled and hardware.device_type == "cuda":
        given["precision"] = max(FORMATS, key=lambda f: hardware.dense_flops_per_s.get(f, 0.0))
    return Plan.from_dict(given), frozenset(settled)


def _most_stages(family: Family, settled: frozenset[str]) -> int:
    """Return how many pipeline stages plans may have: none if the axes stay as given."""
    return 0 if "parallel" in settled else family.units


def _global_samples(
    family: Family, world_size: int, ranks: list[int], samples: int | None, tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return the samples of a step of all ranks, and a note if the tokens are rounded.

    ranks: the numbers of ranks that may have samples of their own; the others share theirs.
    """
    if samples is not None and tokens is not None:
        raise PlanError(
            "search: the global batch is given in samples and in tokens. Leave out one of them."
        )
    if tokens is not None:
        return _of_tokens(family, ranks, tokens)
    if samples is None:
        samples = family.samples * world_size
    if all(samples < n or samples % n for n in ranks):
        most = ranks[-1]
        raise PlanError(
            f"search: {counted(samples, 'sample')} per step cannot be divided among "
            f"{counted(most, 'rank')}. Give "
            f"{max(1, round(samples / most)) * most}, the nearest number that can."
        )
    return samples, ()


def _of_tokens(family: Family, ranks: list[int], tokens: int) -> tuple[int, tuple[str, ...]]:
    """Return the most samples, equally many on all ranks, with at most the given tokens.

    If there are too few for all ranks, some of them share samples.
    """
    if not family.tokens:
        raise PlanError(
            f"search: {counted(tokens, 'token')} per step are given, and no input of {family.name} "
            "is an integer matrix, samples by tokens. Give --global-batch, in samples."
        )
    most = max((n for n in ranks if n * family.tokens <= tokens), default=0)
    if not most:
        least = family.tokens * ranks[-1]
        raise PlanError(
            f"search: {counted(tokens, 'token')} per step are less than a sample of "
            f"{family.tokens:,} on each of {counted(ranks[-1], 'rank')}. Give {least:,} or more."
        )
    samples = tokens // (family.tokens * most) * most
    taken = samples * family.tokens
    if taken == tokens:
        return samples, ()
    return samples, (
        f"{tokens:,} tokens per step were given and {taken:,} are used: {samples:,} samples of "
        f"{family.tokens:,}, equally many on {counted(most, 'rank')}",
    )
