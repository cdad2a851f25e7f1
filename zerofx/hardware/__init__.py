"""Hardware: node types and their networks as data, each figure with its source."""

from zerofx.hardware.curve import Curve
from zerofx.hardware.description import Hardware
from zerofx.hardware.files import hardware_names, load_hardware, write_hardware

__all__ = ["Curve", "Hardware", "hardware_names", "load_hardware", "write_hardware"]
