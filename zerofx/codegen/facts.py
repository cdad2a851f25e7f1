"""Program facts: the data that an emitted program contains: layout, slots, roles, versions."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch

from zerofx import schema
from zerofx.hardware import Hardware, default_hardware, hardware_names, load_hardware
from zerofx.ir.meta import Placed, Role, info, value
from zerofx.ir.program import (
    BACKWARD,
    FORWARD,
    Calling,
    Planned,
    Reference,
    Stage,
    Sum,
    Unproved,
    Wire,
)
from zerofx.ir.sizes import Dim, Size, Sizes, Symbol, form
from zerofx.ir.verify_values import SHORT
from zerofx.layout.buckets import AXES, Layout
from zerofx.layout.placements import R
from zerofx.layout.tiers import Tier
from zerofx.layout.tiles import Tile

FORMAT = 5

# -- the allowed contents of fingerprint.json -----------------------------------------------------
_COUNT, _TEXT = schema.integer(), schema.text()
_DTYPES = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
_DTYPE = schema.one_of(_DTYPES)
_INDEX = schema.integer(-1)
_SHAPE = schema.sequence(_COUNT, most=64)
_CUT = schema.row(_COUNT, schema.integer(1), schema.integer(1))  # dim, groups, ranks
_TILE = schema.either(
    schema.row(_TEXT, _SHAPE, _COUNT, schema.integer(1)),
    schema.row(_TEXT, _SHAPE, _COUNT, schema.integer(1), _CUT),
)
_TIER = schema.one_of(tier.value for tier in Tier)
_BUCKET = schema.record(
    {
        "units": schema.sequence(_TEXT),
        "dtype": _DTYPE,
        "compute_dtype": _DTYPE,
        "reduce_dtype": _DTYPE,
        "numel": _COUNT,
        "persistent": schema.boolean,
        "trainable": schema.boolean,
        "home": _TIER,
        "source": _TIER,
        "params": schema.sequence(schema.row(_TEXT, _SHAPE, _COUNT, schema.optional(_TILE))),
    },
    positions=schema.sequence(_COUNT, least=1),
)
_ROLE = schema.one_of(role.value for role in Role)
_SIZES = schema.sequence(schema.either(_TEXT, schema.integer(-schema.MOST)), most=64)
_SPEC = schema.row(_DTYPE, _SIZES, _SIZES, schema.text("[a-z]+"))
_DIM = schema.row(_COUNT, schema.integer(-schema.MOST), _TEXT, schema.boolean)
_SYMBOL = schema.row(
    schema.text(r"[A-Za-z_]\w*"),
    schema.either(schema.integer(), schema.number()),
    schema.sequence(_DIM, least=1),
)
_WIRE = schema.record(
    {
        "name": _TEXT,
        "source": _COUNT,
        "target": _INDEX,
        "graph": schema.one_of((FORWARD, BACKWARD)),
        "output": _COUNT,
        "leaf": _COUNT,
        "spec": _SPEC,
        "digest": _TEXT,
    }
)
_STAGE = schema.record(
    {
        "position": _COUNT,
        "size": schema.integer(2),
        "wires": schema.sequence(_WIRE),
        "results": schema.sequence(_WIRE),
        "trained": schema.sequence(_TEXT),
        "captured": schema.mapping(_TEXT, _TEXT),
        "sums": schema.mapping(_TEXT, schema.anything),
        "num_leaves": _COUNT,
        "num_outputs": _COUNT,
    },
    handed=schema.sequence(_WIRE),  # missing in directories of earlier versions
    written=schema.mapping(_TEXT, _COUNT),  # the same
)
FACTS = schema.record(
    {
        "torch": _TEXT,
        "model": _TEXT,
        "training": schema.boolean,
        "world_size": schema.integer(1, 1 << 31),
        "kernels": schema.one_of(("aten", "inductor", "auto")),
        "debug": schema.boolean,
        "slots": schema.sequence(_COUNT),
        "layout": schema.record(
            {
                **{f"{axis}_size": schema.integer(1, 1 << 31) for axis in AXES},
                "buckets": schema.sequence(_BUCKET),
            },
            context_size=schema.integer(1, 1 << 31),  # 1 in directories of earlier versions
            node_size=schema.integer(1, 1 << 31),  # the same
            zigzag=schema.boolean,  # and false
        ),
        "placeholders": schema.mapping(
            schema.one_of((FORWARD, BACKWARD)),
            schema.sequence(schema.row(_ROLE, _TEXT, _INDEX, _TEXT, _SPEC)),
        ),
        "outputs": schema.mapping(
            schema.one_of((FORWARD, BACKWARD)),
            schema.sequence(schema.row(_ROLE, _TEXT, _INDEX)),
        ),
        "params": schema.mapping(
            _TEXT,
            schema.row(_SHAPE, _DTYPE, schema.boolean, _TEXT, schema.sequence(_TEXT), _DTYPE),
        ),
        "buffers": schema.sequence(_TEXT),
        "calling": schema.record(
            {
                "in_leaves": schema.integer(0, 1 << 20),
                "out_leaves": schema.integer(0, 1 << 20),
                "tensor_leaves": schema.sequence(_COUNT),
                "output_names": schema.sequence(schema.anything),
                "loss": schema.optional(_COUNT),
                "differentiable": schema.sequence(schema.anything),
                "dropped": schema.sequence(schema.anything),
            }
        ),
        "reference": schema.optional(schema.record({"outputs": schema.anything, "values": _TEXT})),
        "signature": schema.anything,
        "files": schema.mapping(schema.file_path, schema.text("[0-9a-f]{16}")),
    },
    hardware=schema.optional(schema.mapping(_TEXT, schema.anything)),
    sizes=schema.optional(
        schema.record({"symbols": schema.sequence(_SYMBOL), "conditions": schema.sequence(_TEXT)})
    ),
    stage=schema.optional(_STAGE),
    regions=schema.mapping(_TEXT, _TEXT),
    checksum=_TEXT,
)


def check_facts(facts: Any) -> dict[str, Any]:
    """Return the content of a fingerprint.json after checking its form and consistency.

    Raises:
        FormError: names the first invalid field.
    """
    schema.check(facts, FACTS)
    graphs = {FORWARD, BACKWARD} if facts["training"] else {FORWARD}
    for field in ("placeholders", "outputs"):
        if missing := graphs - facts[field].keys():
            raise schema.FormError(f"{field}.{min(missing)} is missing")
    stage = facts.get("stage")
    leaves = facts["calling"]["in_leaves"] + (len(stage["wires"]) if stage else 0)
    for role, name, index, *_ in facts["placeholders"][FORWARD]:
        if role == Role.INPUT.value and not 0 <= index < leaves:
            raise schema.FormError(f"placeholders: input {name} is leaf {index} of {leaves}")
    rank = stage["position"] % facts["layout"]["pipeline_size"] if stage else 0
    for number, bucket in enumerate(facts["layout"]["buckets"]):
        is_own = rank in bucket.get("positions", (rank,))  # or of other ranks' pipeline stages
        params = facts["params"] if is_own else None
        _check_bucket(bucket, f"layout.buckets[{number}]", params)
    return facts  # type: ignore[no-any-return]


def checksum_of(facts: dict[str, Any]) -> str:
    """Return the digest of facts; it is stored with them so that an edit is detected."""
    said = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _check_bucket(bucket: dict[str, Any], where: str, params: dict[str, Any] | None) -> None:
    """Raise unless a bucket's parameters are known and lie in it one behind another.

    params: those of the program, None where it has none of the bucket's.
    """
    end = 0
    for name, shape, offset, tile in bucket["params"]:
        if offset < end or (end := offset + math.prod(shape)) > bucket["numel"]:
            raise schema.FormError(f"{where}: {name} at {offset} does not fit into the bucket")
        if params is not None and (name if tile is None else tile[0]) not in params:
            raise schema.FormError(f"{where}: {name} is none of the parameters")


def program_facts(program: Planned) -> dict[str, Any]:
    """Return the facts that running or reloading the emitted source needs, as plain JSON data."""
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "model": program.model_name,
        "training": program.is_training,
        "world_size": program.world_size,
        "hardware": _hardware(program.hardware),
        "kernels": program.plan.kernels if not program.plan.debug else "aten",
        "debug": program.plan.debug,
        "slots": list(program.slot_bytes),
        "layout": layout_facts(program.layout),
        "placeholders": {g: _placeholders(program, g) for g in program.graphs},
        "outputs": {
            g: [[s.role.value, s.name, s.index] for s in specs]
            for g, specs in program.outputs.items()
        },
        "params": {
            p.name: [
                list(p.shape),
                _dtype(p.dtype),
                p.requires_grad,
                p.unit,
                list(p.aliases),
                _dtype(p.compute_dtype),
            ]
            for p in program.params.values()
        },
        "buffers": list(program.buffers),
        "calling": _calling(program.calling),
        "sizes": size_facts(program.sizes),
        "signature": program.signature,
        "reference": _reference(program.reference),
        "stage": _stage(program.stage),
    }


def _stage(stage: Stage) -> dict[str, Any] | None:
    """Return which part of a pipeline a program is, with all that crosses between stages."""
    if stage.size == 1:
        return None
    return {
        "position": stage.position,
        "size": stage.size,
        "wires": list(map(_wire, stage.wires)),
        "results": list(map(_wire, stage.results)),
        "handed": list(map(_wire, stage.handed)),
        "written": dict(stage.written),
        "trained": list(stage.trained),
        "captured": dict(stage.captured),
        "sums": dict(stage.sums),
        "num_leaves": stage.num_leaves,
        "num_outputs": stage.num_outputs,
    }


def _wire(wire: Wire) -> dict[str, Any]:
    val = wire.value
    spec = [_dtype(val.dtype), list(val.shape), list(val.stride()), val.device.type]
    return {
        "name": wire.name, "source": wire.source, "target": wire.target, "graph": wire.graph,
        "output": wire.output, "leaf": wire.leaf, "spec": spec, "digest": wire.digest,
    }  # fmt: skip


def read_stage(said: dict[str, Any] | None) -> Stage:
    """Return what `_stage` wrote; make it under a fake mode, for the values that cross."""
    if said is None:
        return Stage()

    def wire(row: dict[str, Any]) -> Wire:
        dtype, shape, strides, device = row["spec"]
        made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
        fields = {k: v for k, v in row.items() if k != "spec"}
        return Wire(value=made, lies=Placed(R, tuple(shape)), **fields)

    lists = {k: tuple(map(wire, said.get(k, ()))) for k in ("wires", "results", "handed")}
    sums = {name: _sum(row, name) for name, row in said["sums"].items()}
    return Stage(**{**said, **lists, "trained": tuple(said["trained"]), "sums": sums})


def _sum(row: Any, name: str) -> Sum:
    """Return what was written as lists in a file; they nest as deeply as there are summands."""
    if isinstance(row, list) and len(row) == 2:
        if isinstance(row[0], int) and isinstance(row[1], str):
            return row[0], row[1]
        if isinstance(row[0], list):
            return _sum(row[0], name), _sum(row[1], name)
    raise schema.FormError(f"stage.sums.{name} is no sum: {str(row)[:80]}")


def _hardware(hardware: Hardware) -> dict[str, Any]:
    """Return the target hardware without measured curves and their sources."""
    return {k: v for k, v in hardware.to_dict().items() if k not in ("curves", "sources")}


def read_hardware(said: dict[str, Any] | None) -> Hardware:
    """Return the hardware written by `_hardware`, or the preset equal to it; old files have
    none."""
    if said is None:
        return default_hardware()
    name = said["name"]
    preset = load_hardware(name) if name in hardware_names() else None
    return preset if preset is not None and _hardware(preset) == said else Hardware.from_dict(said)


def _calling(calling: Calling) -> dict[str, Any]:
    return {
        "in_leaves": calling.in_spec.num_leaves,
        "out_leaves": calling.out_spec.num_leaves,
        "tensor_leaves": list(calling.tensor_leaves),
        "output_names": list(calling.output_names),
        "loss": calling.loss,
        "differentiable": list(calling.differentiable),
        "dropped": list(calling.dropped),
    }


def _reference(reference: Reference | Unproved) -> dict[str, Any] | None:
    """Return the digests by which a reload proves that it computes what was captured."""
    if isinstance(reference, Unproved):
        return None
    return {"outputs": reference.outputs, "values": "".join(sorted(reference.values))}


def read_reference(said: dict[str, Any] | None) -> Reference | Unproved:
    """Return the reference written by `_reference`."""
    if said is None:
        return Unproved.GIVEN_UP
    values = said["values"]
    short = [values[i : i + SHORT] for i in range(0, len(values), SHORT)]
    return Reference(said["outputs"], frozenset(short))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _placeholders(program: Planned, graph: str) -> list[list[Any]]:
    found = []
    for node in program.placeholders(graph):
        where, val = info(node), value(node)
        role = where.role.value if where.role else Role.INPUT.value
        shape, strides = (list(map(_size, sizes)) for sizes in form(node))
        spec = [_dtype(val.dtype), shape, strides, val.device.type]
        found.append([role, where.name, where.index, where.unit, spec])
    return found


def _size(size: int) -> int | str:
    return size.text if isinstance(size, Size) else size


def size_facts(sizes: Sizes) -> dict[str, Any]:
    return {
        "symbols": [
            [s.name, s.hint, [[d.leaf, d.dim, d.name, d.is_stride] for d in s.dims]]
            for s in sizes.symbols
        ],
        "conditions": list(sizes.conditions),
    }


def read_sizes(said: dict[str, Any] | None) -> Sizes:
    """Return the sizes written by `size_facts`; older programs have no varying sizes."""
    if said is None:
        return Sizes()
    symbols = (Symbol(n, hint, tuple(Dim(*d) for d in dims)) for n, hint, dims in said["symbols"])
    return Sizes(tuple(symbols), tuple(said["conditions"]))


def _tile(tile: Tile | None) -> list[Any] | None:
    if tile is None:
        return None
    cut = [] if tile.part is None else [[tile.part.cut.dim, tile.part.cut.groups, tile.part.ranks]]
    return [tile.name, list(tile.shape), tile.index, tile.count, *cut]


def layout_facts(layout: Layout) -> dict[str, Any]:
    return {
        **{f"{axis}_size": layout.mesh.along(axis) for axis in reversed(AXES)},
        "context_size": layout.mesh.context,
        "node_size": layout.mesh.node,
        "zigzag": layout.mesh.zigzag,
        "buckets": [
            {
                "units": list(b.units),
                "dtype": _dtype(b.dtype),
                "compute_dtype": _dtype(b.compute_dtype),
                "reduce_dtype": _dtype(b.reduce_dtype),
                "numel": b.numel,
                "persistent": b.persistent,
                "trainable": b.trainable,
                "home": b.home.value,
                "source": b.source.value,
                "params": [[p.name, list(p.shape), p.offset, _tile(p.tile)] for p in b.params],
                "positions": list(b.positions),
            }
            for b in layout.buckets
        ],
    }
