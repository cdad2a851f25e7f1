"""Plan.dynamic: one program for all sizes of what varies, each step as plain PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from pool import Pool
from torch import nn

import zerofx
from zerofx.errors import BudgetError, ProgramError
from zerofx.model import programs
from zerofx.runtime.regions import progress
from zerofx.runtime.regions.cache import CompileCount
from zerofx.tools.demo.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab=31, seq=32, width=16, layers=2, heads=2)


def compiled(model, **fields):
    return zerofx.compile(model, zerofx.Plan(**{"kernels": "aten", **fields}))


def grads_of(model, plain, args, **named_args):
    """Return the loss and gradients of both from the same state; the gradients are dropped."""
    found = []
    for each in (model, plain):
        loss = each(*args, **named_args)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        named = {k: p.grad for k, p in each.named_parameters()}
        grads = {k: g if type(g) is torch.Tensor else g.full_tensor() for k, g in named.items()}
        found.append((loss.detach(), {k: g.clone() for k, g in grads.items()}))
        for p in each.parameters():
            p.grad = None
    return found


def check_equal(model, plain, args, **named_args):
    (loss, grads), (wanted, wanted_grads) = grads_of(model, plain, args, **named_args)
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], atol=1e-6, rtol=1e-6, msg=name)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def test_a_second_value_makes_a_dimension_free_and_a_third_compiles_nothing():
    torch.manual_seed(0)
    plain = MLP()
    model = compiled(MLP())
    model.load_state_dict(plain.state_dict())
    for rows in (5, 7, 9, 5, 31):
        check_equal(model, plain, (torch.randn(rows, 6),))
    assert len(model.programs) == 1
    assert [str(d) for s in model.programs[0].sizes.symbols for d in s.dims] == ["x.shape[0]"]


@pytest.mark.parametrize("varies", ["batch", "length", "both"])
def test_layers_that_only_their_place_names_take_one_program(varies, caplog):
    """Layers of a Sequential and of torch's Transformer, whose sizes tensor parallelism reads."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
            self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])
            self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x).square().mean()

    torch.manual_seed(0)
    plain = Encoder()
    model = compiled(copy.deepcopy(plain))
    for size in (8, 6, 4, 9):
        shape = {"batch": (size, 5), "length": (3, size), "both": (size, size + 2)}[varies]
        check_equal(model, plain, (torch.randn(*shape, 16),))
    assert len(model.zerofx.programs) == 1
    assert "cannot vary" not in caplog.text


def test_padded_text_takes_two_programs_and_a_smaller_last_batch_none():
    torch.manual_seed(0)
    plain = GPT(SMALL)
    model = compiled(GPT(SMALL))
    model.load_state_dict(plain.state_dict())
    shapes = [(4, 12), (4, 20), (4, 9), (3, 20), (4, 32), (2, 11)]
    for rows, length in shapes:
        ids = torch.randint(0, 31, (rows, length))
        check_equal(model, plain, (ids, ids))
    assert len(model.programs) == 1
    (program,) = model.programs
    assert [len(s.dims) for s in program.sizes.symbols] == [2, 2]
    ids = torch.randint(0, 31, (4, 9))  # which the program for four rows served before
    model(ids, ids)
    assert model.programs == [program]


