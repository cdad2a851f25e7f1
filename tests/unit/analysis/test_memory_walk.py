"""The walk over storages: views once, who dies when, and what generated wrappers allocate."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from stack import stack
from torch import Tensor, fx, nn

import zerofx
from zerofx.analysis.memory.liveness import CompiledCall, lifetimes
from zerofx.analysis.memory.memory import Memory, memory, peak_bytes
from zerofx.analysis.memory.storage import Category, CompiledRegion, Storage
from zerofx.analysis.time.traffic import traffic
from zerofx.capture import capture
from zerofx.compat.wrapper import Output, trace
from zerofx.ir.meta import Info
from zerofx.ir.program import BACKWARD, FORWARD, Planned


@cache
def program(stage: int = 3, world: int = 4) -> Planned:
    plan = {"stage": stage, "bucket_bytes": 0, "persist_below": 0, "kernels": "aten"}
    return zerofx.rewrite(capture(*stack()), plan, world)


def named(report: Memory, name: str) -> list[Storage]:
    return [s for s in report.storages if s.name == name]


class Views(nn.Module):
    """q, k, v are views of one product, and the last line reads two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 3, 8).unbind(1)
        return (q * k * v.exp()).sum()


def test_views_count_once() -> None:
    """Saved views of one storage are that storage, in forward and in backward."""
    captured = capture(Views(), (torch.zeros(4, 8),))
    report = memory(zerofx.rewrite(captured, {"stage": 0}, 1))
    (product,) = named(report, "mm")
    assert product.nbytes == 4 * 24 * 4 and product.category is Category.ACTIVATIONS
    life = report.life
    graphs = {graph for graph, _ in life.nodes[product.birth : product.death + 1]}
    assert graphs == {FORWARD, BACKWARD}
    held = report.by_category(report.peak_time)
    assert held[Category.ACTIVATIONS] <= 2 * 4 * 24 * 4  # the product, and what v.exp() makes of it


def test_a_tuple_holds_its_parts_until_it_is_taken_apart() -> None:
    """The parts of a norm's result are three storages; those that are not read die at once."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    for p in model.parameters():
        p.requires_grad_(False)
    captured = capture(model, (torch.zeros(4, 8),))
    parts = [s for s in lifetimes(captured.planned()).storages if s.name == "native_layer_norm"]
    assert [s.nbytes for s in parts] == [4 * 8 * 4, 4 * 4, 4 * 4]
    assert parts[0].death > parts[1].death >= parts[1].birth


@pytest.mark.parametrize(
    ("stage", "world", "sharded"),
    [(0, 4, "none"), (1, 4, "states"), (3, 4, "all"), (3, 1, "none")],
)
def test_what_each_stage_shards(stage: int, world: int, sharded: str) -> None:
    report = memory(program(stage, world))
    lasting = report.lasting()
    padded = sum(b.full_bytes for b in program(stage, world).layout.buckets)
    own = padded if sharded == "none" else padded // world
    assert lasting[Category.PARAMETERS] == own
    assert lasting[Category.GATHERED] == (padded if sharded == "states" else 0)
    used = sum(p.numel() for p in stack()[0].parameters()) * 8
    assert lasting[Category.OPTIMIZER] <= 2 * own and (own < padded or used == 2 * padded - 8 * 12)


def test_optimizer_bytes_are_the_callers() -> None:
    free, adamw = (memory(program(), optimizer_bytes=n) for n in (0, 8))
    assert free.lasting()[Category.OPTIMIZER] == 0
    assert adamw.peak_bytes - free.peak_bytes == adamw.lasting()[Category.OPTIMIZER]
    assert peak_bytes(program()) == adamw.peak_bytes


def test_states_of_a_unit_with_two_buckets_are_all_counted() -> None:
    """A frozen and a trained layer of one unit lie in two buckets of one label."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    for p in model[0][1].parameters():
        p.requires_grad_(False)
    captured = capture(model, (torch.zeros(4, 8),), units=("0", "1"))
    plan = {"stage": 3, "kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
    report = memory(zerofx.rewrite(captured, plan, 2))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.lasting()[Category.OPTIMIZER] >= trained * 8 // 2 > 0
    labels = [b.label() for b in zerofx.rewrite(captured, plan, 2).layout.buckets]
    assert len(labels) > len(set(labels))


def test_curve_is_the_sum_of_what_is_held() -> None:
    report = memory(program())
    for time in (0, report.peak_time, report.life.end):
        assert report.curve[time] == sum(h.nbytes for h in report.held_at(time))
        assert report.curve[time] == sum(report.by_category(time).values())
    assert report.peak_bytes == max(report.curve) == report.curve[report.peak_time]


def test_slots_say_what_lies_in_them() -> None:
    report = memory(program())
    first = next(s for s in report.in_slots if s.category is Category.GATHERED)
    held = {h.name for h in report.held_at(first.birth)}
    assert f"slot {first.slot}: gathered layers.0" in held
    assert not any(name.startswith("slot") for name in (s.name for s in report.in_slots))


def test_traffic_is_worked_out_for_any_world() -> None:
    """Per rank n (w - 1) / w a gather or reduction; twice that for an all-reduce."""
    for world in (2, 4, 64):
        for stage, times in ((0, 2), (1, 2), (2, 2)):
            q = program(stage, world)
            numel = sum(b.numel for b in q.layout.buckets)
            sent = [traffic(q, rank) for rank in range(world)]
            assert sum(s.sent_numel for s in sent) == times * numel * (world - 1)
            assert all(s.sent_bytes == 4 * s.sent_numel for s in sent)
    assert traffic(program(3, 1)).sent_bytes == 0


# -- wrappers ---------------------------------------------------------------------------------
WRAPPER = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (16, 8), (8, 1))
        buf0 = empty_strided_cpu((16, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (8, 8), (1, 8), 0), out=buf0)
        del arg1_1
        buf1 = empty_strided_cpu((16, 16), (16, 1), torch.float64)
        cpp_fused_0(buf0, buf1)
        del buf1
        buf2 = buf0; del buf0  # reuse
        buf3 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(buf2)
        buf4 = buf3[0]
        assert_size_stride(buf4, (16, 4), (4, 1), 'sdpa')
        buf5 = buf3[1]
        assert_size_stride(buf5, (16, ), (1, ), 'sdpa')
        del buf3
        return (reinterpret_tensor(arg0_1, (128, ), (1, ), 0), buf4, buf2, buf4, )
