"""Options that commands share: a model, the ranks, the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RANKS = 2  # to plan for where nothing is said

Model = Annotated[str, typer.Argument(help="package.module:function, file.py:function or hf:path")]
World = Annotated[int | None, typer.Option("--world", min=1, help="ranks to plan for [default: 2]")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="YAML or JSON file of plan fields")]
Stage = Annotated[int | None, typer.Option("--stage", help="ZeRO stage, over the plan's")]
Set = Annotated[list[str] | None, typer.Option("--set", help="plan field: key=value; repeatable")]
HardwareName = Annotated[
    str | None,
    typer.Option("--hardware", "--machine", help="preset or file: dgx-h100 [default: cpu-box]"),
]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="hardware to plan for, without times")
]
Basis = Annotated[
    str,
    typer.Option(
        "--basis", help="memory of regions: aten (op by op) or compiled (compiles what is missing)"
    ),
]
KeepsResults = Annotated[
    bool, typer.Option("--keep-results/--loss-only", help="what the loop holds until step()")
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="batch size of an hf: model's call")]
Seq = Annotated[int, typer.Option("--seq", min=1, help="sequence length of an hf: model's call")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
