"""Captured models against eager, value by value; modes of capture; labels of the nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture_check import calls, check, compare
from models import CASES, FOREIGN, OWN
from torch import Tensor

import zerofx
from zerofx.ir.meta import Phase, Role, info, value

# A last bit here and there: torch runs stacked and bidirectional layers in one call.
NOT_BITWISE = {"lstm": 1e-6}


@pytest.mark.parametrize("name", OWN + FOREIGN)
def test_program_equals_eager(name: str) -> None:
    case = CASES[name]
    args, kwargs = case.batch(0)
    program = check(case.make(), *args, tolerance=NOT_BITWISE.get(name, 0.0), **kwargs)
    assert program.is_training
    nodes = calls(program)
    labelled = [n for n in nodes if info(n).line and isinstance(info(n).module, str)]
    assert len(labelled) >= 0.95 * len(nodes)
    assert all(value(n) is not None for n in nodes)


EXTRA: dict[str, dict[str, Any]] = {
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 8},
    "Mixtral": {"num_key_value_heads": 1, "num_local_experts": 2},
}


@pytest.mark.parametrize("name", EXTRA)
def test_decoder_with_cache_is_captured_without_it(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=32, pad_token_id=0, bos_token_id=0, eos_token_id=0, **EXTRA[name],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    tokens = torch.randint(0, 32, (2, 8))
    with pytest.warns(UserWarning, match=r"also returns past_key_values \(DynamicCache\)"):
        program = check(model, input_ids=tokens, labels=tokens, tolerance=1e-6)
    assert program.calling.dropped == ("past_key_values (DynamicCache)",)
    assert program.calling.output_names[0] == "loss"


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoder(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    labels = torch.randint(3, 32, (2, 6))
    if name == "t5":
        config = transformers.T5Config(
            d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=32,
            decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
        inputs = {"input_ids": labels}
    else:
        config = transformers.WhisperConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=32,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            num_mel_bins=8, max_source_positions=20, use_cache=False,
        )  # fmt: skip
        model = transformers.WhisperForConditionalGeneration(config)
        inputs = {"input_features": torch.randn(2, 8, 40)}
    check(model, **inputs, labels=labels, tolerance=1e-6)


# -- modes ----------------------------------------------------------------------------------------
def test_program_without_gradient() -> None:
    model = CASES["gpt"].make().eval()
    args, _ = CASES["gpt"].batch(0)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            program = check(model, *args)
        assert not program.is_training and set(program.graphs) == {"forward"}
        assert program.calling.loss is None
        assert {i.role for i in program.outputs["forward"]} == {Role.OUTPUT}
    program = check(model.requires_grad_(False), *args)
    assert not program.is_training


def test_model_on_meta_is_captured_on_the_device_given() -> None:
    with torch.device("meta"):
        model = CASES["convnet"].build()
    args, _ = CASES["convnet"].batch(0)
    program = zerofx.capture(model, tuple(a.to("meta") for a in args), device="cpu")
    devices = {v.device.type for n in calls(program) if isinstance(v := value(n), Tensor)}
    assert devices == {"cpu"}
    assert all(p.device.type == "meta" for p in model.parameters())


def test_parameter_description_overrides_what_the_module_holds() -> None:
    model = CASES["gpt"].make()
    args, _ = CASES["gpt"].batch(0)
    name = next(iter(dict(model.named_parameters())))
    shape = tuple(model.get_parameter(name).shape)
    meta = {name: (shape, torch.float32, False)}
    program = zerofx.capture(model, args, param_meta=meta)
    assert program.params[name].requires_grad is False
    assert name not in [i.name for i in program.outputs["joint"] if i.role is Role.GRAD]
    assert model.get_parameter(name).requires_grad


def test_a_program_can_be_captured_twice_and_equal() -> None:
    model = CASES["gpt-dropout"].make()
    args, _ = CASES["gpt-dropout"].batch(0)
    first, second = (zerofx.capture(model, args) for _ in range(2))
    assert str(first.graph("joint")) == str(second.graph("joint"))
    compare(first, model, args, {})


# -- labels ---------------------------------------------------------------------------------------
def test_labels_of_the_nodes() -> None:
    model = CASES["gpt-dropout"].make()
    args, _ = CASES["gpt-dropout"].batch(0)
    program = zerofx.capture(model, args)
    modules = dict(model.named_modules())
    units = {p.unit for p in program.params.values()} | {""}
    for node in calls(program):
        label = info(node)
        assert label.module in modules and label.unit in units
        assert label.line.startswith("gpt.py:")
        in_backward = node.meta["partitioner_tag"] == "is_backward"
        assert (label.phase is Phase.BACKWARD) == in_backward
    drawing = [n for n in calls(program) if info(n).is_random]
    assert {n.target for n in drawing} == {torch.ops.aten.native_dropout.default}
    inside = [n for n in calls(program) if info(n).module.startswith("blocks.1")]
    assert {info(n).unit for n in inside} == {"blocks.1"}
