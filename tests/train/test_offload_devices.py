"""Parameters of one model on a device and on the host: collectives run between devices alone.

Meta stands for the device: what is on it can be told from the host's.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx.comm.collectives import Axis
from zerofx.optim.flat import _sum, divisor, near
from zerofx.runtime.store.state import iter_full_state
from zerofx.runtime.tensors.piece import ParameterPiece

META, HOST = torch.device("meta"), torch.device("cpu")


class Launched(Exception):
    """A collective was launched on these devices: far enough."""


class Spy:
    """A world on a device, whose collectives say where their tensors are."""

    device, rank = META, 0

    def agree(self, what: str, digest: str) -> None:
        pass

    def axis(self, name: str) -> Axis:
        return Axis()

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "") -> Any:
        raise Launched(out.device.type, shard.device.type)


def piece() -> Any:
    layout = SimpleNamespace(shard_size=2, has=lambda bucket: True)
    ledger = SimpleNamespace(world=Spy(), layout=layout)
    made = SimpleNamespace(
        name="w", ledger=ledger, shape=torch.Size([6]), length=3, tensor_part=None,
        ranges_of=lambda rank: ((0, 3),), bucket=None,
    )  # fmt: skip
    made._of_stage = partial(ParameterPiece._of_stage, made)
    made._of_shards = partial(ParameterPiece._of_shards, made)
    return made


def norms_of_what_is_on_the_host() -> None:
    ParameterPiece.gather_partials(piece(), torch.ones(2), "norms")


def the_whole_of_a_parameter() -> None:
    ParameterPiece.whole(piece(), torch.ones(3))


def the_whole_state() -> None:
    bucket = SimpleNamespace(index=0, label=lambda: "w", numel=6, dtype=torch.float32)
    layout = SimpleNamespace(buckets=[bucket], shard_size=2, has=lambda bucket: True)
    homes = SimpleNamespace(fetch=lambda shard: shard, nvme=None)
    store = SimpleNamespace(
        world=Spy(), layout=layout, shards=[torch.ones(3)], settle=list,
        ledger=SimpleNamespace(check_whole=str), homes=homes,
    )  # fmt: skip
    next(iter_full_state(store))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call", [norms_of_what_is_on_the_host, the_whole_of_a_parameter, the_whole_state]
)
def test_what_lives_on_the_host_travels_between_devices(call: Any) -> None:
    with pytest.raises(Launched) as caught:
        call()
    assert caught.value.args == ("meta", "meta")


def test_a_norm_over_both_is_summed_on_the_device() -> None:
    one = torch.ones((), dtype=torch.float64)
    assert _sum([one, one.to(META)]).device == META
    assert float(_sum([one, one])) == 2.0


def test_what_gradients_are_divided_by_is_where_they_are() -> None:
    scale = divisor(torch.full((), 4.0, dtype=torch.float64), 2.0, None)
    assert scale is not None and scale.device == HOST
    assert near(scale, SimpleNamespace(param=torch.ones(1))) is scale  # type: ignore[arg-type]
    on_device = near(scale, SimpleNamespace(param=torch.ones(1, device=META)))  # type: ignore[arg-type]
    assert on_device is not None and on_device.device == META
    assert near(None, SimpleNamespace(param=torch.ones(1))) is None  # type: ignore[arg-type]