class Shifted(nn.Module):
    """The loss of causal language models in transformers: labels padded at the end, and shifted."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, ids):
        labels = nn.functional.pad(ids, (0, 1), value=-100)[..., 1:].reshape(-1)
        logits = self.head(nn.functional.pad(self.embed(ids), (0, 0, 1, 0)))[:, 1:].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels, ignore_index=-100)


def test_texts_of_other_lengths_are_padded_in_one_program():
    plain = Shifted()
    model = compiled(copy.deepcopy(plain), dynamic={"ids.shape[1]": 32})
    for length in (12, 7, 31):
        check_equal(model, plain, (torch.randint(0, 31, (3, length)),))
    assert len(model.programs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GPTNeoX", "OPT", "Gemma2", "Mixtral"])
def test_language_models_of_transformers_take_one_program(kind):
    transformers = pytest.importorskip("transformers")
    fields = {"ffn_dim": 64, "word_embed_proj_dim": 32} if kind == "OPT" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, use_cache=False,
        intermediate_size=64, max_position_embeddings=64, num_key_value_heads=2, head_dim=8,
        num_local_experts=4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        attention_dropout=0.0, dropout=0.0, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = getattr(transformers, f"{kind}ForCausalLM")(config)
    model = compiled(copy.deepcopy(plain))
    for batch, length in ((4, 24), (4, 40), (4, 33), (3, 28)):
        ids = torch.randint(3, 64, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, -5:] = 0
        check_equal(model, plain, (ids,), attention_mask=mask, labels=ids)
    assert len(model.programs) == 1 and not model.zerofx.islands


def test_texts_cut_from_a_batch_are_served_as_they_lie():
    torch.manual_seed(0)
    plain, model = GPT(SMALL), compiled(GPT(SMALL))
    model.load_state_dict(plain.state_dict())
    for rows, length in ((4, 13), (4, 21), (3, 10), (2, 30)):
        ids = torch.randint(0, 31, (rows, length))
        check_equal(model, plain, (ids[:, :-1], ids[:, 1:]))
    assert len(model.programs) == 1


@torch.no_grad()
def test_generation_compiles_for_two_lengths():
    torch.manual_seed(0)
    plain, model = GPT(SMALL).eval(), compiled(GPT(SMALL)).eval()
    model.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 31, (1, 3))
    while ids.shape[1] < 12:
        logits = [m(ids) for m in (model, plain)]
        torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=1e-6)
        ids = torch.cat([ids, logits[0][:, -1:].argmax(-1)], dim=1)
    assert len(model.programs) == 1


class Cached(nn.Module):
    """Hands out what it has seen with numbers that say how much that is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, seen=0, cache=None):
        h = self.inner(x)
        h = h if cache is None else torch.cat([cache, h], dim=1)
        numbers = {"seen": seen + x.shape[1], "part": h.shape[1] / 2, "is_long": h.shape[1] > 2}
        return {"out": h[:, -1:], "cache": h, "shape": h.shape, "name": "h", **numbers}


@torch.no_grad()
def test_numbers_that_depend_on_sizes_are_handed_out():
    torch.manual_seed(0)
    plain, model = same(Cached(), compiled(Cached()))
    x = torch.randn(2, 3, 4)
    expected, found = plain(x), model(x)
    for _ in range(6):
        expected = plain(expected["out"], expected["seen"], expected["cache"])
        found = model(found["out"], found["seen"], found["cache"])
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[key], value)
            else:
                assert (found[key], type(found[key])) == (value, type(value)), key
    assert len(model.programs) == 2


LENGTHS = ((12, 9), (20, 9), (7, 15), (31, 16), (10, 11))  # of each rank, step by step


