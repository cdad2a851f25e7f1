"""Process groups of worlds that are gone, kept for the next world over the same ranks.

A group costs three threads and some descriptors (on NCCL device memory), and cannot be destroyed
where a model happens to be collected: torch derives the names of groups from those that exist, so
ranks that destroy at different times would name the next one differently and hang; and NCCL wants
all ranks in it. So a dropped world's groups are kept, and a new world takes over those that every
rank has kept with an equal number of launches, all finished: nothing is then under way in them.
Two living worlds never share groups: only each world's own agreement orders its transfers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.runtime.meeting import Meeting

Kind = tuple[str, str]
"""The backend and the grid of ranks."""


@dataclass
class Groups:
    """One world's groups: axis -> (gathers, reduces). `name` is the same on all its ranks.

    `launched` counts this rank's collectives in the worlds that are gone.
    """

    name: str
    pairs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    launched: int = 0
    job: Any = field(default_factory=lambda: dist.group.WORLD)


_KEPT: dict[Kind, list[Groups]] = {}


def keep(kind: Kind, groups: Groups) -> None:
    """Keep the groups of a world that has ended with nothing in flight."""
    _KEPT.setdefault(kind, []).append(groups)


def take(kind: Kind, meeting: Meeting) -> Groups | None:
    """Return groups that all ranks have kept, the same on each; None if there are none.

    A collective call among the ranks of the meeting.

    Raises:
        DesyncError: a rank did not come; names it.
    """
    job = dist.group.WORLD
    for kept in _KEPT.values():  # torch destroys all groups with the default one
        kept[:] = [groups for groups in kept if groups.job is job]
    mine = {groups.name: groups for groups in _KEPT.get(kind, [])}
    texts = meeting.share("spare", json.dumps({name: g.launched for name, g in mine.items()}))
    offers = [json.loads(text) for text in texts]
    common = [n for n in offers[0] if all(offer.get(n) == offers[0][n] for offer in offers)]
    if not common:
        return None
    chosen = mine[min(common, key=int)]
    _KEPT[kind].remove(chosen)
    return chosen
