"""Loops as others write them, on 2 ranks: generation, PPO, a GAN, adapters that are merged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.distributions import Categorical

import zerofx
from zerofx.errors import CaptureError, ShardError

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


def here() -> tuple[int, int]:
    """Return (rank, number of ranks)."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


# -- generation ------------------------------------------------------------------------------------


def generated(tokens: int, use_cache: bool, *plans: dict[str, Any]) -> None:
    """Generate greedily beside the plain model, from prompts of other lengths on each rank."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=tokens + 8, vocab_size=97,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(8)  # far from uniform logits: no ties
    rank, _ = here()
    prompt = torch.randint(0, 97, (2, 4 + rank), generator=torch.Generator().manual_seed(rank))
    settings = {"max_new_tokens": tokens, "do_sample": False, "use_cache": use_cache}
    wanted = plain.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert wanted.shape[1] == prompt.shape[1] + tokens and len(wanted.unique()) > 8
    for fields in plans:
        model: Any = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(found, wanted), fields
        loss = model(prompt, labels=prompt, use_cache=False).loss  # and it trains on
        loss.backward()
        assert len(model.programs) <= 12, [p.model_name for p in model.programs]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("use_cache", [False, True], ids=["whole", "cached"])
def test_generation_of_256_tokens(pool: Pool, use_cache: bool, stage: int) -> None:
    pytest.importorskip("transformers")
    pool.run(2, generated, 256, use_cache, {"stage": stage}, timeout_s=300)


# -- the same loop on a compiled model and a plain one ---------------------------------------------


def compiled(plain: nn.Module, fields: dict[str, Any]) -> Any:
    return zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))


def check_same(model: Any, plain: nn.Module) -> None:
    state = model.state_dict()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), atol=1e-5, rtol=1e-4, msg=name)


# -- PPO -------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """An actor and a critic that are called by methods; there is no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = self.net(1, 1.0)
        self.actor = self.net(3, 0.01)

    def net(self, out: int, last: float) -> nn.Sequential:
        layers = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, out)
        for layer, gain in zip(layers, (2**0.5, 2**0.5, last), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Any, ...]:
        chosen = Categorical(logits=self.actor(x))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(x)


def rollout(agent: Any, update: int, rank: int) -> tuple[Tensor, ...]:
    """Act in 4 toy environments for 8 steps; return what PPO learns from, one row per step."""
    torch.manual_seed(100 * update + rank)
    state, rows = torch.randn(4, 6), []
    with torch.no_grad():
        for _ in range(8):
            action, log_prob, _, value = agent.get_action_and_value(state)
            after = (0.9 * state + 0.3 * torch.randn(4, 6)).roll(1, 1)
            reward = -(action - 1 - after[:, 0].sign()).abs()
            rows.append((state, action, log_prob, value.flatten(), reward))
            state = after
        value = agent.get_value(state).flatten()
        advantages, last = [], torch.zeros(4)
        for row in reversed(rows):  # generalised advantage estimation
            last = row[4] + 0.99 * value - row[3] + 0.99 * 0.95 * last
            value = row[3]
            advantages.insert(0, last)
    states, actions, log_probs, values = (
        torch.cat(part) for part in [*zip(*rows, strict=True)][:4]
    )
    advantage = torch.cat(advantages)
    return states, actions, log_probs, values, advantage, advantage + values


def ppo_loss(agent: Any, batch: tuple[Tensor, ...]) -> Tensor:
    states, actions, log_probs, values, advantage, returns = batch
    _, new, entropy, value = agent.get_action_and_value(states, actions)
    ratio, value = (new - log_probs).exp(), value.view(-1)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    clipped = values + (value - values).clamp(-0.2, 0.2)
    fit = torch.max((value - returns).square(), (clipped - returns).square()).mean() / 2
    return policy - 0.01 * entropy.mean() + 0.5 * fit


