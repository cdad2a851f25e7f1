"""The sharded parameter: what it is, what it refuses by name, which writes it counts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shard_cases import deliver, gradients, on_ranks, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.comm.world import World
from zerofx.compat.tensors import DisableTorchFunctionSubclass
from zerofx.errors import ShardError
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.tensors.parameter import ReplicatedParameter, ShardedParameter
from zerofx.runtime.tensors.piece import is_cut, piece_of


def test_it_is_a_parameter_and_a_dtensor_of_the_global_shape() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
        assert (p.shape, p.ndim, p.numel(), len(p)) == (torch.Size([33, 13]), 2, 429, 33)
        assert (p.size(1), p.stride(), p.is_leaf, p.requires_grad) == (13, (13, 1), True, True)
        assert (p.dtype, p.device, p.grad) == (torch.float32, torch.device("cpu"), None)
        local = p.to_local()
        assert local.ndim == 1 and local.data_ptr() == store.local_view("0.weight").data_ptr()
        assert len(repr(p)) < 100 and repr(p).startswith("ShardedParameter(0.weight, [33, 13]")
        assert f"{p}" == repr(p)
        assert not isinstance(p.data, nn.Parameter) and not isinstance(p.grad, nn.Parameter)
        assert [n for n, _ in model.named_parameters()] == list(store.params)
        assert {id(p) for p in model.parameters()} == {id(p) for p in store.params.values()}

    on_ranks(2, body)


def test_what_callers_ask_is_answered_by_its_piece() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        full = gradients(model, 0)
        deliver(store, full)
        for name, param in store.params.items():
            piece = piece_of(param)
            assert piece is not None and piece is store.pieces[name] and piece.name == name
            assert is_cut(param) == is_cut(param.grad) == piece.is_cut == (world.size > 1)
            local = piece.local(param).detach().reshape(-1)
            assert local.data_ptr() == store.local_view(name).data_ptr()
            shown = piece.show(local)
            assert (shown.shape, type(shown)) == (param.shape, type(param.grad))
            gradient = piece.local(param.grad)
            assert torch.equal(gradient.reshape(-1), piece.cut(full[name].reshape(-1)))
            assert torch.equal(piece.whole(gradient.reshape(-1)), full[name])
        assert piece_of(nn.Parameter(torch.ones(2))) is None

    on_ranks(1, body)
    on_ranks(3, body)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda p: p @ p.to_local()[:1],
    "linear": lambda p: nn.functional.linear(torch.ones(1, 13), p),
    "__getitem__": lambda p: p[0],
    "__setitem__": lambda p: p.data.__setitem__(0, 1.0),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(-1),
    "T": lambda p: p.T,
    "t": lambda p: p.t(),
    "sum": lambda p: p.sum(dim=0),
    "mean": lambda p: p.mean(-1),
    "norm": lambda p: p.norm(dim=1),
    "linalg_norm": lambda p: torch.linalg.norm(p, ord=2),
    "argmax": lambda p: p.argmax(),
    "sort": lambda p: torch.sort(p),
    "cumsum": lambda p: p.cumsum(0),
    "std": lambda p: p.std(),
    "where": lambda p: torch.where(p > 0),
    "item": lambda p: p.item(),
    "__bool__": lambda p: bool(p > 0),
    "tolist": lambda p: p.tolist(),
    "unbind": lambda p: list(p),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p]),
    "numpy": lambda p: p.detach().numpy(),
    "__array__": np.asarray,
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "dropout": lambda p: nn.functional.dropout(p),
    "rand_like": torch.rand_like,
    "set_": lambda p: p.data.set_(torch.ones(3)),
    "resize_": lambda p: p.data.resize_(3),
    "redistribute": lambda p: p.redistribute(placements=[]),
    "expand": lambda p: p.expand(2, 33, 13),
    "flatten": lambda p: nn.utils.parameters_to_vector([p]),
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "share_memory_": lambda p: p.share_memory_(),
    "module_load": lambda p: p.module_load(torch.zeros(33, 13)),
}


@pytest.mark.parametrize("op", REFUSED)
def test_refused_by_name_with_the_way_out(op: str) -> None:
    wording = {"flatten": "view"}.get(op, op)

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with pytest.raises(ShardError) as caught, torch.no_grad():
            REFUSED[op](model[0].weight)
        text = str(caught.value)
        assert f"0.weight: {wording} needs the whole tensor" in text
        assert "zerofx.full_state_dict(model)" in text and "[33, 13]" in text

    on_ranks(2, body)


def test_mixing_what_is_cut_differently_is_refused_on_every_rank() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with torch.no_grad():
            with pytest.raises(ShardError, match=r"0.weight: add mixes it with 1.weight"):
                torch.add(model[0].weight, model[1].weight)
            with pytest.raises(ShardError, match=r"_foreach_add_ mixes it with 1.bias"):
                torch._foreach_add_([model[0].bias], [model[1].bias])
            with pytest.raises(ShardError, match=r"copy_ of a tensor of shape \[216\].*\[33, 13\]"):
                model[0].weight.copy_(torch.zeros(216))
            with pytest.raises(ShardError, match="plain tensor in one list position"):
                torch._foreach_add([torch.zeros(33)], [model[0].bias])

    on_ranks(2, body)


def test_plain_tensors_are_written_from_whole_parameters() -> None:
    """What an average of the weights does that was made before the model was compiled."""

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        weight, bias = model[0].weight.detach(), model[0].bias.detach()
        copied, added = torch.zeros(33, 13).copy_(weight), [torch.ones(33), torch.ones(33, 13)]
        torch._foreach_lerp_(added, [bias, weight], 0.25)
        assert torch.equal(copied, whole(weight))
        assert torch.equal(added[0], torch.lerp(torch.ones(33), whole(bias), 0.25))
        assert torch.equal(added[1], torch.lerp(torch.ones(33, 13), copied, 0.25))

    on_ranks(3, body)


def test_deepcopy_and_pickling_of_a_parameter_are_refused() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        with pytest.raises(ShardError, match=r"0.weight: deepcopy .* refused"):
            copy.deepcopy(p)
        with pytest.raises(ShardError, match=r"0.weight: pickling .*zerofx.save"):
            pickle.dumps(p)
        with pytest.raises(ShardError, match=r"0.weight: pickling .*zerofx.save"):
            torch.save({"state": torch.zeros_like(p)}, "/dev/null")
        state = torch.ones_like(p)
        twin = copy.deepcopy({"exp_avg": state})["exp_avg"]
        twin.zero_()
        assert bool((state == 1).all())

    on_ranks(2, body)


def test_gradient_hooks_are_refused() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with pytest.raises(
            ShardError, match=r"0.weight: register_hook .* never run.*Use register_p"
        ):
            model[0].weight.register_hook(print)

    on_ranks(2, body)
    on_ranks(1, body)


def test_a_loss_term_outside_the_module_raises_in_backward_only() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        assert p.norm().item() > 0  # for a log it is fine
        for term in (p.norm() ** 2, (p * 2).sum(), torch.linalg.vector_norm(p)):
            with pytest.raises(ShardError, match=r"0.weight: a loss term .* inside the model's"):
                term.backward()
        with torch.no_grad():
            assert not (p * 2).requires_grad
        assert p.grad is None

    on_ranks(2, body)


def test_writes_are_counted_and_reads_are_not() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        deliver(store, gradients(model, 0))
        params = list(model.parameters())

        def bumps(action: Callable[[], Any]) -> bool:
            before = store.writes
            action()
            return store.writes > before

        with torch.no_grad():
            for write in (
                lambda: p.add_(1),
                lambda: p.data.mul_(2),
                lambda: p.detach().zero_(),
                lambda: p.copy_(torch.ones(33, 13)),
                lambda: torch._foreach_mul_(params, 2.0),
                lambda: torch.mul(p, 2, out=p),
                lambda: setattr(p, "data", torch.zeros(33, 13)),
                lambda: nn.init.xavier_uniform_(p),
                lambda: p.data.__setitem__(p > 0, 0.0),
            ):
                assert bumps(write)
            for read in (
                lambda: p.data.norm(),
                lambda: p + 1,
                lambda: p.grad.mul_(2),
                lambda: torch.zeros_like(p).add_(p),
                lambda: nn.utils.clip_grad_norm_(params, 1.0),
                lambda: p.data,
                lambda: repr(p),
            ):
                assert not bumps(read)
        before = store.epoch
        local = p.to_local()
        assert store.epoch > before  # a plain alias was handed out
        before = store.writes
        local.add_(1)
        assert store.poll_writes() > before

    on_ranks(2, body)


def test_data_and_grad_setters() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p, full = model[0].weight, torch.randn(33, 13, generator=torch.Generator().manual_seed(3))
        address = p.to_local().data_ptr()
        p.data = full
        assert torch.equal(whole(p), full) and p.to_local().data_ptr() == address
        p.data = p.data * 2
        assert torch.equal(whole(p), full * 2) and p.to_local().data_ptr() == address
        with pytest.raises(ShardError, match=r"0.weight: p.data was given \[33, 13\].*float64"):
            p.data = full.double()
        with pytest.raises(ShardError, match=r"0.weight: p.data was given \[3\]"):
            p.data = torch.zeros(3)
        p.grad = torch.ones_like(p)
        assert torch.equal(whole(p.grad), torch.ones(33, 13))
        p.grad = p.grad * 0.5
        assert torch.equal(whole(p.grad), torch.full((33, 13), 0.5))
        with pytest.raises(ShardError, match=r"0.weight: p.grad was given a plain Tensor of shape"):
            p.grad = full
        with pytest.raises(ShardError, match=r"0.weight: p.grad was given .*not cut like"):
            p.grad = torch.zeros_like(model[1].weight)
        p.grad = None
        assert p.grad is None

    on_ranks(2, body)


def test_vectors_back_to_parameters() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        vector = torch.arange(sum(p.numel() for p in model.parameters()), dtype=torch.float32)
        nn.utils.vector_to_parameters(vector, model.parameters())
        pieces = torch.cat([whole(p).view(-1) for p in model.parameters()])
        assert torch.equal(pieces, vector)

    on_ranks(2, body)


def test_replicated_parameters_are_plain_tensors() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        assert type(p) is ReplicatedParameter and isinstance(p, nn.Parameter)
        assert type(p @ p.T) is Tensor and type(p.detach()) is Tensor
        assert p.data_ptr() == store.shards[0].data_ptr()
        p.data = torch.ones(33, 13)
        assert p.data_ptr() == store.shards[0].data_ptr() and float(p.detach().sum()) == 429
        with pytest.raises(ShardError, match=r"0.weight: p.data was given"):
            p.data = torch.ones(33, 13, dtype=torch.float64)
        twin = copy.deepcopy(p)
        assert type(twin) is nn.Parameter and twin.data_ptr() != p.data_ptr()
        loaded = pickle.loads(pickle.dumps(p))
        assert torch.equal(loaded, p) and loaded.untyped_storage().nbytes() == 429 * 4
        before = store.poll_writes()
        with torch.no_grad():
            p.add_(1)
        assert store.poll_writes() > before

    on_ranks(1, body)


def test_dispatch_behind_torch_function_is_refused_too() -> None:
    """On 2.13 what slips past `__torch_function__` reaches our dispatch; 2.11 bypasses it."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 dispatches DTensor subclasses in C++")

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        assert type(model[0].weight) is ShardedParameter
        with (
            DisableTorchFunctionSubclass(),
            pytest.raises(ShardError, match=r"0.weight: mm.default"),
        ):
            torch.ops.aten.mm.default(model[0].weight, torch.zeros(13, 2))

    on_ranks(2, body)
