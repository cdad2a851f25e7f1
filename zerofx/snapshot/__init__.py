"""Snapshots: save a training run to a directory, and load it at any world size; in reading order:

saving.py, loading.py   the two calls, step by step
series.py               snapshots of several steps in one directory
spread.py               snapshots on the disks of several hosts, and how files get there
job.py                  a rank's part in both; generators and values in their saved form
rescue.py               what is saved by the ranks that survive the loss of one
files.py                the files on disk: how they are published, opened, and verified
held.py                 files that stay open while they are read; a read restarts if they were
                        replaced
state.py                the saved state of the model and the optimizer: tensors by name
dcp.py                  tensors to and from files through torch.distributed.checkpoint
whole_states.py         states of optimizers that step whole parameters
full_optimizer.py       an optimizer's full state in plain PyTorch's form, for `torch.save`
exporting.py            full weights as safetensors, for other programs
weights.py              from files of many formats directly into the shards
sources/                these formats: safetensors, torch.save, DeepSpeed, FSDP2, Megatron
"""

from zerofx.snapshot.exporting import export
from zerofx.snapshot.full_optimizer import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from zerofx.snapshot.loading import load, resume
from zerofx.snapshot.rescue import Rescue
from zerofx.snapshot.saving import save
from zerofx.snapshot.weights import load_weights

__all__ = [
    "Rescue",
    "export",
    "full_optimizer_state_dict",
    "load",
    "load_full_optimizer_state_dict",
    "load_weights",
    "resume",
    "save",
]
