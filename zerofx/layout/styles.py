"""Styles: which layers of a model are cut over the tensor axis, and along which dimension.

A layer is "colwise" if each rank makes some of its outputs, "rowwise" if each rank reads some of
its inputs and makes a summand of all outputs, "whole" if it is not cut. Two layers of which the
first is colwise and the second rowwise need one sum between them. Styles change no result: what is
cut in an odd way is put together where it is read, which costs time.

Source of the two styles: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zerofx.layout.placements import Cut, Part, fits

# What the plans of transformers' models say, in terms of the two.
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
# Names that implementations give to a block's layers; groups where one product makes q, k and v.
_COLWISE = """
q_proj k_proj v_proj q k v query key value wq wk wv to_q to_k to_v q_lin k_lin v_lin
gate_proj up_proj fc1 fc_1 c_fc wi wi_0 wi_1 w1 w3 linear1 fc_in dense_h_to_4h lin1
intermediate.dense query_key_value
""".split()
_FUSED = "c_attn qkv to_qkv Wqkv qkv_proj in_proj".split()
_ROWWISE = """
o_proj out_proj c_proj o wo to_out dense_4h_to_h down_proj fc2 fc_2 w2 linear2 fc_out lin2 out_lin
output.dense proj
""".split()


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the style of each layer of a model by its qualified name: where it has one.

    A plan may also name a parameter: such are the weights of all experts of a layer in one.

    A model's own plan (`tp_plan`, of transformers) comes first. Of another, layers of the repeated
    blocks are known by the names that implementations use; a block in which no layer is known to
    be rowwise is left whole.
    """
    own = getattr(model, "tp_plan", None)
    if isinstance(own, Mapping) and own:
        return _by_plan(model, own)
    found = {name: style for name, module in model.named_modules() if (style := _named(name))}
    lists = [n for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    blocks = {
        f"{each}.{child}"
        for each in lists
        for child, _ in model.get_submodule(each).named_children()
    }
    kept: dict[str, str] = {}
    for block in blocks:
        mine = {n: s for n, s in found.items() if n.startswith(f"{block}.")}
        if {"colwise", "rowwise"} <= {s.partition("/")[0] for s in mine.values()}:
            kept |= mine
    return kept


def _by_plan(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        for pattern, style in plan.items():
            if fnmatchcase(name, pattern) and style in _OF_TRANSFORMERS:
                found[name] = _OF_TRANSFORMERS[style]
    return found


def _named(name: str) -> str:
    def ends(known: str) -> bool:
        return name == known or name.endswith(f".{known}")

    if any(map(ends, _FUSED)):
        return "colwise/3"
    if any(map(ends, _COLWISE)):
        return "colwise"
    return "rowwise" if any(map(ends, _ROWWISE)) else ""


def cut_of(style: str, shape: tuple[int, ...], outputs: int) -> Cut | None:
    """Return how a style cuts a parameter of a layer; None where it leaves it whole.

    outputs: the dimension of the parameter that counts the layer's outputs, -1 for none. The other
        one of the last two, where it has two, counts the inputs: the rows of an embedding are its.
    """
    kind, _, groups = style.partition("/")
    if outputs < 0 or kind not in ("colwise", "rowwise"):
        return None
    number = int(groups or 1)
    if kind == "colwise":
        return Cut(outputs, number)
    count = len(shape)
    return Cut(2 * count - 3 - outputs, number) if count in (2, 3) else None


def part_of(shape: tuple[int, ...], cut: Cut | None, ranks: int) -> Part | None:
    """Return how a parameter is cut over so many ranks; None where it cannot be, or need not."""
    if cut is None or ranks == 1 or not fits(shape, cut, ranks):
        return None
    return Part(shape, cut, ranks)
