"""The states of the random generators as tensors, so that they are saved like everything else.

Each rank's states are saved. Loaded at the same world size every rank gets its own back; at another
one all ranks get rank 0's. (torch's are equal on all ranks as long as the user seeds them so: a
program offsets them by rank by itself.)
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from zerofx.errors import SnapshotError

_KEY = 624  # words in the state of a Mersenne twister


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's generator states, 1-D: torch's on the host and on `device`, and others'.

    Raises:
        SnapshotError: NumPy's global generator is not the one that NumPy starts with.
    """
    states = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Put the states of `random_states` back."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    version, *words, has_gauss, gauss = states["python"].tolist()
    key = tuple(int(word) for word in words)
    random.setstate((int(version), key, gauss if has_gauss else None))
    *words, position, has_gauss, gauss = states["numpy"].tolist()
    key_words = np.array(words).astype(np.uint32)
    np.random.set_state(("MT19937", key_words, int(position), int(has_gauss), gauss))


def _python_state() -> Tensor:
    """Return [version, 624 words, position, has_gauss, gauss]; float64 holds each exactly."""
    version, key, gauss = random.getstate()
    return torch.tensor([version, *key, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _numpy_state() -> Tensor:
    """Return [624 words, position, has_gauss, gauss]."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":
        raise SnapshotError(
            f"NumPy's global generator is a {state['bit_generator']}, and only the state of the "
            "MT19937 that NumPy starts with is saved; use a numpy.random.Generator of your own "
            "and put its state into extra="
        )
    inner = state["state"]
    assert len(inner["key"]) == _KEY
    values = [*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]]
    return torch.tensor(values, dtype=torch.float64)
