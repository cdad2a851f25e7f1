"""The demo's model, text, and measuring, without compiling anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerofx.errors import ZerofxError
from zerofx.tools.demo.gpt import GPT, GPTConfig, generate
from zerofx.tools.demo.measure import STEP, Peak, PeakMemory, peaks
from zerofx.tools.demo.options import Options, parse
from zerofx.tools.demo.text import Batches, load_text, source_files

SMALL = GPTConfig(layers=2, width=16, heads=2, seq=8)


def tokens(batch: int = 3, seq: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (batch, seq), generator=torch.Generator().manual_seed(1))


# -- model ------------------------------------------------------------------------------------
def test_loss_with_targets_and_logits_without():
    model, x = GPT(SMALL), tokens()
    assert model(x).shape == (3, 8, 256)
    loss = model(x, x)
    assert loss.shape == ()
    logits = model(x).flatten(0, 1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, x.flatten()))


def test_first_loss_is_near_that_of_guessing():
    torch.manual_seed(0)
    assert abs(GPT(SMALL)(tokens(), tokens()).item() - 5.545) < 1.0  # log 256


def test_a_position_sees_no_later_byte():
    model, x = GPT(SMALL).eval(), tokens(1)
    changed = x.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_is_one_parameter(tied: bool):
    cfg = GPTConfig(layers=2, width=16, heads=2, seq=8, tied=tied)
    model = GPT(cfg)
    assert (model.head.weight is model.embed.weight) is tied
    names = {name for name, _ in model.named_parameters()}
    assert ("head.weight" in names) is not tied
    blocks = cfg.layers * (12 * cfg.width**2 + 13 * cfg.width)
    ends = (256 + 8 + 2) * cfg.width + (0 if tied else 256 * cfg.width)
    assert model.num_parameters() == blocks + ends


def test_every_parameter_gets_a_gradient():
    model = GPT(SMALL)
    model(tokens(), tokens()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_dropout_acts_in_training_only():
    model, x = GPT(GPTConfig(layers=1, width=16, heads=2, seq=8, dropout=0.5)), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_made_on_meta_it_initialises_module_by_module():
    with torch.device("meta"):
        model = GPT(SMALL)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert abs(model(tokens(), tokens()).item() - 5.545) < 1.0


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        GPTConfig(width=10, heads=4)


def test_generate_goes_on_past_the_context_and_repeats_under_one_seed():
    model = GPT(SMALL).train()
    first = generate(model, b"def", 20, generator=torch.Generator().manual_seed(3))
    again = generate(model, b"def", 20, generator=torch.Generator().manual_seed(3))
    assert len(first) == 20
    assert first == again
    assert model.training
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, b"", 1)


# -- text -------------------------------------------------------------------------------------
def write_sources(root: Path, number: int) -> None:
    for i in range(number):
        (root / f"m{i:02d}.py").write_bytes(bytes([i]) * 50)


def test_text_is_the_standard_library_and_the_same_each_time():
    text = load_text(200_000)
    assert text.train.dtype is torch.uint8
    assert b"import" in bytes(text.train.tolist())
    assert torch.equal(text.train, load_text(200_000).train)
    assert text.train.numel() > 10 * text.valid.numel() > 0


def test_whole_files_go_to_train_or_valid(tmp_path: Path):
    write_sources(tmp_path, 32)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_m.py").write_bytes(b"x")
    text = load_text(root=tmp_path)
    train, valid = set(text.train.tolist()), set(text.valid.tolist())
    assert valid == {0, 16}
    assert train == set(range(32)) - valid
    assert load_text(16 * 50, root=tmp_path).train.numel() == 15 * 50


def test_files_are_in_a_fixed_order(tmp_path: Path):
    write_sources(tmp_path, 3)
    assert [p.name for p in source_files(tmp_path)] == ["m00.py", "m01.py", "m02.py"]


def test_no_sources_is_an_error(tmp_path: Path):
    with pytest.raises(ZerofxError, match=r"0 bytes of \.py files"):
        load_text(root=tmp_path)


COUNT = torch.arange(1001).remainder(251).to(torch.uint8)


def test_targets_are_one_byte_ahead():
    x, y = Batches(COUNT, batch=4, seq=10).at(3)
    assert x.shape == y.shape == (4, 10)
    assert x.dtype is torch.int64
    assert torch.equal(y, (x + 1) % 251)


def test_ranks_share_no_window_and_miss_none():
    def epoch(world_size: int) -> list[list[int]]:
        ranks = [Batches(COUNT, 12 // world_size, 10, r, world_size) for r in range(world_size)]
        steps = range(ranks[0].steps_per_epoch)
        return [[w for b in ranks for w in b.windows(step).tolist()] for step in steps]

    windows = [w for step in epoch(2) for w in step]
    assert len(windows) == len(set(windows)) == 96  # of 100: the rest do not fill a step
    assert epoch(2) == epoch(1) == epoch(3)  # the global batch does not depend on the world


def test_epochs_are_shuffled_anew_and_steps_are_pure():
    batches = Batches(COUNT, batch=10, seq=10)
    assert batches.windows(0).tolist() != batches.windows(batches.steps_per_epoch).tolist()
    assert [step for step, _, _ in batches.run(7, 9)] == [7, 8]
    ((_, x, _),) = batches.run(13, 14)
    assert torch.equal(x, batches.at(13)[0])


def test_too_little_text_is_an_error():
    with pytest.raises(ZerofxError, match="100 windows of 10 bytes do not fill one batch of 60"):
        Batches(COUNT, batch=60, seq=10, rank=0, world_size=2)


# -- options ----------------------------------------------------------------------------------
def test_options_are_fields_with_types():
    assert parse([]) == Options()
    assert parse(["--steps", "7", "--lr", "1e-3", "--out", "x"]) == Options(
        steps=7, lr=1e-3, out="x"
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--steps", "3"], "--steps 3 is too few. Give at least 4"),
        (["--heads", "5"], "width 128 is not a multiple of heads 5"),
        (["--stage", "4"], "stage"),
        (["--kernels", "indctor"], "inductor"),
    ],
)
def test_a_mistake_shows_before_any_rank_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parse(argv)
    assert message in capsys.readouterr().err


# -- measuring --------------------------------------------------------------------------------
def memory_event(at: float, address: int, numbytes: int) -> dict:
    args = {"Addr": address, "Bytes": numbytes, "Device Type": 0}
    return {"name": "[memory]", "ts": at, "args": args}


def test_the_peak_of_a_step_counts_what_lives_on():
    events = [
        memory_event(1, 0, 100),  # a parameter
        {"name": STEP, "ts": 2, "dur": 10},
        memory_event(3, 200, 30),
        memory_event(4, 200, -30),
        memory_event(5, 300, 20),
        memory_event(6, 300, -20),
        memory_event(20, 400, 1000),  # after the step
        memory_event(21, 400, -1000),
    ]
    assert peaks(events) == [Peak(130, 130, 100, 100)]
    assert peaks(events[:1]) == []


def test_a_block_freed_unseen_lies_between_the_bounds():
    events = [
        memory_event(1, 0, 100),
        {"name": STEP, "ts": 2, "dur": 10},
        memory_event(3, 200, 30),  # its free is never seen
        memory_event(4, 300, 20),
        memory_event(5, 300, -20),
        memory_event(6, 210, 50),  # so it had ended by now
        memory_event(7, 210, -50),
    ]
    assert peaks(events) == [Peak(150, 150, 100, 100)]
    assert peaks([*events[:5], memory_event(6, 300, 40), memory_event(7, 300, -40)]) == [
        Peak(140, 170, 100, 130)
    ]


def test_measured_peak_is_what_torch_allocates():
    with PeakMemory(torch.device("cpu")) as memory:
        kept = torch.zeros(1000)
        with memory.step():
            _ = torch.ones(500)
            del _
            torch.ones(300)
        with memory.step():
            kept.zero_()
    assert memory.steps == [
        Peak(6000, 6000, 4000, 4000),
        Peak(4000, 4000, 4000, 4000),
    ]
