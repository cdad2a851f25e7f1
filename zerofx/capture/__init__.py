"""Capture: nn.Module -> Program (graphs with roles), and the key of a call."""

from zerofx.capture.capture import capture
from zerofx.capture.signature import ModelState, Signature, describe_difference, signature_key
from zerofx.capture.units import find_unit_of_module, find_units

__all__ = [
    "ModelState",
    "Signature",
    "capture",
    "describe_difference",
    "find_unit_of_module",
    "find_units",
    "signature_key",
]
