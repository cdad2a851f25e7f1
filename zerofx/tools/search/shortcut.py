"""A number of devices and their name, as people write them: `8x H100`."""

from __future__ import annotations

import re

from zerofx.errors import PlanError
from zerofx.hardware import Hardware, hardware_names, load_hardware

_DEVICES = re.compile(r"\s*(\d+)\s*[x×*]?\s*([A-Za-z].*?)\s*")


def read_devices(text: str) -> tuple[int, Hardware]:
    """Return (ranks, hardware) of text like `8x H100`, `16 x A100 80GB` or `512x V100-32GB`.

    Raises:
        PlanError: not of that form, or the name fits no preset, or several.
    """
    match = _DEVICES.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise PlanError(
            f'devices {text!r}: write how many of what, for example "8x H100"; known are '
            f"{', '.join(hardware_names())}"
        )
    name = match[2]
    if name in hardware_names() or name.endswith((".yaml", ".yml", ".json")):
        return int(match[1]), load_hardware(name)
    words = _words(name) - {"nvidia", "amd"}
    fitting = [n for n in hardware_names() if words and words <= _words(n)]
    if len(fitting) > 1:
        raise PlanError(f"devices {text!r}: {name} could be {' or '.join(fitting)}; say which")
    return int(match[1]), load_hardware(fitting[0] if fitting else name)


def _words(name: str) -> set[str]:
    """Return what a name consists of, a size in gigabytes in one word."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+gi?b\b", r"\1gb", name.lower())))
