"""place: cut over the tensor axis, models that nobody wrote for it compute what they did."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from placed_ranks import cut_for, run_ranks, run_whole, together, values_of
from torch import Tensor, nn

import zerofx
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import JOINT, Planned
from zerofx.passes.merge_tied import MergeTied
from zerofx.passes.place import OpenProducts, Place
from zerofx.plan.parts import Parallel


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {"num_key_value_heads": 4} | more
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=64, use_cache=False, **fields,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            image_size=16, patch_size=8, num_labels=4, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit}


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pictures = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pictures, "labels": torch.tensor([1, 3])}
    ids = torch.randint(0, 64, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


@cache
def captured(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, zerofx.capture(model, (), batch(name), outputs="loss")


def placed(name: str, parallel: Parallel) -> tuple[Planned, Planned]:
    """Return a program before and behind the pass."""
    _, program = captured(name)
    whole = program.planned().clone()
    OpenProducts(parallel).run(whole)
    MergeTied().run(whole)
    cut = whole.clone()
    Place(parallel).run(cut)
    for each in (whole, cut):
        each.graphs[JOINT].graph.lint()
        each.graphs[JOINT].recompile()
    return whole, cut


def check(name: str, parallel: Parallel) -> Planned:
    """Run a placed graph on all ranks, and compare each value, joined, with the whole graph's."""
    model, _ = captured(name)
    whole, cut = placed(name, parallel)
    given = values_of(whole, model, batch(name))
    results, values = run_whole(whole.graphs[JOINT], given)
    ranks = parallel.tensor
    lies = [info(n).placed.gives for n in cut.placeholders(JOINT)]
    each = [
        [cut_for(v, at, rank, ranks) for v, at in zip(given, lies, strict=True)]
        for rank in range(ranks)
    ]
    found, kept = run_ranks(cut.graphs[JOINT], each)
    by_name = {n.name: v for n, v in values.items()}
    compared = 0
    for node in cut.graphs[JOINT].graph.nodes:
        where = info(node).placed
        if node.op != "call_function" or where is None or node.name not in by_name:
            continue
        got, expected = together([k[node] for k in kept], where.gives), by_name[node.name]
        got, expected = ([v] if isinstance(v, Tensor) else v for v in (got, expected))
        for mine, theirs in zip(got, expected, strict=True):
            if isinstance(theirs, Tensor) and mine.shape == theirs.shape:
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=node: f"{n}: {m}"
                )
                compared += 1
    assert compared > 100
    for spec, *mine, expected in zip(whole.outputs[JOINT], *found, results, strict=True):
        if expected is None:
            continue
        part = cut.params[spec.name].part if spec.role is Role.GRAD else None
        got = together(mine, part.cut) if part else mine[0]
        assert part or all(torch.equal(m, mine[0]) for m in mine), spec
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, s=spec: f"{s}: {m}"
        )
    return cut


def sent(program: Planned) -> Counter[tuple[str, str, str]]:
    """Return the collectives by unit, phase and name."""
    found: Counter[tuple[str, str, str]] = Counter()
    for node in program.graph(JOINT).nodes:
        op = str(node.target)
        if op.startswith("zerofx.") and "_values" in op:
            found[info(node).unit, info(node).phase.value, op.split(".")[1]] += 1
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_value_is_that_of_the_whole_graph(name: str, sequence: bool) -> None:
    check(name, Parallel(tensor=2, sequence=sequence))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_four_ranks(name: str) -> None:
    check(name, Parallel(tensor=4))
    check(name, Parallel(tensor=4, sequence=True))


@pytest.mark.parametrize(
    ("name", "layer"), [("llama", "model.layers.1"), ("gpt2", "transformer.h.1")]
)
def test_a_layer_sends_what_megatrons_does(name: str, layer: str) -> None:
    """Two all-reduces each way; with sequence parallelism a gather and a scatter for each of them,
    and two gathers more in backward, of what forward had gathered (Korthikanti et al. 2022)."""
    found = sent(check(name, Parallel(tensor=2)))
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if unit == layer}
    assert mine == {("forward", "reduce_values"): 2, ("backward", "reduce_values"): 2}
    found = sent(check(name, Parallel(tensor=2, sequence=True)))
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if unit == layer}
    assert mine == {
        ("forward", "gather_values"): 2, ("forward", "scatter_values"): 2,
        ("backward", "gather_values"): 4, ("backward", "scatter_values"): 2,
    }  # fmt: skip


def test_fewer_heads_of_keys_than_ranks() -> None:
    MODELS["grouped"] = lambda: llama(num_key_value_heads=2)
    try:
        check("grouped", Parallel(tensor=4))
    finally:
        del MODELS["grouped"]


_ = value


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True])
def test_it_is_proved(name: str, sequence: bool) -> None:
    from zerofx.ir.verify import verify

    _, program = captured(name)
    from zerofx.hardware import hardware_for
    from zerofx.passes.order import Setting
    from zerofx.passes.pipeline import run
    from zerofx.plan.plan import Plan

    plan = Plan(parallel=Parallel(tensor=2, sequence=sequence), numerics="fast", kernels="aten")
    setting = Setting(plan, 2, hardware_for("cpu", None))
    made = run(program, setting, until="place")
    verify(made)
