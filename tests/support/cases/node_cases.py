"""Training on ranks that find themselves on two hosts, with what they send by level."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import torch
from models import CASES

import zerofx
from zerofx.analysis.time.traffic import traffic
from zerofx.comm import hosts


def on_two_hosts() -> Any:
    """Let ranks 0 and 1 find themselves on one host, and ranks 2 and 3 on another."""
    host = f"node{int(os.environ.get('RANK', '0')) // 2}"
    return mock.patch.object(hosts, "host_key", lambda: host)


def trained(case: str, plan: dict[str, Any], micro_batches: int = 1, kind: str = "AdamW") -> Any:
    """Return losses and whole parameters after some steps, and what the last step sent, by level.

    Each is (bytes sent, bytes of these that went to the other host); then by the program.
    """
    rank = int(os.environ.get("RANK", "0"))
    with on_two_hosts():
        model = zerofx.compile(
            CASES[case].make(), {"kernels": "aten", "persist_below": 100, **plan}
        )
    library = zerofx.optim if "update" in plan else torch.optim
    optimizer = getattr(library, kind)(model.parameters(), lr=1e-2)
    counters, losses = model.zerofx.world.counters, []
    before: dict[str, tuple[int, int]] = {}
    for step in range(3):
        before = {k: (t.sent_bytes, t.across_bytes) for k, t in counters.items()}
        for micro in range(micro_batches):
            arguments = CASES[case].batch(rank + 10 * (micro + step))
            is_last = micro == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(*arguments[0], **arguments[1])
                loss.backward()
            losses.append(loss.item())
        sent = {
            k: (t.sent_bytes - before[k][0], t.across_bytes - before[k][1])
            for k, t in counters.items()
        }
        optimizer.step()
        optimizer.zero_grad()
    predicted = traffic(model.programs[0], rank, per_node=2).kinds
    said = {k: (s.sent_bytes, s.across_bytes) for k, s in predicted.items()}
    return losses, model.state_dict(), {k: v for k, v in sent.items() if k in said}, said
