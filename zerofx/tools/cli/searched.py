"""Search for the fastest plans that fit some hardware, and write one to a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import (
    KNOW,
    RANKS,
    Batch,
    HardwareName,
    Json,
    Model,
    PlanFile,
    Seq,
    Set,
    Stage,
    World,
    command,
    done,
    say,
)
from zerofx.tools.cli.programs import (
    YAML,
    check_output,
    hardware_of,
    plan_of,
    print_text,
    show,
    with_fields,
)

if TYPE_CHECKING:
    from zerofx.hardware import Hardware

Tokens = Annotated[
    int | None,
    typer.Option("--batch-tokens", min=1, help="Tokens per step, of all ranks together."),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        help=r"Samples per step, of all ranks together. \[default: the example call on each rank]",
    ),
]
Nvme = Annotated[str, typer.Option("--nvme", help="Folder that plans use for the nvme tier.")]


@command(
    KNOW,
    "zerofx search zerofx.tools.demo.targets:byte_gpt --hardware dgx-h100 --world 8",
    "zerofx search hf:path/to/config --hardware dgx-h100 --world 64 --batch-tokens 4194304",
)
def search(
    model: Model, hardware: HardwareName = None, world: World = None, batch_tokens: Tokens = None,
    global_batch: Samples = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    batch: Batch = 1, seq: Seq = 128, nvme: Nvme = "/nvme", as_json: Json = False,
) -> None:  # fmt: skip
    """Find the fastest plans that fit; fields of --plan, --stage and --set stay as given."""
    from zerofx.tools.search import search as searched

    view = searched(
        model, hardware=hardware_of(hardware), world_size=world or RANKS,
        global_samples=global_batch, batch_tokens=batch_tokens, plan=_settled(plan, stage, set_),
        batch=batch, seq=seq, nvme=nvme, says=say,
    )  # fmt: skip
    show(view, as_json)


@command(
    KNOW,
    "zerofx plan-for '8x H100' --target zerofx.tools.demo.targets:byte_gpt --out plan.yaml",
    "zerofx plan-for --from ds_config.json --auto bf16=true --out plan.yaml",
)
def plan_for(
    devices: Annotated[
        str | None, typer.Argument(help='Number and kind of devices: "8x H100", "512x V100".')
    ] = None,
    model: Annotated[
        str | None, typer.Option("--target", help="Model, as for the other commands.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=r"YAML file to write. \[default: print the plan]")
    ] = None,
    batch_tokens: Tokens = None, global_batch: Samples = None, plan: PlanFile = None,
    stage: Stage = None, set_: Set = None, batch: Batch = 1, seq: Seq = 128, nvme: Nvme = "/nvme",
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="ds_config.json to translate, with a report on every key."),
    ] = None,
    auto: Annotated[
        list[str] | None,
        typer.Option(
            "--auto", help="With --from: value of an \"auto\" key: learning_rate=3e-5; repeatable."
        ),
    ] = None,
) -> None:  # fmt: skip
    """Write the fastest plan that fits, or that of a ds_config, as YAML for zerofx.compile."""
    check_output("--out", out, YAML)
    if from_ is not None:
        if (devices, model, plan) != (None, None, None):
            raise PlanError(
                "plan-for --from translates a file, without a search. Leave out the devices, "
                "--target and --plan."
            )
        fields = [*(set_ or []), *([] if stage is None else [f"stage={stage}"])]
        _write_translated(from_, auto, out, fields)
        return
    if devices is None or model is None:
        raise PlanError(
            'plan-for has nothing to plan for. Give devices ("8x H100") and --target MODEL, or '
            "--from ds_config.json."
        )
    from zerofx.tools.search import search as searched

    world, hardware = read_devices(devices)
    view = searched(
        model, hardware=hardware, world_size=world, global_samples=global_batch,
        batch_tokens=batch_tokens, plan=_settled(plan, stage, set_), batch=batch, seq=seq,
        nvme=nvme, says=say,
    )  # fmt: skip
    done()
    for note in view.notes:
        typer.echo(note, err=True)
    if out is None:
        typer.echo(view.to_yaml(), nl=False)
        return
    _write(out, view.to_yaml())
    typer.echo(f"{out}: {view.best.choice.words()}")


def _write_translated(
    source: Path, auto: list[str] | None, out: Path | None, fields: list[str]
) -> None:
    """Write the plan of a ds_config as YAML, after a report on every key."""
    from zerofx.plan.ds_config import read_ds_config
    from zerofx.plan.fields import read_value

    values = dict(text.partition("=")[::2] for text in auto or [])
    given = {k.strip(): read_value(v, f"--auto {k}={v}") for k, v in values.items()}
    found = read_ds_config(source, auto=given or None)
    plan = with_fields(found.plan, "--set", fields)
    if out is None:
        typer.echo("".join(f"# {line}\n" for line in str(found).splitlines()), nl=False)
        typer.echo(plan.to_yaml(), nl=False)
        return
    _write(out, plan.to_yaml())
    print_text(f"{found}\n{out}: {plan}")


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"--out {out} cannot be written: {error.strerror}. Choose another path."
        ) from error


def _settled(file: Path | None, stage: int | None, fields: list[str] | None) -> dict[str, Any]:
    """Return the plan fields that were given, including those with their default value."""
    from zerofx.plan.fields import load_mapping

    chosen = plan_of(file, stage, fields).to_dict()
    names = list(load_mapping(file, "plan")) if file else []
    names += [text.partition("=")[0].strip() for text in fields or []]
    names += ["stage"] if stage is not None else []
    return {name: chosen[name] for name in names}


# -- Parse a number of devices and their name, such as `8x H100` -----------------------------------


_DEVICES = re.compile(r"\s*(\d+)\s*[x×*]?\s*([A-Za-z].*?)\s*")


def read_devices(text: str) -> tuple[int, Hardware]:
    """Return (ranks, hardware) of text such as `8x H100`, `16 x A100 80GB` or `512x V100-32GB`.

    Raises:
        PlanError: the text has another form, or the name fits no preset or several.
    """
    from zerofx.hardware import hardware_names, load_hardware

    match = _DEVICES.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise PlanError(
            f'devices {text!r} cannot be parsed. Write a number and a name, such as "8x H100". '
            f"Known names are {', '.join(hardware_names())}."
        )
    name = match[2]
    if name in hardware_names() or name.endswith((".yaml", ".yml", ".json")):
        return int(match[1]), load_hardware(name)
    words = _words(name) - {"nvidia", "amd"}
    fitting = [n for n in hardware_names() if words and words <= _words(n)]
    if len(fitting) > 1:
        raise PlanError(
            f"devices {text!r} are ambiguous. {name} is {' or '.join(fitting)}. Write one of them."
        )
    return int(match[1]), load_hardware(fitting[0] if fitting else name)


def _words(name: str) -> set[str]:
    """Return the words of a name; a size in gigabytes is one word."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+gi?b\b", r"\1gb", name.lower())))
