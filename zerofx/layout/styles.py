"""Styles: which layers of a model are cut over the tensor axis, and along which dimension.

A layer is "colwise" if each rank computes some of its outputs, "rowwise" if each rank reads some of
its inputs and computes a summand of all outputs, "whole" if it is not cut. A colwise layer followed
by a rowwise one needs one sum for both. The stacked weights of experts, [experts, out, in], are cut
by these styles within each expert, or by "experts", which gives each rank some experts whole.
Styles never change a result: if a cut does not fit the reader of a value, the value is put together
first, which costs time.

Source of the two styles: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zerofx.layout.placements import Cut, Part, fits

EXPERTS = "experts"
# The styles in plans of transformers models -> ours.
_OF_TRANSFORMERS = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "embedding_rowwise": "rowwise",
    "packed_colwise": "colwise/2",
    "packed_rowwise": "rowwise/2",
}
_STACKED = "grouped_gemm"  # in plans of transformers: one matrix for each expert
# Common layer names of transformer blocks; FUSED: one product computes q, k and v.
_COLWISE = """
q_proj k_proj v_proj q k v query key value wq wk wv to_q to_k to_v q_lin k_lin v_lin
gate_proj up_proj fc1 fc_1 c_fc wi wi_0 wi_1 w1 w3 linear1 fc_in dense_h_to_4h lin1
intermediate.dense query_key_value mlp.up mlp.gate
""".split()
_FUSED = "c_attn qkv to_qkv Wqkv qkv_proj in_proj".split()
_ROWWISE = """
o_proj out_proj c_proj o wo to_out dense_4h_to_h down_proj fc2 fc_2 w2 linear2 fc_out lin2 out_lin
output.dense proj mlp.down
""".split()


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the style of each layer that has one, by its qualified name.

    A plan may also name a parameter, such as the stacked weights of all experts of a layer.

    A model's own plan (`tp_plan`, of transformers) takes precedence. In other models, layers of the
    repeated blocks are recognised by common names. A block without a layer that is known to be
    rowwise is left whole. Tables of words and heads are recognised by each other.
    """
    own = getattr(model, "tp_plan", None)
    if isinstance(own, Mapping) and own:
        return _by_plan(model, own)
    found = {name: style for name, module in model.named_modules() if (style := _named(name))}
    kept = _vocabularies(model)
    for block in _blocks(model):
        mine = {n: s for n, s in found.items() if n.startswith(f"{block}.")}
        if {"colwise", "rowwise"} <= {s.partition("/")[0] for s in mine.values()}:
            kept |= mine
    return kept


def _vocabularies(model: nn.Module) -> dict[str, str]:
    """Return the styles by which each rank has some words: of heads, and of the tables beside them.

    A head is a linear layer outside of the repeated blocks that has as many outputs as one table
    has rows, or that shares its weight. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    inside, found = listed(model), dict[str, str]()
    modules = [*model.named_modules(remove_duplicate=False)]
    tables = {n: m for n, m in modules if isinstance(m, nn.Embedding) and hasattr(m, "weight")}
    for name, head in modules:
        is_head = isinstance(head, nn.Linear) and hasattr(head, "weight") and not inside(name)
        if not is_head or not name:  # without a weight: an ignored one, which is held elsewhere
            continue
        tied = [n for n, table in tables.items() if table.weight is head.weight]
        alike = [n for n, table in tables.items() if table.num_embeddings == head.out_features]
        same = tied or (alike if len({id(tables[n].weight) for n in alike}) == 1 else [])
        if same:
            found |= {name: "colwise", **dict.fromkeys(same, "rowwise")}
    return found


def _blocks(model: nn.Module) -> set[str]:
    """Return the names of the repeated blocks: the items of lists, also of lists in blocks."""
    lists = [n for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return {
        f"{each}.{child}".removeprefix(".")
        for each in lists
        for child, _ in model.get_submodule(each).named_children()
    }


def listed(model: nn.Module) -> Callable[[str], bool]:
    """Return a test of whether a parameter, by name, belongs to a repeated block."""
    blocks = _blocks(model)

    def test(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:k]) in blocks for k in range(1, len(parts)))

    return test


def _by_plan(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        for pattern, style in plan.items():
            if fnmatchcase(name, pattern) and style in _OF_TRANSFORMERS:
                found[name] = _OF_TRANSFORMERS[style]
    return found


def stacks_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that stack one matrix for each expert.

    They are those that the plan of a transformers model for expert parallelism names.
    """
    plans = (getattr(m, "config", None) for m in model.modules())
    patterns = {
        pattern
        for plan in {id(p): p for p in plans}.values()
        for pattern, style in (getattr(plan, "base_model_ep_plan", None) or {}).items()
        if style == _STACKED
    }
    return {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if param.dim() == 3
        and any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)
    }


def _named(name: str) -> str:
    def ends(known: str) -> bool:
        return name == known or name.endswith(f".{known}")

    if any(map(ends, _FUSED)):
        return "colwise/3"
    if any(map(ends, _COLWISE)):
        return "colwise"
    return "rowwise" if any(map(ends, _ROWWISE)) else ""


def cut_of(style: str, shape: tuple[int, ...], outputs: int) -> Cut | None:
    """Return how a style cuts a parameter of a layer, or None if it leaves the parameter whole.

    outputs: the dimension of the parameter that counts the layer's outputs, -1 for none. The other
        of the last two dimensions counts the inputs, such as the rows of an embedding.
    """
    kind, _, groups = style.partition("/")
    if kind == EXPERTS:
        return Cut(0) if len(shape) == 3 else None
    if outputs < 0 or kind not in ("colwise", "rowwise"):
        return None
    number = int(groups or 1)
    if kind == "colwise":
        return Cut(outputs, number)
    count = len(shape)
    return Cut(2 * count - 3 - outputs, number) if count in (2, 3) else None


def divides_experts(part: Part | None) -> bool:
    """Return whether a part of a parameter is of whole experts."""
    return part is not None and len(part.shape) == 3 and part.cut == Cut(0)


def part_of(shape: tuple[int, ...], cut: Cut | None, ranks: int) -> Part | None:
    """Return the part of a parameter cut over `ranks` ranks; None if it cannot or need not be."""
    if cut is None or ranks == 1 or not fits(shape, cut, ranks):
        return None
    return Part(shape, cut, ranks)