def ppo(*plans: dict[str, Any]) -> None:
    rank, world = here()
    for fields in plans:
        plain = Agent()
        agent = compiled(plain, fields)
        pairs = [(m, torch.optim.Adam(m.parameters(), lr=2.5e-3, eps=1e-5)) for m in (agent, plain)]
        for update in range(2):
            mine = rollout(agent, update, rank)
            batches = [rollout(plain, update, each) for each in range(world)]
            torch.testing.assert_close(mine, batches[rank], atol=1e-5, rtol=1e-4)
            for epoch in range(2):
                order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch))
                for rows in order.chunk(4):
                    ppo_loss(agent, tuple(t[rows] for t in mine)).backward()
                    for batch in batches:
                        (ppo_loss(plain, tuple(t[rows] for t in batch)) / world).backward()
                    for model, optimizer in pairs:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
        check_same(agent, plain)
        assert not agent.zerofx.islands
        names = {p.model_name for p in agent.programs}
        assert names == {"Agent.actor", "Agent.critic"}, names


@pytest.mark.slow
def test_ppo(pool: Pool) -> None:
    pool.run(2, ppo, {}, {"stage": 2}, {"stage": 1}, {"stage": 0}, {"kernels": "inductor"})


# -- a GAN -----------------------------------------------------------------------------------------


def generator() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 2, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3), nn.Flatten(0),
    )  # fmt: skip