"""


def test_wrapper_is_read() -> None:
    found = trace(WRAPPER)
    assert found is not None and found.num_inputs == 2
    assert found.outputs == (Output(input=0), Output(made=3), Output(made=0), Output(made=3))
    assert found.size_bytes == {0: 16 * 8 * 4, 1: 16 * 16 * 8, 2: 0, 3: 16 * 4 * 4, 4: 16 * 4}
    made = [found.made_bytes(m) for m in found.moments]
    assert max(made) == 16 * 8 * 4 + 16 * 16 * 8  # while the kernel runs
    assert [sorted(m.inputs) for m in found.moments] == [[0, 1], [0], [0], [0], [0], [0]]


@pytest.mark.parametrize(
    "line",
    ["(buf0,) = self.partitions[0](partition0_args)", "return (somewhere_else, )"],
)
def test_an_unknown_wrapper_is_left_to_aten(line: str) -> None:
    source = WRAPPER.replace("        del arg1_1\n", f"        {line}\n")
    assert trace(source) is None
    assert trace("x = 1") is None


def test_results_of_another_dtype_are_known() -> None:
    """A wrapper does not say that the mask of a dropout has one byte an element."""
    source = WRAPPER.replace("_scaled_dot_product_flash_attention_for_cpu", "native_dropout")
    found, plain = trace(source.replace("buf4, buf2", "buf5, buf2")), trace(WRAPPER)
    assert found is not None and plain is not None
    assert found.size_bytes[found.outputs[1].made] == 16
    assert plain.outputs[1] != found.outputs[1]


FREES = """
def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = empty_strided_cpu((1024, ), (1, ), torch.float32)
    cpp_fused_0(arg0_1, buf0)
    del arg0_1
    buf1 = empty_strided_cpu((256, ), (1, ), torch.float32)
    cpp_fused_1(buf0, arg1_1, buf1)
    del arg1_1
    del buf0
    return (buf1, )
"""


def test_a_region_frees_its_inputs_before_it_makes_its_results() -> None:
    """4 KiB of input and 4 KiB of temporary never lie beside the 1 KiB of result."""
    found = trace(FREES)
    assert found is not None
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    out = graph.call_function(torch.add, (x, y))
    region = CompiledRegion((out,), (x, y), (out,), found)
    big, kept = (
        Storage(Category.TEMPORARIES, n, "", 0, d, Info()) for n, d in ((4096, 7), (64, 9))
    )
    call = CompiledCall(region, 7, [(big,), (kept,)])
    result = call.result(1, "out")
    inside = call.settle()
    assert (inside.nbytes, inside.birth, inside.death) == (4096, 7, 7)
    assert (big.death, kept.death) == (7, 9) and result.birth == 8  # the first kernel is the peak

    small = Storage(Category.TEMPORARIES, 512, "", 0, 7, Info())
    call = CompiledCall(region, 7, [(small,), (kept,)])
    result = call.result(1, "out")
    assert call.settle().nbytes == 4096
    assert small.death == 6 and result.birth == 7  # the second one is
