"""Hardware: node types and their networks as data; each figure has a source."""

from zerofx.hardware.curve import Curve
from zerofx.hardware.description import (
    DEFAULT,
    Hardware,
    default_hardware,
    hardware_for,
    hardware_names,
    load_hardware,
    write_hardware,
)

Machine = Hardware  # its former name

__all__ = [
    "DEFAULT",
    "Curve",
    "Hardware",
    "Machine",
    "default_hardware",
    "hardware_for",
    "hardware_names",
    "load_hardware",
    "write_hardware",
]
