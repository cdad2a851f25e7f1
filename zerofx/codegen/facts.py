"""What an emitted program says of itself as data: layout, slots, roles, versions."""

from __future__ import annotations

from typing import Any

import torch

from zerofx.hardware import Hardware, default_hardware, hardware_names, load_hardware
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import Calling, Planned, Reference, Unproved
from zerofx.ir.sizes import Dim, Size, Sizes, Symbol, form
from zerofx.ir.verify_values import SHORT
from zerofx.layout.buckets import AXES, Layout
from zerofx.layout.tiles import Tile

FORMAT = 5


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
    }


def _hardware(hardware: Hardware) -> dict[str, Any]:
    """Return what it was planned for, without what was measured there and where that is from."""
    return {k: v for k, v in hardware.to_dict().items() if k not in ("curves", "sources")}


def read_hardware(said: dict[str, Any] | None) -> Hardware:
    """Return what `_hardware` wrote, the preset if it is one; earlier programs do not say."""
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
    """Return the reference that `_reference` wrote."""
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
    """Return what `size_facts` wrote; earlier programs have no sizes that vary."""
    if said is None:
        return Sizes()
    symbols = (Symbol(n, hint, tuple(Dim(*d) for d in dims)) for n, hint, dims in said["symbols"])
    return Sizes(tuple(symbols), tuple(said["conditions"]))


def _tile(tile: Tile | None) -> list[Any] | None:
    return None if tile is None else [tile.name, list(tile.shape), tile.index, tile.count]


def layout_facts(layout: Layout) -> dict[str, Any]:
    return {
        **{f"{axis}_size": layout.mesh.along(axis) for axis in reversed(AXES)},
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
            }
            for b in layout.buckets
        ],
    }
