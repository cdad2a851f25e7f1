"""Runtime of emitted modules: the engine's methods and the loading of regions."""

from zerofx.kernels import recurrent as recurrent  # registers the ops that regions call
from zerofx.runtime.regions.load import constant, load_constants, load_kernels, load_regions
from zerofx.runtime.standalone import run_standalone

__all__ = ["constant", "load_constants", "load_kernels", "load_regions", "run_standalone"]
