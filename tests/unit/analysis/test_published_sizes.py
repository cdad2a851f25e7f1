"""The largest models that were published for V100s, against predictions.

Sources: ZeRO (arXiv 1910.02054), ZeRO-Offload (arXiv 2101.06840), ZeRO-3 Offload's and
ZeRO-Infinity's announcements, and ZeRO-Infinity (arXiv 2104.07857), figures 1 and 6. Depth is what
varies: a family's figures come from two small depths, on whose line all others lie.
"""

from __future__ import annotations

from typing import Any

import pytest
from published_cases import DEEP, HOST, Family, family, gpt, infinity, step

from zerofx.hardware import load_hardware

FP16 = {"precision": "fp16", "activations": "recompute"}
USABLE_NVME = 20e12  # of a DGX-2's 28 TB


def most(found: Family, world: int, **limits: float) -> tuple[float, str]:
    """Return the parameters of the largest model in billions, and the tier that ends it."""
    layers, tier = found.most_layers(world, **limits)
    return found.params.at(layers) / 1e9, tier


# name: (width, plan, ranks), published billions, the tier that ends it, bytes a parameter of ours.
# Infinity counts 20 bytes of states a parameter. Ours are 18 where all lies on one device (fp32
# parameter, gradient and moments, and the fp16 copy), 16 where the copy is made on its way (at
# stage 3), and some 18 on the host, which keeps it: so much more fits in the same memory. With the
# paper's bytes in the place of ours all agree. ZeRO-Offload's device holds 2 in both.
ROWS: dict[str, tuple[tuple[int, dict[str, Any], int], float, str, float]] = {
    "data parallel": ((1920, {"stage": 0, **FP16}, 16), 1.4, "device", 18.1),
    "ZeRO-3": ((8192, {"stage": 3, "prefetch": 1, **FP16}, 16), 20, "device", 16.0),
    "Infinity, host": ((8192, infinity(1, **HOST), 16), 70, "host", 18.3),
}


@pytest.mark.parametrize("name", ROWS)
def test_largest_model_on_one_dgx2(name: str) -> None:
    (width, plan, world), published, tier, own_bytes = ROWS[name]
    found = family(width, 1, plan, world)
    line = {"device": found.device_bytes, "host": found.host_bytes}[tier]
    shared = 1 if plan["stage"] == 0 else world
    assert line.layer / found.params.layer * shared == pytest.approx(own_bytes, abs=0.1)
    billions, ends = most(found, world)
    assert ends == tier
    assert billions >= published
    assert billions * own_bytes / 20 == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("world", [1, 16])
def test_zero_offload_fits_13_billion(world: int) -> None:
    """The device holds 2 bytes a parameter, the host the other 14 (ours 16: gradients in fp32)."""
    plan = {"stage": 2, "offload": {"optimizer": "cpu"}, **FP16}
    found = family(5120, 1, plan, world)
    assert found.device_bytes.layer / found.params.layer == pytest.approx(2.0, abs=0.05)
    assert found.host_bytes.layer * world / found.params.layer == pytest.approx(16.0, abs=0.05)
    billions, tier = most(found, world)
    assert tier == "device"
    assert billions == pytest.approx(13, rel=0.15)


@pytest.mark.slow
def test_infinity_with_nvme_fits_a_trillion_on_one_dgx2() -> None:
    """Sixteen bytes a parameter in files, where the paper has 20, of 20 TB that can be used."""
    found = family(25600, 1, infinity(4), 16)
    assert found.nvme_bytes.layer * 16 / found.params.layer == pytest.approx(16.0, abs=0.01)
    billions, tier = most(found, 16, nvme_bytes=USABLE_NVME)
    assert tier == "nvme"
    assert billions * 16 / 20 == pytest.approx(1000, rel=0.15)


@pytest.mark.slow
def test_infinity_fits_32_trillion_on_32_dgx2() -> None:
    billions, tier = most(family(65536, 1, infinity(16), 512, depths=DEEP), 512)
    assert tier == "host"
    assert billions == pytest.approx(32_000, rel=0.15)


def test_40_billion_on_one_v100_with_its_host() -> None:
    """ZeRO-3 Offload's announcement: 40 B parameters on one V100 with 1.5 TB of host memory."""
    found = family(8192, 1, infinity(1, **HOST), 1)
    billions, tier = most(found, 1)
    assert (billions > 40, tier) == (True, "host")
    layers = (40e9 - found.params.edge) / found.params.layer
    assert found.device_bytes.at(layers) < 0.7 * load_hardware("dgx2-v100-32gb").device_memory_bytes


# name: (width, layers, plan, ranks), billions of parameters that were published to fit
FITS: dict[str, tuple[tuple[int, int, dict[str, Any], int], float]] = {
    "ZeRO-2, no tensor parallelism": ((4096, 49, {"stage": 2, **FP16}, 32), 10),
    "ZeRO-3 alone": ((25600, 128, infinity(4) | {"offload": {}}, 1024), 1000),
    "ZeRO-3 Offload on 256": ((25600, 128, infinity(4, **HOST), 256), 1000),
    "ZeRO-3 Offload on 512": ((32768, 155, infinity(4, **HOST), 512), 2000),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if "512" in n else []) for n in FITS]
)
def test_models_that_were_published_to_fit(name: str) -> None:
    (width, layers, plan, world), billions = FITS[name]
    found = family(width, 1, plan, world)
    assert found.params.at(layers) / 1e9 == pytest.approx(billions, rel=0.02)
    most_layers, _ = found.most_layers(world)
    assert most_layers >= layers


def test_one_gpu_trains_a_trillion() -> None:
    """With the host memory and the NVMe of its DGX-2, a layer's linears in 4 tiles."""
    found = family(25600, 1, infinity(4), 1)
    assert found.most_layers(1)[0] >= 128
    assert found.nvme_bytes.at(128) / found.params.at(128) == pytest.approx(16, rel=0.01)


def test_turing_nlg_needs_more_than_stage_1() -> None:
    """17.2 B parameters are 275 GB of model states, of which stage 1 leaves 4 bytes a parameter on
    each rank: twice a V100. It was trained with tensor parallelism of 4 beside it, which leaves a
    quarter of these on each rank (`test_parallel_sizes.py` counts such states); stage 3 fits alone.
    """
    width, layers, world = 4256, 78, 256
    found = {stage: family(width, 1, {"stage": stage, **FP16}, world) for stage in (1, 3)}
    params = found[1].params.at(layers)
    assert params / 1e9 == pytest.approx(17.2, abs=0.05)
    assert 16 * params / 1e9 == pytest.approx(275, abs=1)
    tensor = 4
    assert 4 * params > 2 * found[1].device_limit
    assert 4 * params / tensor + 12 * params / world < found[1].device_limit
    assert found[3].most_layers(world)[0] >= layers


@pytest.mark.slow
def test_the_line_through_two_depths_is_that_of_all() -> None:
    """A model of 24 layers, predicted by itself."""
    width, layers, world = 4096, 24, 64
    whole = step(gpt(width, layers, 2), infinity(2), world)
    found = family(width, 2, infinity(2), world)
    assert found.step_us.at(layers) == pytest.approx(whole.timeline.step_us, rel=0.03)
    assert found.device_bytes.at(layers) == pytest.approx(whole.memory.peak_bytes, rel=0.03)
    assert found.flops.at(layers) == pytest.approx(whole.flops, rel=1e-6)