def adversaries(
    generates: Any, judges: Any, optimizers: list[Any], batches: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Train the judge on real and detached fake images, then the generator through the judge.

    batches: of each rank that this process stands for: real images, and noise.
    """
    label = F.binary_cross_entropy_with_logits
    share, losses = 1 / len(batches), []
    judges.zero_grad()
    fakes = []
    for real, noise in batches:
        scores = judges(real)
        (label(scores, torch.ones_like(scores)) * share).backward()
        fakes.append(generates(noise))
        scores = judges(fakes[-1].detach())
        (label(scores, torch.zeros_like(scores)) * share).backward()
    optimizers[1].step()
    generates.zero_grad()
    for fake in fakes:
        scores = judges(fake)
        loss = label(scores, torch.ones_like(scores))
        (loss * share).backward()
        losses.append(loss.detach())
    optimizers[0].step()
    return torch.stack(losses)


def gan(*plans: dict[str, Any]) -> None:
    rank, world = here()
    for fields in plans:
        plain = [generator(), critic()]
        models = [compiled(each, fields) for each in plain]
        pairs = [
            (m, [torch.optim.Adam(e.parameters(), lr=2e-3, betas=(0.5, 0.999)) for e in m])
            for m in (models, plain)
        ]
        for step in range(3):
            torch.manual_seed(step)
            batches = [(torch.randn(4, 1, 8, 8), torch.randn(4, 6, 1, 1)) for _ in range(world)]
            found = adversaries(*pairs[0][0], pairs[0][1], batches[rank : rank + 1])
            wanted = adversaries(*pairs[1][0], pairs[1][1], batches)
            torch.testing.assert_close(found[0], wanted[rank], atol=1e-5, rtol=1e-4)
        for mine, theirs in zip(models, plain, strict=True):
            check_same(mine, theirs)


def test_a_gan(pool: Pool) -> None:
    pool.run(2, gan, {})


@pytest.mark.slow
def test_a_gan_under_other_plans(pool: Pool) -> None:
    pool.run(2, gan, {"stage": 2}, {"stage": 1}, {"stage": 0}, {"kernels": "inductor"})


# -- adapters that are trained and merged ----------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with low-rank adapters by name, as PEFT keeps them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer, self.merged = base.requires_grad_(False), False
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        return out if self.merged else out + 2 * self.lora_B["default"](self.lora_A["default"](x))

    def merge(self) -> nn.Linear:
        with torch.no_grad():
            product = self.lora_B["default"].weight @ self.lora_A["default"].weight
            self.base_layer.weight.data += 2 * product
        return self.base_layer


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(29, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 29)

    def adapt(self) -> Tuned:
        self.requires_grad_(False)
        for layer in self.layers:
            layer[0] = Adapted(layer[0])
        return self

    def merge_and_unload(self) -> Tuned:
        for layer in self.layers:
            layer[0] = layer[0].merge()
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def train_both(model: Any, plain: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
    rank, world = here()
    pairs = [
        (m, torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2))
        for m in (model, plain)
    ]
    for step in range(3):
        torch.manual_seed(step)
        batches = [torch.randint(0, 29, (2, 6)) for _ in range(world)]
        loss(model, batches[rank]).backward()
        for batch in batches:
            (loss(plain, batch) / world).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()


def adapters(folder: str, *plans: dict[str, Any]) -> None:
    rank, _ = here()
    ids = torch.arange(12).view(2, 6)
    for number, fields in enumerate(plans):
        plain = Tuned().adapt()
        model = compiled(plain, fields)
        train_both(model, plain, lambda m, batch: m(batch))
        check_same(model, plain)
        path = Path(folder) / f"merged{number}.pt"
        with zerofx.whole(model, write_back=True):
            merged = model.merge_and_unload()
            assert type(merged.layers[0][0]) is nn.Linear
            found = merged(ids)
            if rank == 0:
                torch.save(merged.state_dict(), path)
        torch.testing.assert_close(found, plain.merge_and_unload()(ids), atol=1e-5, rtol=1e-4)
        if rank == 0:
            again = Tuned()
            again.load_state_dict(torch.load(path))
            torch.testing.assert_close(again(ids), found)
        with pytest.raises(ShardError, match=r"layers\.0\.0: another module, a Linear, was put"):
            model(ids)


def test_adapters_are_merged_and_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, adapters, str(tmp_path), {})


@pytest.mark.slow
def test_adapters_under_other_plans(pool: Pool, tmp_path: Path) -> None:
    offload = {"offload": {"parameters": "cpu", "optimizer": "cpu"}}
    pool.run(2, adapters, str(tmp_path), {"stage": 2}, {"stage": 1}, {"stage": 0}, offload)


def peft_adapters(folder: str, *plans: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft and transformers ask each other for old names
        train_and_merge(folder, *plans)


def train_and_merge(folder: str, *plans: dict[str, Any]) -> None:
    import peft
    import transformers

    rank, _ = here()
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=29, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    ids = torch.arange(12).view(2, 6)
    for number, fields in enumerate(plans):
        torch.manual_seed(0)
        low_rank = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        plain = peft.get_peft_model(transformers.GPT2LMHeadModel(config), low_rank)
        model = compiled(plain, fields)
        train_both(model, plain, lambda m, x: m(input_ids=x, labels=x, use_cache=False).loss)
        check_same(model, plain)
        with zerofx.whole(model):
            if rank == 0:
                model.save_pretrained(f"{folder}/adapter{number}")
        with zerofx.whole(model, write_back=True):
            merged = model.merge_and_unload()
            found = merged(input_ids=ids, use_cache=False).logits
            if rank == 0:
                merged.save_pretrained(f"{folder}/merged{number}")
        if rank == 0:
            fresh = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/merged{number}").eval()
            torch.manual_seed(0)
            base = transformers.GPT2LMHeadModel(config)
            loaded = peft.PeftModel.from_pretrained(base, f"{folder}/adapter{number}").eval()
            wanted = plain.eval().merge_and_unload()(input_ids=ids, use_cache=False).logits
            for logits in (
                found,
                fresh(input_ids=ids, use_cache=False).logits,
                loaded(input_ids=ids, use_cache=False).logits,
            ):
                torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_adapters_of_peft(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pool.run(2, peft_adapters, str(tmp_path), {}, {"stage": 1}, timeout_s=300)


# -- exporters -------------------------------------------------------------------------------------


def exported() -> None:
    """Export by tracing and by torch.export, which need the whole parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    model = compiled(plain, {})
    train_both(model, plain, lambda m, batch: m(F.one_hot(batch % 4, 4).float()).sum())
    with pytest.raises(CaptureError, match=r"torch.jit.trace, .* inside `with zerofx.whole"):
        torch.jit.trace(model, x)
    with pytest.raises(ShardError, match=r"zerofx\.whole\(model\)"):
        torch.export.export(model, (x,))
    with zerofx.whole(model):
        traced, program = torch.jit.trace(model, x), torch.export.export(model, (x,))
    wanted = plain(x)
    torch.testing.assert_close(traced(x), wanted)
    torch.testing.assert_close(program.module()(x), wanted)
    check_same(model, plain)


def exported_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated, and used
        exported()


def test_exporters_see_the_model_within_whole(pool: Pool) -> None:
    pool.run(2, exported_quietly)
