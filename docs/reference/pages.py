"""Pages of the site that are made from code when it is built, and links into the repository.

Run by mkdocs (`hooks` in mkdocs.yml). The reference of the plan, the command line and the Python
API comes from the code itself. Pages link to files outside docs/ (examples, tests): on the site
each of these becomes a page that shows the file.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402

import zerofx  # noqa: E402
from zerofx.plan.parts import LossScale, Parallel  # noqa: E402
from zerofx.tools.cli import app  # noqa: E402
from zerofx.tools.cli.app import EXAMPLES  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown", ".txt": ""}


# -- The plan --------------------------------------------------------------------------------------


def texts(kind: type) -> dict[str, str]:
    """Return what a class's docstring says of each of its fields."""
    known = {f.name for f in dataclasses.fields(kind)}
    found: dict[str, str] = {}
    names: list[str] = []  # which fields the lines are about
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        begun = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if begun and known.issuperset(begun[1].split(", ")):
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif line.startswith(" "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def default(value: Any) -> str:
    """Return a field's default as a user writes it."""
    if value is dataclasses.MISSING:
        return ""
    return f"`{value!r}`".replace("'", '"').replace("|", "\\|")


def fields_of(kind: type) -> str:
    said = texts(kind)
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        meaning = said.get(field.name, "").replace("|", "\\|")
        rows.append(f"| `{field.name}` | {default(field.default)} | {meaning} |")
    return "\n".join(rows) + "\n"


def plan_page() -> str:
    parts = [
        "# Plan\n",
        "A plan is given as `zerofx.Plan(stage=2)`, as a dict, or as a YAML or JSON file. On the "
        'command line use `--plan plan.yaml` and `--set "offload={optimizer: cpu}"`. Fields that '
        "exclude each other raise a `PlanError` that names both.\n",
        fields_of(zerofx.Plan),
    ]
    kinds = {
        "precision": zerofx.Precision,
        "precision.loss_scale": LossScale,
        "offload": zerofx.Offload,
        "parallel": Parallel,
    }
    for name, kind in kinds.items():
        parts += [
            f"## {name}\n",
            f"`zerofx.plan.parts.{kind.__name__}`, or a dict of its fields.\n",
        ]
        parts.append(fields_of(kind))
    return "\n".join(parts)


# -- The command line ------------------------------------------------------------------------------


def cli_page() -> str:
    """Return every command with its arguments and options, as `--help` has them."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="zerofx")
    lines = ["# Command line\n", f"{group.help}\n"]
    lines.append(
        "A model is named by `package.module:function`, `file.py:function` or `hf:path`. The "
        "function returns `(module, args, kwargs)`; `hf:` takes a config of transformers.\n"
    )
    for name, command in group.commands.items():
        lines += [f"## zerofx {name}\n", f"{command.help or ''}\n"]
        rows = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            record = parameter.get_help_record(context)
            left, right = record or (parameter.human_readable_name, getattr(parameter, "help", ""))
            meaning = right.replace("<", "&lt;").replace("|", "\\|")
            rows.append(f"| `{left}` | {meaning} |")
        if rows:
            lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
        if EXAMPLES.get(name):
            lines += ["```", *EXAMPLES[name], "```", ""]
    return "\n".join(lines)


# -- The Python API --------------------------------------------------------------------------------

SECTIONS = {
    "Compile and train": ["compile", "CompiledModule", "whole", "full_tensor", "Preemption"],
    "Save and load": [
        "save", "load", "resume", "Rescue", "export", "load_weights", "full_state_dict",
        "iter_state_dict", "full_optimizer_state_dict",
        "load_full_optimizer_state_dict",
    ],
    "The compiler as a library": ["rewrite", "load_program"],
    "Predict, search and measure": ["predict", "search", "record", "meter", "progress"],
    "Hardware": ["Hardware"],
}  # fmt: skip
ELSEWHERE = {"Plan", "Precision", "Offload", "Machine", "capture", "nvme", "optim"}
# Of a compiled model what zerofx adds; all else is the model's own.
MEMBERS = {
    "CompiledModule": ["adopt", "no_sync", "refresh", "state_dict", "sharded_state_dict"],
    "Namespace": [
        "plan", "world", "data_rank", "data_world", "device", "layout", "programs", "kernels",
        "islands", "loss_scale", "dropped_tokens", "units", "casts", "adopt", "no_sync", "refresh",
        "sharded_state_dict",
    ],
    "Rescue": ["note"],
}  # fmt: skip


def entry(place: str, heading: str) -> str:
    """Return the directive that mkdocstrings replaces by the reference of an object."""
    lines = [
        f"::: {place}",
        "    options:",
        f"      heading: {heading}",
        f"      toc_label: {heading}",
    ]
    if heading.rpartition(".")[2] in MEMBERS:
        lines.append(f"      members: {MEMBERS[heading.rpartition('.')[2]]}")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    listed = {name for names in SECTIONS.values() for name in names}
    missing = set(zerofx.__all__) - listed - ELSEWHERE
    assert not missing, f"give these names a section: {sorted(missing)}"
    lines = [
        "# Python API\n",
        "What `import zerofx` offers. [Plan](plan.md) has the fields of a plan, "
        "[Errors](../errors.md) what is raised.\n",
    ]
    for title, names in SECTIONS.items():
        lines.append(f"## {title}\n")
        lines += [entry(home(name), f"zerofx.{name}") for name in names]
        if title == "The compiler as a library":
            lines.append(entry("zerofx.capture.capture.capture", "zerofx.capture"))
            lines.append(entry("zerofx.ir.program.Planned", "Planned"))
    lines += ["## model.zerofx\n", "What zerofx adds to a model is in one attribute.\n"]
    lines += [entry("zerofx.model.namespace.Namespace", "Namespace"), "## Optimizers\n"]
    lines.append(
        "Signatures and states are those of `torch.optim`; `max_grad_norm` clips within the step.\n"
    )
    lines += [entry(home(f"optim.{name}"), f"zerofx.optim.{name}") for name in zerofx.optim.__all__]
    lines += ["## Disk\n", "Tensors to and from files, without a compiled model.\n"]
    names = [name for name in zerofx.nvme.__all__ if name != "NvmeError"]
    lines += [entry(home(f"nvme.{name}"), f"zerofx.nvme.{name}") for name in names]
    return "\n".join(lines)


def home(name: str) -> str:
    """Return the dotted path of the module that a public name comes from."""
    value = operator.attrgetter(name)(zerofx)
    return f"{value.__module__}.{value.__qualname__}"


# -- mkdocs ----------------------------------------------------------------------------------------


def overview() -> str:
    """Return README.md as the site's first page, with its links as docs/ has them."""
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((examples|tests)", r"](../\1", text)


def changelog() -> str:
    """Return CHANGELOG.md, with its links as docs/ has them."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((examples|tests|benchmarks)", r"](../\1", text)


MADE = {
    "index.md": overview,
    "changelog.md": changelog,
    "reference/plan.md": plan_page,
    "reference/cli.md": cli_page,
    "reference/api.md": api_page,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and one for each file that pages link to."""
    from mkdocs.structure.files import File

    made = {name: make() for name, make in MADE.items()}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    pages = [f for f in files.documentation_pages() if f.src_uri not in made]
    linked = {t for f in pages for t in outside(f.content_string, f.src_uri)}
    linked |= outside(made["index.md"], "index.md")
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=source(path)))
    return files


def outside(text: str, uri: str) -> set[str]:
    """Return the files of the repository outside docs/ that a page links to."""
    folder = posixpath.dirname(f"docs/{uri}")
    targets = re.findall(r"\]\((\.\.[^)#\s]*)", text)
    found = {posixpath.normpath(posixpath.join(folder, target)) for target in targets}
    return {path for path in found if not path.startswith("docs/")}


def source(path: str) -> str:
    place = ROOT / path
    if place.is_dir():
        names = sorted(p.name for p in place.iterdir() if not p.name.startswith((".", "_")))
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = LANGUAGES.get(place.suffix, "")
    return f"# {path}\n\n````{language}\n{place.read_text('utf-8').rstrip()}\n````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/ into links to their pages."""
    uri = page.file.src_uri
    folder = posixpath.dirname(f"docs/{uri}")

    def to_page(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if path.startswith("docs/"):
            return match[0]
        there = posixpath.relpath(f"docs/source/{path}.md", folder)
        return f"]({there}{match[2] or ''})"

    return re.sub(r"\]\((\.\.[^)#\s]*)(#[^)\s]*)?\)", to_page, markdown)