def ranks_of_other_lengths(fields: dict) -> int:
    """Train on each rank with texts of other lengths; return how many programs were compiled."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    plain, mine = GPT(SMALL), GPT(SMALL)
    mine.load_state_dict(plain.state_dict())
    model = compiled(mine, **fields)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for lengths in LENGTHS:
        batches = [torch.randint(0, 31, (2, length)) for length in lengths]
        model(batches[rank], batches[rank]).backward()
        (sum(plain(ids, ids) for ids in batches) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = zerofx.full_state_dict(model)
    for name, found in state.items():  # rank 0 has all, others none
        torch.testing.assert_close(found, plain.state_dict()[name], atol=1e-5, rtol=1e-5)
    return len(model.programs)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"stage": 1}, marks=pytest.mark.slow),
        {"stage": 3},
        {"tiling": {"blocks.*.mlp.*": 2}},
    ],
    ids=["1", "3", "tiled"],
)
def test_ranks_train_on_texts_of_other_lengths(pool: Pool, fields: dict) -> None:
    assert pool.run(2, ranks_of_other_lengths, fields) == [1, 1]


def test_a_program_for_sizes_that_vary_is_emitted_loaded_and_adopted(tmp_path):
    torch.manual_seed(0)
    plain, model = GPT(SMALL), compiled(GPT(SMALL))
    model.load_state_dict(plain.state_dict())
    for shape in ((2, 12), (3, 20)):
        ids = torch.randint(0, 31, shape)
        model(ids, ids).backward()
    program = model.programs[0]
    loaded = zerofx.load_program(program.emit(tmp_path / "program"))
    assert loaded.sizes == program.sizes
    assert loaded.memory().peak_bytes == program.memory().peak_bytes
    model.zero_grad()
    model.adopt(loaded)
    ids = torch.randint(0, 31, (5, 7))
    check_equal(model, plain, (ids, ids))
    assert len(model.programs) == 1


def test_memory_is_told_for_any_size():
    model, alone = compiled(GPT(SMALL)), compiled(GPT(SMALL))
    for length in (12, 20):
        ids = torch.randint(0, 31, (2, length))
        model(ids, ids).backward()
    ids = torch.randint(0, 31, (2, 27))
    alone(ids, ids).backward()
    program = model.programs[0]
    wanted = alone.programs[0].memory()
    assert program.memory(sizes={"s0_1": 27}).peak_bytes == wanted.peak_bytes
    with pytest.raises(ProgramError, match=r"has no size width. Those that vary are s0_1"):
        program.memory(sizes={"width": 4})


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] % 2:
            return self.a(x).sum()
        return self.a(x).square().sum() + sum(x[:, i].sum() for i in range(x.shape[1]))


def test_control_flow_on_a_size_has_a_program_for_each_way():
    torch.manual_seed(0)
    plain, model = Odd(), compiled(Odd())
    model.load_state_dict(plain.state_dict())
    for rows in (3, 5, 6, 8, 7, 12):
        check_equal(model, plain, (torch.randn(rows, 4),))
    assert len(model.programs) == 2


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = self.cell(state + x[:, step])
        return state.sum()


def test_a_size_that_cannot_vary_is_named_once(caplog):
    torch.manual_seed(0)
    plain, model = Looped(), compiled(Looped())
    model.load_state_dict(plain.state_dict())
    for length in (3, 4, 5):
        check_equal(model, plain, (torch.randn(2, length, 4),))
    assert caplog.text.count("x.shape[1] cannot vary within one program") == 1
    assert len(model.programs) == 3
    check_equal(model, plain, (torch.randn(6, 4, 4),))
    check_equal(model, plain, (torch.randn(7, 4, 4),))
    assert len(model.programs) == 3


def same(*models):
    """Return the models with the state of the first."""
    for each in models[1:]:
        each.load_state_dict(models[0].state_dict())
    return models


@pytest.mark.slow
def test_inductor_compiles_regions_once_for_all_lengths(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / "cache"))  # where nothing is compiled yet
    torch.manual_seed(0)
    plain, mine = same(MLP(), MLP())
    model = compiled(mine, kernels="inductor")
    for rows in (5, 7, 9, 5, 31):
        check_equal(model, plain, (torch.randn(rows, 6),))
    assert len(model.programs) == 1
    before = CompileCount.compiled
    check_equal(model, plain, (torch.randn(5000, 6),))  # sums of so many are made in another way
    assert CompileCount.compiled > before
    (program,) = model.programs
    loaded = zerofx.load_program(program.emit(tmp_path / "program"))
    assert loaded.memory().peak_bytes == program.memory().peak_bytes
    model.adopt(loaded)
    check_equal(model, plain, (torch.randn(12, 6),))


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, weight, window=2):
        x = torch.relu(self.a(x[:, :window] @ x[:, :window].T @ x) * window)
        return self.b(x).square().mean() * weight


NUMBERS = [(0.5, 2), (0.25, 2), (-3.5, 2), (1.0, 2), (0.5, 3), (0.3, 4), (0.2, 5)]


@pytest.mark.parametrize("kernels", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_that_vary_are_inputs(tmp_path, kernels):
    torch.manual_seed(0)
    plain, mine = same(Weighed(), Weighed())
    model = compiled(mine, kernels=kernels)
    made = []
    model._programs.on_bound = made.append
    for weight, window in NUMBERS:
        check_equal(model, plain, (torch.randn(5, 6), weight, window))
    assert len(made) == 3  # the first, any weight, any window
    program = model.programs[-1]
    assert [str(d) for s in program.sizes.symbols for d in s.dims] == ["weight", "window"]
    assert zerofx.load_program(program.emit(tmp_path / "program")).sizes == program.sizes


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = self.a(x)
        return x.sum()


def test_a_number_that_control_flow_reads_has_a_program_per_value():
    torch.manual_seed(0)
    plain, mine = same(Repeated(), Repeated())
    model = compiled(mine, max_programs=2)
    for times in (2, 3, 4, 2, 5):
        check_equal(model, plain, (torch.randn(3, 4), times))
    assert len(model.programs) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"offload": {"activations": "cpu"}},
        {"activations": "recompute"},
        {"activations": {"blocks.*": "offload"}},
    ],
    ids=["offload", "recompute", "pattern"],
)
def test_activations_are_kept_in_any_way(fields):
    torch.manual_seed(0)
    plain, mine = same(GPT(SMALL), GPT(SMALL))
    model = compiled(mine, **fields)
    for length in (12, 20, 9, 31):
        ids = torch.randint(0, 31, (2, length))
        check_equal(model, plain, (ids, ids))
    assert len(model.programs) == 1


@pytest.mark.parametrize("field", [{"numerics": "fast"}])
def test_what_is_made_for_one_size_has_a_program_per_size(field):
    torch.manual_seed(0)
    model = compiled(MLP(), **field)
    for rows in (5, 7, 9):
        model(torch.randn(rows, 6)).backward()
    assert len(model.programs) == 3


def test_a_declared_dimension_is_free_from_the_first_call_on(caplog):
    torch.manual_seed(0)
    plain, mine = same(GPT(SMALL), GPT(SMALL))
    bounds = {"x.shape[1]": 32, "y.shape[1]": 32, "z.shape[0]": 8}
    model = compiled(mine, dynamic=bounds)
    made = []
    model._programs.on_bound = made.append
    for length in (12, 20, 32):
        ids = torch.randint(0, 31, (2, length))
        check_equal(model, plain, (ids, ids))
    (program,) = model.programs
    assert len(made) == 1 and program.sizes.hints == {"s0_1": 32}
    alone = compiled(GPT(SMALL), dynamic="off")
    alone(ids, ids).backward()
    assert program.memory().peak_bytes == alone.programs[0].memory().peak_bytes
    assert "Plan.dynamic names z.shape[0], which this call does not have" in caplog.text
    assert zerofx.Plan.from_json(program.plan.to_json()) == program.plan


def test_a_budget_holds_at_every_length():
    torch.manual_seed(0)
    plain, mine = same(GPT(SMALL), GPT(SMALL))
    alone = compiled(GPT(SMALL), dynamic="off", activations="recompute")
    longest = torch.randint(0, 31, (8, 32))
    alone(longest, longest).backward()
    budget = alone.programs[0].memory().peak_bytes + 4096
    model = compiled(mine, memory_budget=budget, activations="auto")
    for length in (8, 12, 16, 32):
        ids = torch.randint(0, 31, (8, length))
        check_equal(model, plain, (ids, ids))
        (program,) = model.programs
        sizes = {s.name: length for s in program.sizes.symbols}
        assert program.memory(sizes=sizes).peak_bytes <= budget


def test_an_adopted_program_stays_where_another_would_serve_its_call(tmp_path):
    torch.manual_seed(0)
    model = compiled(MLP())
    x = torch.randn(5, 6)
    model(x)
    model.adopt(model.programs[0].emit(tmp_path / "edited"))
    for rows in (7, 9):
        model(torch.randn(rows, 6))
    model(x)
    assert [p.directory is None for p in model.programs] == [True, False]


def test_a_copy_of_the_model_runs_the_programs_for_any_length(monkeypatch):
    torch.manual_seed(0)
    model = compiled(MLP())
    for rows in (5, 7):
        model(torch.randn(rows, 6))
    monkeypatch.setattr(programs, "capture", None)
    copied = copy.deepcopy(model)
    x = torch.randn(11, 6)
    assert torch.equal(copied(x), model(x)) and copied.programs == model.programs


def test_a_budget_that_is_too_small_is_not_told_as_a_size_that_cannot_vary(caplog):
    torch.manual_seed(0)
    config = GPTConfig(vocab=31, seq=512, width=32, layers=2, heads=2)
    model = compiled(GPT(config), memory_budget="1MiB", activations="auto")
    for length in (16, 512):
        ids = torch.randint(0, 31, (2, length))
        if length == 16:
            model(ids, ids).backward()
            model.zero_grad()
            continue
        with pytest.raises(BudgetError, match=r"but the budget is 1\.0 MiB"):
            model(ids, ids)
    assert "cannot vary" not in caplog.text


def test_a_long_capture_tells_what_is_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENT_S", 0.001)
    torch.manual_seed(0)
    model = compiled(MLP())
    for rows in (3, 5, 6):
        model(torch.randn(rows, 6)).backward()
    told = capsys.readouterr().err
    assert "zerofx: capturing and scheduling MLP (training): 0 s" in told
    assert "capturing and scheduling MLP (training), once for all values of x.shape[0]: 0 s" in told
    model(torch.randn(7, 6)).backward()
    assert not capsys.readouterr().err
