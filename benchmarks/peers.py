"""Offload of other systems, around the same model; each has its own environment.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 deepspeed==0.19.8 torchao==0.18.0 ninja rich setuptools
    python -m benchmarks.offload --deepspeed-python peers/bin/python \
        --torchao-python peers/bin/python

The environment needs the same Python version as zerofx's (the training text is its
standard library) and no zerofx. DeepSpeed compiles its C++ parts (g++ and ninja) when it first
runs: DS_BUILD_OPS=0 at its installation, if pip tries then. To do that in advance, and after a
compilation that was killed (its lock stays: remove ~/.cache/torch_extensions), run

    PATH=$PWD/peers/bin:$PATH DS_ACCELERATOR=cpu peers/bin/python -c "
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder
    CPUAdamBuilder().load(), ShareMemCommBuilder().load()"
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import nn

PACKAGES = ("deepspeed", "torchao")
_VERSION = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"


def version(python: str, package: str) -> str:
    """Return the version of a package in an interpreter's environment.

    Raises:
        FileNotFoundError: there is no such interpreter.
        subprocess.CalledProcessError: it has no such package.
    """
    command = [python, "-c", _VERSION, package]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def deepspeed(model: nn.Module, lr: float) -> Any:
    """Return DeepSpeed's ZeRO-3 engine with parameters and states on the host.

    Made equal to the others: AdamW's hyperparameters are torch's (DeepSpeed's differ), there is no
    clipping (its default clips at 1), nothing stays gathered, and there is one thread.
    """
    # as its launcher would set them; its kernels are compiled by the ninja of its own environment
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": os.environ["LOCAL_WORLD_SIZE"],
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    import deepspeed  # type: ignore[import-not-found]

    adamw = {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, but used by nothing here
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
    }
    deepspeed.init_distributed("gloo")
    return deepspeed.initialize(model=model, config=config)[0]


def engine(model: Any) -> Any:
    """Return the object that steps a DeepSpeed engine and drops its gradients: the engine."""
    return model


def torchao(model: nn.Module, lr: float) -> Any:
    """Return torchao's optimizer over states on the host, for one process.

    Raises:
        AssertionError: there is no accelerator that it knows.
    """
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    return CPUOffloadOptimizer(model.parameters(), lr=lr, fused=True)
