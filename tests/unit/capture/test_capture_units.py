"""Units of models of many shapes; every parameter in exactly one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerofx.capture import find_unit_of_module, find_units
from zerofx.errors import CaptureError


def units(model: nn.Module, patterns: Any = "auto") -> list[str]:
    return sorted(set(find_units(model, patterns).values()))


class Block(nn.Module):
    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)
        if experts:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 8), nn.Linear(8, width)) for _ in range(experts)
            )


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def stage(blocks: int, start: int, width: int) -> nn.Module:
    """Blocks of one class behind a first one of another shape, as in a residual network."""
    made = nn.Module()
    made.layers = nn.Sequential(Block(start), *(Block(width) for _ in range(blocks - 1)))
    return made


def test_blocks_are_units_and_the_rest_is_grouped() -> None:
    found = find_units(Model(Block(), Block()))
    assert set(found.values()) == {"", "blocks.0", "blocks.1", "embed", "norm"}
    assert found["scale"] == "" and found["blocks.1.fc.bias"] == "blocks.1"
    assert found["head.weight"] == "embed"  # tied: where it was registered first


def test_experts_stay_inside_their_block() -> None:
    assert "blocks.0" in units(Model(Block(experts=2), Block(experts=2)))


def test_a_single_block_is_a_unit() -> None:
    assert "blocks.0" in units(Model(Block()))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_blocks_of_stages_and_not_the_stages(sizes: tuple[int, int]) -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([stage(sizes[0], 4, 4), stage(sizes[1], 4, 8)])
    expected = [f"stages.{s}.layers.{b}" for s, n in enumerate(sizes) for b in range(n)]
    assert units(model) == expected


def test_model_without_blocks() -> None:
    assert units(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))) == ["0", "2"]
    model = nn.Module()
    model.embed, model.lstm = nn.Embedding(5, 4), nn.LSTM(4, 4)
    wrapper = nn.Module()
    wrapper.model = model
    assert units(wrapper) == ["model.embed", "model.lstm"]


def test_patterns() -> None:
    model = Model(Block(), Block())
    assert units(model, ["blocks.*.fc"]) == [
        "", "blocks.0.fc", "blocks.0.norm", "blocks.1.fc", "blocks.1.norm", "embed", "norm",
    ]  # fmt: skip
    assert "blocks" in units(model, ["blocks"]) and "blocks.0" not in units(model, ["blocks"])
    with pytest.raises(CaptureError, match=r"no module of Model matches 'layers\.\*'.*blocks\.0"):
        find_units(model, ["layers.*"])


def test_unit_of_a_module() -> None:
    known = {"", "blocks.1", "embed"}
    assert find_unit_of_module("blocks.1.fc", known) == "blocks.1"
    assert find_unit_of_module("blocks.10.fc", known) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ResNet", {"classifier", "resnet.embedder", "resnet.encoder.stages.1.layers.0"}),
        ("Swin", {"swin.encoder.layers.1.blocks.0", "swin.encoder.layers.0.downsample"}),
    ],
)
def test_transformers_models(name: str, expected: set[str]) -> None:
    transformers = pytest.importorskip("transformers")
    fields: dict[str, Any] = {
        "ResNet": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2]},
        "Swin": {"image_size": 16, "patch_size": 2, "embed_dim": 4, "depths": [2, 2],
                 "num_heads": [1, 1], "window_size": 4},
    }[name]  # fmt: skip
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(**fields)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
    assert expected <= set(units(model))
