"""Models that bring their own slices, against one process that has their parameters whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from safetensors.torch import load_file
from sliced_models import Gpt, Mlp, ModelParallel, Tied, batch_of, mark
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

import zerofx
import zerofx.optim
from zerofx.errors import (
    ArgumentError,
    CaptureError,
    PlanError,
    ShardError,
    SnapshotError,
)
from zerofx.integrations import deepspeed

STEPS = 5
State = dict[str, Tensor]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def mesh_of(data: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (data, 2), mesh_dim_names=("dp", "tp"))


def share(kind: type[nn.Module], mesh: DeviceMesh) -> list[Tensor]:
    """Return this data rank's samples of the batch."""
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    return [each.chunk(size)[rank] for each in batch_of(kind)]


def sliced(kind: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    return kind(ModelParallel(mesh["tp"].get_group()))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def lamb(params: Any) -> torch.optim.Optimizer:
    return zerofx.optim.Lamb(params, lr=1e-2, max_grad_norm=0.05)


def own_sgd(params: Any) -> torch.optim.Optimizer:
    return zerofx.optim.SGD(params, lr=0.1, momentum=0.9)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, clips: bool, count: int = STEPS
) -> tuple[list[float], list[float]]:
    """Train; return the losses and the norms."""
    losses, norms = [], []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        if clips:
            norms.append(float(clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


Make = Callable[[Any], torch.optim.Optimizer]


def trained(kind: type[nn.Module], plan: Any, make: Make, clips: bool) -> Any:
    mesh = mesh_of()
    model = zerofx.compile(sliced(kind, mesh), plan, mesh=mesh["dp"])
    _, norms = steps(model, make(model.parameters()), share(kind, mesh), clips)
    own = model.zerofx
    assert (own.data_world, own.data_rank) == (2, mesh["dp"].get_local_rank())
    assert not own.islands and len(own.programs) == 1
    return norms, model.state_dict()


def of_several_lengths() -> tuple[list[float], int]:
    mesh = mesh_of(1)
    model = zerofx.compile(sliced(Gpt, mesh), {"kernels": "aten"}, mesh=mesh["dp"])
    ids, labels = batch_of(Gpt)
    found = []
    for length in (8, 6, 4, 5):
        loss = model(ids[:, :length], labels[:, :length])
        loss.backward()
        found += [float(loss.detach()), float(clip_grad_norm_(model.parameters(), 1.0))]
        model.zero_grad()
    return found, len(model.zerofx.programs)


@pytest.mark.slow
def test_a_program_of_slices_serves_several_lengths(pool: Pool) -> None:
    plain, expected = Gpt(ModelParallel()), []
    ids, labels = batch_of(Gpt)
    for length in (8, 6, 4, 5):
        loss = plain(ids[:, :length], labels[:, :length])
        loss.backward()
        expected += [float(loss.detach()), float(clip_grad_norm_(plain.parameters(), 1.0))]
        plain.zero_grad()
    for found, number in pool.run(2, of_several_lengths):
        assert found == pytest.approx(expected, rel=1e-5)
        assert number == 2  # the first length, and all others


def over_copies_of_shards() -> State:
    """Train over a 2-D mesh of data ranks, of which the first axis replicates."""
    names = ("dp_replicate", "dp_shard", "tp")
    mesh, whole = mesh_of(), init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    data = whole["dp_replicate", "dp_shard"]
    model = zerofx.compile(sliced(Mlp, mesh), {"kernels": "aten"}, mesh=data)
    steps(model, sgd(model.parameters()), share(Mlp, mesh), True)
    assert model.zerofx.world.replicate_size == 2 and model.zerofx.world.slices == "tp"
    return model.state_dict()


@pytest.mark.slow
def test_slices_train_over_a_mesh_of_two_data_axes(pool: Pool) -> None:
    plain = Mlp(ModelParallel())
    steps(plain, sgd(plain.parameters()), batch_of(Mlp), True)
    for state in pool.run(4, over_copies_of_shards):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "plan", "make", "bound"),
    [
        (Tied, {"stage": 3}, sgd, 1e-6),
        slow(Gpt, {"stage": 3}, adamw, 1e-5),
        slow(Gpt, {"stage": 0}, sgd, 1e-6),
        slow(Gpt, {"stage": 1}, adamw, 1e-5),
        slow(Gpt, {"stage": 2}, sgd, 1e-6),
        slow(Gpt, {"stage": 3}, lamb, 1e-5),
        slow(Gpt, {"stage": 3, "activations": "recompute"}, sgd, 1e-6),
        slow(Gpt, {"stage": 1, "kernels": "inductor"}, sgd, 1e-6),
        slow(Gpt, {"stage": 3, "offload": {"optimizer": "cpu"}}, adamw, 1e-5),
        slow(Gpt, {"stage": 3, "update": "in-backward"}, own_sgd, 1e-6),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_slices_train_and_clip_as_one_process(
    pool: Pool, kind: type[nn.Module], plan: Any, make: Make, bound: float
) -> None:
    plan, clips = {"kernels": "aten", **plan}, make not in (lamb, own_sgd)
    plain: nn.Module = kind(ModelParallel())
    whole = plain if clips else zerofx.compile(plain, {"kernels": "aten"})
    _, norms = steps(whole, make(whole.parameters()), batch_of(kind), clips)
    for found, state in pool.run(4, trained, kind, plan, make, clips):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=bound)


# -- DTensors of parallelize_module --------------------------------------------------------------
class Net(nn.Module):
    """A plain model, which `parallelize_module` distributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def distributed(mesh: DeviceMesh, by_sequence: bool) -> nn.Module:
    """Cut its layers over the axis "tp"; `by_sequence`: and the values between them."""
    between: Any = Shard(1) if by_sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if by_sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    return parallelize_module(Net(), mesh["tp"], plan)


def distributed_trained(plan: Any, make: Make, by_sequence: bool, folder: str) -> Any:
    mesh = mesh_of()
    model = zerofx.compile(distributed(mesh, by_sequence), plan, mesh=mesh["dp"])
    optimizer = make(model.parameters())
    _, norms = steps(model, optimizer, share(Net, mesh), True)
    assert not model.zerofx.islands and len(model.zerofx.programs) == 1
    assert model.up.weight.shape == (32, 16)
    zerofx.save(folder, model, optimizer)
    return norms, model.state_dict()


@pytest.mark.parametrize(
    ("plan", "make", "by_sequence", "bound"),
    [
        ({"stage": 3}, adamw, False, 1e-5),
        slow({"stage": 1}, sgd, False, 1e-6),
        slow({"stage": 3}, sgd, True, 1e-6),
        slow({"stage": 1}, adamw, True, 1e-5),
        slow({"stage": 1, "kernels": "inductor"}, sgd, False, 1e-6),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_dtensors_train_as_one_process(
    pool: Pool, tmp_path: Path, plan: Any, make: Make, by_sequence: bool, bound: float
) -> None:
    plan, folder = {"kernels": "aten", **plan}, str(tmp_path / "saved")
    plain = Net()
    optimizer = make(plain.parameters())
    _, norms = steps(plain, optimizer, batch_of(Net), True)
    given = plan, make, by_sequence, folder
    for found, state in pool.run(4, distributed_trained, *given):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=bound)
    steps(plain, optimizer, batch_of(Net), True, 1)
    whole = zerofx.compile(Net(), {"kernels": "aten"})
    resumed = make(whole.parameters())
    zerofx.load(folder, whole, resumed)
    steps(whole, resumed, batch_of(Net), True, 1)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole.state_dict()[name], param.detach(), rtol=0, atol=bound)


def not_taken() -> list[str]:
    mesh = mesh_of(1)
    said = []
    for change, over in (
        (lambda model: None, None),  # no mesh
        (lambda model: None, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
        (uneven, mesh["dp"]),
    ):
        model = distributed(mesh, False)
        change(model)
        with pytest.raises(PlanError) as refused:
            zerofx.compile(model, mesh=over)
        said.append(str(refused.value))
    return said


def uneven(model: nn.Module) -> None:
    mesh = mesh_of(1)["tp"]
    model.odd = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))


def test_dtensors_that_are_not_taken_are_named(pool: Pool) -> None:
    for without, other, odd in pool.run(2, not_taken):
        assert "embed.weight is a DTensor over ranks [0, 1]" in without and "not given" in without
        assert "mesh has ranks [0, 1]" in other and 'mesh=mesh["dp"]' in other
        assert "odd is a DTensor of shape [3] that 2 ranks share along dimension 0" in odd


# -- loss scaling --------------------------------------------------------------------------------
def overflowing() -> Any:
    """Give one tensor rank alone a gradient that overflows, by either kind of scaler."""
    mesh = mesh_of(1)
    plain = sliced(Mlp, mesh)
    with torch.no_grad():
        if mesh["tp"].get_local_rank() == 1:
            plain.up.weight.mul_(1e-3), plain.up.bias.mul_(1e-3), plain.down.weight.mul_(200)
    scale = {"compute": "fp16", "loss_scale": {"initial": 2.0**14}}
    model = zerofx.compile(plain, {"kernels": "aten", "precision": scale}, mesh=mesh["dp"])
    optimizer, before = sgd(model.parameters()), model.state_dict()
    x, y = batch_of(Mlp)
    model(x, y).backward()
    optimizer.step()
    first = model.zerofx.loss_scale.scale
    is_same = all(torch.equal(before[n], p) for n, p in model.state_dict().items())

    model = zerofx.compile(sliced(Mlp, mesh), {"kernels": "aten"}, mesh=mesh["dp"])
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(x, y)).backward()
    if mesh["tp"].get_local_rank() == 1:
        model.up.weight.grad.to_local().fill_(float("inf"))
    before = model.state_dict()
    scaler.step(optimizer)
    scaler.update()
    is_kept = all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    return first, is_same, scaler.get_scale(), is_kept


def test_an_overflow_in_one_slice_is_every_ranks(pool: Pool) -> None:
    for scale, is_same, of_torch, is_kept in pool.run(2, overflowing):
        assert scale == 2.0**13 and is_same
        assert of_torch == 4.0 and is_kept


# -- DeepSpeed with a parallel state ---------------------------------------------------------------
def by_deepspeed(config: dict[str, Any], folder: str) -> State:
    deepspeed.init_distributed()
    rank = dist.get_rank()
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_group=lambda: tensor,
        get_data_parallel_group=lambda: data,
    )
    model = Mlp(ModelParallel(tensor))
    engine = deepspeed.initialize(model=model, config=config, mpu=mpu, plan={"kernels": "aten"})[0]
    batch = [each.chunk(2)[rank // 2] for each in batch_of(Mlp)]
    for _ in range(STEPS):
        engine.backward(engine(*batch))
        engine.step()
    engine.save_checkpoint(folder, "end")
    uneven = SimpleNamespace(**{**vars(mpu), "get_data_parallel_group": lambda: dist.group.WORLD})
    with pytest.raises(ArgumentError, match="rows and the columns of one grid"):
        deepspeed.initialize(model=Mlp(ModelParallel(tensor)), config=config, mpu=uneven)
    return engine.module.state_dict()


@pytest.mark.slow
def test_an_mpu_says_over_which_ranks_a_model_is_sliced(pool: Pool, tmp_path: Path) -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": 2},
    }
    plain = Mlp(ModelParallel())
    steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), batch_of(Mlp), True)
    for state in pool.run(4, by_deepspeed, config, str(tmp_path)):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-5)
    whole = zerofx.compile(Mlp(ModelParallel()))
    zerofx.load(tmp_path / "end", whole)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole.state_dict()[name], param.detach(), rtol=0, atol=1e-5)


# -- snapshots -----------------------------------------------------------------------------------
def saved(folder: str) -> State:
    mesh = mesh_of()
    model = zerofx.compile(sliced(Gpt, mesh), {"kernels": "aten"}, mesh=mesh["dp"])
    optimizer = adamw(model.parameters())
    steps(model, optimizer, share(Gpt, mesh), True, 2)
    zerofx.save(f"{folder}/sliced", model, optimizer)
    zerofx.export(f"{folder}/sliced.safetensors", model)
    before = model.state_dict()
    steps(model, optimizer, share(Gpt, mesh), True, 2)
    after = model.state_dict()
    for load in (
        lambda: zerofx.load(f"{folder}/sliced", model, optimizer),
        lambda: zerofx.load_weights(model, f"{folder}/sliced.safetensors"),
    ):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load()
        assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    return after


def goes_on(source: str, target: str, data: int) -> State:
    """Load a snapshot over other ranks, save it again, and take two steps."""
    if not data:
        model, batch = zerofx.compile(Gpt(ModelParallel()), {"kernels": "aten"}), batch_of(Gpt)
    else:
        mesh = mesh_of(data)
        plan = {"kernels": "aten", "stage": 1}
        model = zerofx.compile(sliced(Gpt, mesh), plan, mesh=mesh["dp"])
        batch = share(Gpt, mesh)
    optimizer = adamw(model.parameters())
    zerofx.load(source, model, optimizer)
    zerofx.save(target, model, optimizer)
    steps(model, optimizer, batch, True, 2)
    return model.state_dict()


def test_a_snapshot_of_slices_loads_in_any_layout(pool: Pool, tmp_path: Path) -> None:
    plain = Gpt(ModelParallel())
    optimizer = adamw(plain.parameters())
    steps(plain, optimizer, batch_of(Gpt), True, 2)
    middle = {name: param.detach().clone() for name, param in plain.named_parameters()}
    steps(plain, optimizer, batch_of(Gpt), True, 2)
    end = {name: param.detach() for name, param in plain.named_parameters()}

    def check(found: State, expected: State) -> None:
        assert found.keys() >= expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)

    check(pool.run(4, saved, str(tmp_path))[0], end)
    check(load_file(tmp_path / "sliced.safetensors"), middle)
    check(goes_on(str(tmp_path / "sliced"), str(tmp_path / "whole"), 0), end)
    first, second = str(tmp_path / "whole"), str(tmp_path / "again")
    for state in pool.run(2, goes_on, first, second, 1):
        check(state, end)
    check(goes_on(second, str(tmp_path / "end"), 0), end)


# -- marks that are missing or wrong -------------------------------------------------------------
def unmarked(folder: str) -> list[str]:
    mesh = mesh_of()
    plain = sliced(Mlp, mesh)
    for param in plain.parameters():
        param.tensor_model_parallel = False
    model = zerofx.compile(plain, {"kernels": "aten"}, mesh=mesh["dp"])
    said = []
    for save in (zerofx.save, zerofx.export):
        with pytest.raises(SnapshotError) as refused:
            save(f"{folder}/{save.__name__}", model)
        said.append(str(refused.value))
    plain = sliced(Mlp, mesh)
    plain.up.bias.tensor_model_parallel = False
    with pytest.raises(PlanError) as forgotten:
        zerofx.compile(plain, mesh=mesh["dp"])
    said.append(str(forgotten.value))
    alike = zerofx.compile(nn.Linear(2, 2), mesh=mesh["dp"])  # the same on all ranks, so no slice
    with torch.no_grad():
        for param in alike.parameters():
            param.fill_(1.0)
    zerofx.save(f"{folder}/alike-{mesh['tp'].get_local_rank()}", alike)
    return said


def test_slices_without_marks_are_named_before_anything_is_written(
    pool: Pool, tmp_path: Path
) -> None:
    for *both, forgotten in pool.run(4, unmarked, str(tmp_path)):
        for said in both:
            assert "up.weight [8, 8]" in said and "mesh axis tp (2 ranks)" in said
            assert "tensor_model_parallel = True and partition_dim" in said
        assert "up.bias [8] differs along the mesh axis tp" in forgotten
    assert sorted(each.name for each in tmp_path.iterdir()) == ["alike-0", "alike-1"]


class Eager(nn.Module):
    """Cannot be captured: it reads a value."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.inner(x, y)
        return loss * float(loss.detach())


def wrong_marks(folder: str) -> list[str]:
    mesh = mesh_of(1)
    said = []

    def refused(change: Callable[[Any], None], plan: Any = None, over: Any = None) -> None:
        plain = sliced(Mlp, mesh)
        change(plain)
        with pytest.raises((PlanError, ShardError)) as error:
            zerofx.compile(plain, plan, mesh=mesh["dp"] if over is None else over)
        said.append(str(error.value))

    def set_on(name: str, **values: Any) -> Callable[[Any], None]:
        return lambda model: vars(model.get_parameter(name)).update(values)

    refused(set_on("up.weight", partition_dim=2))
    refused(set_on("up.weight", partition_stride=3))
    refused(set_on("down.bias", sequence_parallel=True))
    refused(lambda model: model.register_buffer("mask", torch.full((2,), float(model.up.mp.rank))))
    refused(lambda model: setattr(model.up, "weight", meta_like(model.up.weight)))
    refused(lambda model: None, {"tiling": {"up.weight": 2}})
    refused(lambda model: None, over=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    model = zerofx.compile(sliced(Mlp, mesh), {"kernels": "aten"}, mesh=mesh["dp"])
    x, y = batch_of(Mlp)
    model(x, y).backward()
    rank = mesh["tp"].get_local_rank()
    model.zerofx.adopt(model.zerofx.programs[0].emit(f"{folder}/{rank}"))
    model(x, y).backward()
    assert model.zerofx.programs[0].directory is not None
    with pytest.raises(ShardError) as differ:
        zerofx.compile(sliced(Mlp, mesh), {"kernels": "aten"}, mesh=mesh["dp"])(x + rank, y)
    said.append(str(differ.value))
    model = zerofx.compile(Eager(sliced(Mlp, mesh)), {"kernels": "aten"}, mesh=mesh["dp"])
    with pytest.raises(CaptureError) as eager:
        model(x, y)
    said.append(str(eager.value))
    cube = init_device_mesh("cpu", (1, 2, 1, 1), mesh_dim_names=("dp", "tp", "mp", "cp"))
    zerofx.compile(sliced(Mlp, mesh), mesh=cube["dp"])  # one of these has several ranks
    return said


def meta_like(param: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(param.detach().to("meta"))
    mark(made, 0)
    return made


def test_wrong_marks_are_named(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(2, wrong_marks, str(tmp_path)):
        dim, stride, summand, buffer, meta, tiled, copies, differ, eager = said
        assert "up.weight is marked as a slice, and its partition_dim is 2, of 2 dim" in dim
        assert "up.weight has 8 rows in dimension 0, and its partition_stride is 3" in stride
        assert "down.bias is marked sequence_parallel" in summand
        assert "buffer mask [2] differs along the mesh axis tp" in buffer
        assert "up.weight is on meta and a slice along tp" in meta
        assert "tiling" in tiled
        assert "up.weight is marked as a slice" in copies and "ranks 0 and 1" in copies
        assert "input x" in differ and "need the same samples" in differ
        assert "in place of the slices along tp" in eager
