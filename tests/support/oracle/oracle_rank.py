"""One simulated rank of the oracle: interprets a program's graphs, yielding where it must wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from oracle_exchange import Exchange
from oracle_memory import Memory, OracleError
from oracle_ops import Blocking, Communication
from oracle_placed import cut
from oracle_shards import Far
from torch import Tensor, fx

from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.program import Program
from zerofx.ir.spec import spec_of

if TYPE_CHECKING:
    from oracle import State


class Rank:
    """Holds a rank's state, and runs forward and backward over it as a generator."""

    def __init__(self, rank: int, program: Program, state: State, exchange: Exchange) -> None:
        self.rank, self.program = rank, program.planned()
        self.team = self.program.plan.parallel.tensor
        self.context = self.program.plan.parallel.context
        self.buffers = {k: v.clone() for k, v in state.buffers.items()}
        self.inputs = {k: v.detach().clone() for k, v in state.inputs[rank].items()}
        self.tangents = state.tangents[rank]
        self.params = {k: v.detach().clone() for k, v in state.params.items()}
        for p in program.params.values():
            if p.tile is not None:
                held, over = self.params[p.tile.name], p.tile.part
                if over is not None:  # the rank's part first, and then its rows
                    way = over.cut
                    held = cut(held, way.dim, way.groups, rank % self.team, self.team)
                each = held.shape[0] // p.tile.count
                self.params[p.name] = held[p.tile.index * each :][:each]
            elif p.part is not None:
                way, whole = p.part.cut, self.params[p.name]
                self.params[p.name] = cut(whole, way.dim, way.groups, rank % self.team, self.team)
        self.aliases = {a: p.name for p in program.params.values() for a in p.aliases}
        self.shards = self._cut_shards()
        self.memory = Memory(self.program.slot_bytes)
        self.ops = Communication(
            rank, self.program.layout, self.memory, self.shards, exchange, self.team,
            self.context,
        )  # fmt: skip
        self.ops.zigzag = self.program.plan.parallel.is_zigzag
        self.ops.away.far, self.ops.away.stays = self._far()
        self.ops.away.stored = self._stored()
        self.saved: list[Any] = []
        self.results: list[tuple[OutputInfo, Any]] = []
        self.full_grads: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(state.seeds[rank]).get_state()

    def _cut_shards(self) -> dict[int, Tensor]:
        """Lay the parameters out in their buckets and keep this rank's slices."""
        layout, shards = self.program.layout, {}
        for bucket in layout.buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
            for param in bucket.params:
                flat[param.offset : param.offset + param.numel] = self.params[param.name].reshape(
                    -1
                )
            length = bucket.numel // layout.shard_size
            first = self.rank // self.team % layout.shard_size * length
            shards[bucket.index] = flat[first : first + length].clone()
        return shards

    def _far(self) -> tuple[dict[int, Far], set[int]]:
        """Return handles of slices off the device, once there are ops to move them, and who stays.

        Between one owner and the device nothing is gathered: what stays there is the bucket.
        """
        layout = self.program.layout
        if not any(fact.name == "SHARDS_OFFLOADED" for fact in self.program.facts):
            return {}, set()
        away = [b for b in layout.buckets if b.home.value != "device"]
        stays = {b.index for b in away if b.source.value == "device" and layout.shard_size > 1}
        return {b.index: Far(b.index, self.shards[b.index]) for b in away}, stays

    def _stored(self) -> set[int]:
        """Return the buckets whose gathers begin on NVMe."""
        buckets = self.program.layout.buckets
        return {b.index for b in buckets if b.source.value == "nvme"}

    def _feed(self, node: fx.Node) -> Any:
        what = info(node)
        if what.role is Role.PARAM:
            return self.params[self.aliases.get(what.name, what.name)]
        if what.role is Role.BUFFER:
            return self.buffers[what.name]
        if what.role is Role.INPUT:
            return self.inputs[what.index]
        if what.role is Role.TANGENT:
            return self.tangents[what.index]
        if what.role is Role.SHARD:
            return self.ops.shard(what.index)
        assert what.role is Role.SAVED, node
        return self.saved[what.index]

    # -- running ----------------------------------------------------------------------------
    def step(self) -> Blocking:
        """Run every graph of the program once, in order."""
        for name, gm in self.program.graphs.items():
            values = yield from self._call(gm)
            results = list(zip(self.program.outputs[name], values, strict=True))
            self._finish_call(results)

    def _call(self, gm: fx.GraphModule) -> Blocking:
        env: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = self._feed(node)
                continue
            args = fx.node.map_arg(node.args, env.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
            if node.op == "output":
                return args[0]
            if node.op == "get_attr":
                value: Any = gm
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                env[node] = value
            elif _is_ours(node):
                env[node] = yield from self.ops.run(node, args, kwargs)
            else:
                env[node] = self._compute(node, args, kwargs)
        raise AssertionError("a graph without output")

    def _compute(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if "flash_attention_for_cpu" in str(node.target):
            _check_heads(node, [a for a in args if isinstance(a, Tensor) and a.dim() == 4])
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        torch.set_rng_state(self._random)
        value = node.target(*args, **kwargs)  # type: ignore[operator]
        self._random = torch.get_rng_state()
        return value

    def _finish_call(self, results: list[tuple[OutputInfo, Any]]) -> None:
        """Hand out results; write updates in place; forget what does not outlive the call."""
        self.saved = [v for spec, v in results if spec.role is Role.SAVED]
        for spec, value in results:
            if spec.role is Role.GRAD and value is not None:
                name = self.aliases.get(spec.name, spec.name)
                before = self.full_grads.get(name)
                self.full_grads[name] = value if before is None else before + value
        for spec, value in results:
            if spec.role is Role.BUFFER_UPDATE:
                self.buffers[spec.name].copy_(value)
            elif spec.role is Role.INPUT_UPDATE:
                self.inputs[spec.index].copy_(value)
        self.ops.end_call()
        # the user reads outputs after the call: one that lies in a slot is garbage by then
        self.results += [(spec, _copy(v)) for spec, v in results]


def _is_ours(node: fx.Node) -> bool:
    """Say whether a node communicates; a fused pattern is compute, though its op is zerofx's."""
    return spec_of(node) is not None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _check_heads(node: fx.Node, given: list[Tensor]) -> None:
    """Raise where the kernel of torch would end the process: it takes sizes as they come."""
    forms = {tuple(x.shape) for x in given}
    if len({(f[0], f[1], f[3]) for f in forms}) > 1 or not all(x.numel() for x in given):
        raise OracleError(f"{node.name} attends with {forms}")
