"""Saving a training run to a directory and loading it at any world size, in reading order:

saving.py, loading.py   the two calls, step by step
series.py               snapshots of several steps side by side
job.py                  a rank's part in either; generators and values as they are saved
files.py                what lies on disk, how it is published, opened, and proved whole
held.py                 files that stay open while they are read; a read that starts again if they
                        were replaced
state.py                what is saved of the model and the optimizer: tensors by name
dcp.py                  tensors to files and back through torch.distributed.checkpoint
whole_states.py         states of optimizers that step whole parameters
full_optimizer.py       an optimizer's whole state in plain PyTorch's form, for `torch.save`
exporting.py            full weights as safetensors, for others
weights.py              from files of many formats straight into the shards
sources/                these formats: safetensors, torch.save, DeepSpeed, FSDP2, Megatron
"""

from zerofx.snapshot.exporting import export
from zerofx.snapshot.full_optimizer import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from zerofx.snapshot.loading import load, resume
from zerofx.snapshot.saving import save
from zerofx.snapshot.weights import load_weights

__all__ = [
    "export",
    "full_optimizer_state_dict",
    "load",
    "load_full_optimizer_state_dict",
    "load_weights",
    "resume",
    "save",
]
