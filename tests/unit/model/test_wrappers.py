"""Other wrappers around a compiled model, or inside one: each is refused by name, with a fix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.replicate import replicate as copy_to_devices

import zerofx
from zerofx.errors import CaptureError, ShardError


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def compiled(stage: int = 3) -> nn.Module:
    return zerofx.compile(make(), zerofx.Plan(kernels="aten", stage=stage))


def said(attempt: Callable[[], Any]) -> str:
    """Return what an attempt raises, with the kind, or "nothing"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FSDP1: deprecated, and on a CPU
            attempt()
    except (ShardError, CaptureError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrap_everything() -> dict[str, str]:
    from torch.distributed._composable import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    compiled()  # joins the other ranks
    mesh, x = init_device_mesh("cpu", (1,)), torch.ones(2, 4)

    def flat(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    def in_part(model: nn.Sequential) -> nn.Module:
        fully_shard(model[0], mesh=mesh)
        return model

    def by_columns(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh, {"0": ColwiseParallel()})

    ways: dict[str, Callable[[Any], nn.Module]] = {
        "DistributedDataParallel": DistributedDataParallel,
        "DataParallel": nn.DataParallel,
        "FullyShardedDataParallel": flat,
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "fully_shard in part": in_part,
        "replicate": replicate,
        "distribute_module": lambda model: distribute_module(model, mesh),
        "parallelize_module": by_columns,
    }
    found = {}
    for name, way in ways.items():
        if name not in ("fully_shard in part", "parallelize_module"):  # torch's own errors
            found[f"{name} of compiled"] = said(lambda way=way: way(compiled()))
        found[f"compile of {name}"] = said(lambda way=way: zerofx.compile(way(make())))
    outer = nn.Sequential(compiled(stage=0), nn.Linear(4, 4))
    found["DistributedDataParallel around it, called"] = said(
        lambda: DistributedDataParallel(outer)(x)
    )
    found["compiled, after that"] = said(lambda: outer[0](x).sum().backward())
    found["equal"] = str(unwrap_and_train(x))
    return found


def unwrap_and_train(x: Tensor) -> bool:
    """Follow the advice for DistributedDataParallel: compile the plain module inside it."""
    wrapped, plain = DistributedDataParallel(make()), make()
    model = zerofx.compile(wrapped.module, zerofx.Plan(kernels="aten"))
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    return all(torch.equal(state[k], v) for k, v in plain.state_dict().items())


def test_wrappers_are_refused_by_name(pool: Pool) -> None:
    for found in pool.run(1, wrap_everything):
        assert found.pop("equal") == "True"
        assert found.pop("compiled, after that") == "nothing"
        silent = {k for k, v in found.items() if v == "nothing"}
        assert silent == {
            "DataParallel of compiled",  # runs it where it is, on a CPU
        }
        for attempt, text in found.items():
            if text == "nothing":
                continue
            name = attempt.removeprefix("compile of ").split()[0]
            assert name in text, attempt
            is_before = attempt.startswith("compile of")
            assert text.startswith("CaptureError: capture:" if is_before else "ShardError: ")
            assert (
                "Pass the plain module" in text
                or "Build the model again" in text
                or ("Drop " in text and "train the compiled model as it is" in text)
            )


def test_data_parallel_is_refused_before_it_copies() -> None:
    with pytest.raises(ShardError, match="DataParallel is applied to a Sequential that"):
        copy_to_devices(compiled(), ["cuda:0", "cuda:1"])


def test_torch_compile_runs_a_compiled_model_as_it_is() -> None:
    x, model = torch.ones(2, 4), compiled()
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    for wrap in (torch.compile, nn.DataParallel):
        with pytest.raises(CaptureError, match=r"Pass the plain module inside it \(model\._?\w+\)"):
            zerofx.compile(wrap(make()))
    with pytest.raises(CaptureError, match=r"\(model\.get_submodule\('0'\)\.module\)"):
        zerofx.compile(nn.Sequential(nn.DataParallel(make())))


def test_a_compiled_model_is_looked_into_as_any_module() -> None:
    model = compiled()
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert not model._is_fsdp_managed_module and not model._distribute_module_applied
