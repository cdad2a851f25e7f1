"""The page of a program in a real browser: no network, no errors, hover, zoom, folded layers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import torch
from browser import Browser
from stack import Stack, stack

import zerofx
from zerofx.ir.program import Planned
from zerofx.tools.views.recording import load_recording

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
PLAN = {"stage": 3, "kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
LAYERS = 96


def program(layers: int, **fields: object) -> Planned:
    with torch.device("meta"):
        model, x = Stack(layers), torch.zeros(8, 16)
    return zerofx.rewrite(zerofx.capture(model, (x,)), {**PLAN, **fields}, 4)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.running(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def run() -> tuple[Planned, Any]:
    """A program that has run, and a recording of it."""
    torch.manual_seed(0)
    model = zerofx.compile(Stack(), PLAN)
    with zerofx.record(model, memory=True) as recording:
        for _ in range(4):
            model(torch.randn(8, 16)).backward()
    return model.programs[0], recording


@pytest.fixture(scope="module")
def page(run: tuple[Planned, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a recording alone."""
    found, recording = run
    return found.view(tmp_path_factory.mktemp("page") / "page.html", recording=recording)


def place(chromium: Browser, name: str) -> tuple[int, int]:
    """Return the pixel in the middle of a bar."""
    x, y = chromium.run(
        "const bar = rows.flatMap((r) => r.bars || []).find((b) => b.name === "
        f"{name!r}), box = lanes.getBoundingClientRect(), f = bar.track.folding;"
        "return [box.left + (xOf(f.to(bar.from), lanes.clientWidth) + "
        "xOf(f.to(bar.to), lanes.clientWidth)) / 2, box.top + bar.y + ROW / 2];"
    )
    return round(x), round(y)


def said(chromium: Browser, what: str) -> str:
    text = chromium.run(f"return document.getElementById({what!r}).textContent")
    return str(text)


def soon(chromium: Browser, script: str, holds: Callable[[Any], bool]) -> Any:
    """Return what a script returns once that holds, or after 5 s: browsers tell pages later."""
    deadline = time.monotonic() + 5
    while not holds(found := chromium.run(script)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_opens_without_network_or_errors(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    assert chromium.errors() == []
    asked = chromium.requests()
    assert page.as_uri() in asked
    # chrome: and chrome-untrusted: are its own first tab
    assert {url.split(":")[0] for url in asked} <= {"file", "data", "chrome", "chrome-untrusted"}, (
        asked
    )
    facts = said(chromium, "facts")
    assert "peak memory per rank" in facts and "fits" in facts and "step, measured, rank 0" in facts
    filled = chromium.run(
        "return [lanes, memory].map((c) => new Set(new Uint32Array(c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data.buffer)).size)"
    )
    assert min(filled) > 5  # colours: something was drawn on both


HARM = """<!--<script>"'`</script><img src=x onerror=document.title='run'>"""


def hostile(what: Any) -> Any:
    """Return plain values with harmful texts in place of the names in them."""
    if isinstance(what, dict):
        names = ("name", "unit", "model", "device")
        return {k: f"{HARM}{v}" if k in names else hostile(v) for k, v in what.items()}
    return [hostile(each) for each in what] if isinstance(what, (list, tuple)) else what


def test_names_stay_text(chromium: Browser, run: tuple[Planned, Any], tmp_path: Path) -> None:
    """Names of modules, classes and spans run no script, and do not empty the page."""
    found, recording = run
    crafted = hostile(recording.to_dict()["recording"][0])
    crafted["identity"] = recording.to_dict()["recording"][0]["identity"]
    file = tmp_path / "recording.json"
    file.write_text(json.dumps({"recording": [crafted]}))
    page = found.view(tmp_path / "page.html", recording=load_recording(file), hardware="cpu-box")
    _sees_text_alone(chromium, page)
    model = torch.nn.Sequential()
    model.add_module(HARM.replace(".", ""), torch.nn.Linear(16, 16))
    model.__class__ = type(HARM, (torch.nn.Sequential,), {})
    program = zerofx.rewrite(zerofx.capture(model, (torch.zeros(8, 16),)), PLAN, 4)
    _sees_text_alone(chromium, program.view(tmp_path / "module.html"))


def _sees_text_alone(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    assert chromium.errors() == []
    tabs = chromium.run("return document.querySelectorAll('#tabs button').length")
    for k in range(tabs):
        chromium.run(f"document.querySelectorAll('#tabs button')[{k}].click()")
        assert chromium.run("return document.querySelectorAll('#panel tr, #panel div').length") > 0
    chromium.run("lanes.focus()")
    chromium.run("for (const bar of inOrder) goTo(bar)")
    assert chromium.run("return document.querySelectorAll('img, main script').length") == 0
    assert chromium.run("return document.title") != "run"
    assert "<script>" in chromium.run("return document.body.textContent")
    assert chromium.errors() == []


def test_hover_names_what_is_there(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    x, y = place(chromium, "forward region 2")
    chromium.hover(x, y)
    tip = said(chromium, "tip")
    assert "forward region 2" in tip and "f32[8, 16]" in tip and "stack.py:" in tip
    assert "median" in tip and not chromium.run("return tip.hidden")
    box = chromium.run("const b = memory.getBoundingClientRect(); return [b.left, b.top]")
    chromium.hover(x, round(box[1]) + 100)
    tip = said(chromium, "tip")
    assert "KiB at forward" in tip and "optimizer" in tip and "largest" in tip
    assert "measured, rank 0 (" in tip and "than predicted)" in tip
    chromium.hover(round(box[0]) + 5, 5)
    assert chromium.run("return tip.hidden")


def test_zoom_and_pan_change_the_axis(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    whole = chromium.run("return axis.to - axis.from")
    before = said(chromium, "range")
    x, y = place(chromium, "forward region 2")
    chromium.wheel(x, y, -800)
    zoomed = chromium.run("return [axis.from, axis.to]")
    assert zoomed[1] - zoomed[0] < 0.5 * whole and said(chromium, "range") != before
    again = place(chromium, "forward region 2")
    assert abs(again[0] - x) <= 3  # what is under the pointer stays there
    chromium.drag(x, y, 200)
    assert chromium.run("return axis.from") < zoomed[0]
    chromium.run("document.getElementById('fit').click()")
    assert said(chromium, "range") == before and chromium.errors() == []


def test_tabs(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(
        zerofx.rewrite(
            zerofx.capture(*stack()), {**PLAN, "activations": "auto", "memory_budget": 30000}, 2
        ).view(tmp_path / "page.html")
    )
    names = chromium.run("return [...tabs.children].map((b) => b.textContent)")
    assert names == ["Steps", "Passes", "Decisions"]
    shown = {}
    for k, name in enumerate(names):
        chromium.run(f"tabs.children[{k}].click()")
        shown[name] = said(chromium, "panel")
    assert "identical layers from layers." in shown["Steps"]
    assert "shard-parameters" in shown["Passes"] and "zfx.all_gather" in shown["Passes"]
    assert "keep gathered" in shown["Decisions"] and "one all-gather of" in shown["Decisions"]
    assert chromium.errors() == []


def test_legends_have_words(chromium: Browser, page: Path, tmp_path: Path) -> None:
    chromium.open(page)
    assert said(chromium, "kinds").startswith("forward computebackward compute")
    assert "than predicted)" in said(chromium, "legend")  # the line of what was measured
    assert "peak memory, measured, rank 0" in said(chromium, "facts")
    column = chromium.run(
        "const i = main.held.findIndex((n) => n > 0), f = main.folding;"
        "const x = xOf(f.to((main.times[i][0] + main.times[i][1]) / 2), memory.clientWidth);"
        "const g = memory.getContext('2d'), y = Math.round(yOf(main.held[i]));"
        "return [...g.getImageData(Math.round(x), y - 3, 1, 7).data]"
    )
    pixels = [sum(column[k : k + 3]) for k in range(0, len(column), 4)]
    assert min(pixels) < 250, pixels  # a dark line where it was measured
    chromium.open(zerofx.rewrite(zerofx.capture(*stack()), PLAN, 4).view(tmp_path / "page.html"))
    assert said(chromium, "verbs") == (
        "AG all-gatherRS reduce-scatterb3 bucket 3layer 3 mm unit and its most expensive operator"
        "+ 28 identical layers that are folded; click to open"
    )
    assert chromium.run("return document.getElementById('folded').offsetWidth") == 0
    chromium.run("fold.click()")
    assert chromium.run("return document.getElementById('folded').offsetWidth") > 0
    chromium.run("fold.click()")
    shown = chromium.run(
        "return [...new Set(D.tracks.flatMap((t) => t.bars).map((b) => b.kind))]"
        ".filter((k) => k !== 'region' && k !== 'transfer').map((k) => KINDS[k])"
    )
    assert shown and all(word in said(chromium, "kinds") for word in shown)
    assert chromium.run("return document.getElementById('under').offsetWidth") == 0  # one track


def test_keys_reach_everything(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.run("lanes.focus()")
    whole = chromium.run("return [axis.from, axis.to]")
    chromium.keys("+++")
    zoomed = chromium.run("return [axis.from, axis.to]")
    assert zoomed[1] - zoomed[0] < 0.5 * (whole[1] - whole[0])
    chromium.keys("\ue014")  # the right arrow
    assert chromium.run("return axis.from") > zoomed[0]
    chromium.keys("nn")
    assert chromium.run("return hovered === inOrder[1] && !tip.hidden")
    assert said(chromium, "tip").startswith(chromium.run("return inOrder[1].name"))
    chromium.keys("p\ue011")  # Home
    assert chromium.run("return [axis.from, axis.to]") == whole
    chromium.run("panel.querySelectorAll('tr.step')[3].focus()")
    chromium.keys("\ue007")  # Enter
    assert chromium.run("return axis.to - axis.from") < whole[1] and chromium.errors() == []


def test_dark_and_narrow(chromium: Browser, page: Path) -> None:
    """Its own style reaches the canvases, and nothing is wider than the window."""
    chromium.open(page)
    corner = (
        "const y = rows.find((r) => r.bars).y + 9;"
        "return [...lanes.getContext('2d').getImageData(lanes.width - 3, y, 1, 1).data]"
    )
    light = chromium.run(corner)
    try:
        chromium.prefer("dark")
        dark = soon(chromium, corner, lambda pixel: sum(pixel[:3]) < 200)
        ink = chromium.run("return getComputedStyle(document.body).color")
        assert sum(dark[:3]) < 200 < sum(light[:3]) and ink == "rgb(230, 235, 241)"
        chromium.resize(420, 900)
        wide = chromium.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]
    finally:
        chromium.prefer("light")
        chromium.resize(1400, 1000)
    assert all("getImageData" in error for error in chromium.errors())  # our own reading


def test_an_opened_layer_stays_in_sight(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(program(12).view(tmp_path / "page.html", passes=False))
    chromium.run("fold.click(); show(0, axis.length * 0.6); draw();")
    span = chromium.run("return axis.to - axis.from")
    x, y, t = chromium.run(
        "const c = main.folding.cuts[0], box = lanes.getBoundingClientRect();"
        "const x = box.left + xOf(main.folding.to((c.from + c.to) / 2), lanes.clientWidth);"
        "return [x, box.top + rows.find((r) => r.bars).y + 5, (c.from + c.to) / 2]"
    )
    chromium.click(round(x), round(y))
    assert chromium.run("return axis.to - axis.from") == pytest.approx(span)
    at = chromium.run(
        f"return lanes.getBoundingClientRect().left + xOf(main.folding.to({t}), lanes.clientWidth)"
    )
    assert abs(at - x) < 60  # what was clicked lies under the pointer still


def test_predicted_beside_measured(
    chromium: Browser, run: tuple[Planned, Any], tmp_path: Path
) -> None:
    program, recording = run
    chromium.open(
        program.view(tmp_path / "p.html", recording=recording, hardware="cpu-box", passes=False)
    )
    assert chromium.run("return main.name") == "measured, rank 0"
    chromium.run("[...tabs.children].find((t) => t.textContent.startsWith('Predicted')).click()")
    table = said(chromium, "panel")
    assert "largest differences first" in table and "peak memory" in table
    assert chromium.run("return panel.querySelectorAll('tbody tr').length === D.beside[0].length")
    with_line = said(chromium, "legend")
    chromium.run("choice.value = 0; choice.dispatchEvent(new Event('change'))")
    assert chromium.run("return main.name") == "predicted"
    assert "than predicted" in with_line and "than predicted" not in said(chromium, "legend")
    x, y = place(chromium, "forward region 2")  # of the prediction, which comes first
    chromium.hover(x, y)
    assert "measured, rank 0: " in said(chromium, "tip") and chromium.errors() == []


def test_many_layers(chromium: Browser, tmp_path: Path) -> None:
    """96 layers: under 5 MB, loaded within 2 s, folded, and opened by a click.

    Without the passes, which all would run again: what they changed is collapsed, and small.
    """
    path = program(LAYERS).view(tmp_path / "page.html", passes=False)
    assert path.stat().st_size < 5e6
    assert chromium.open(path) < 2.0
    folded = chromium.run("return axis.length")
    rows = chromium.run("return panel.querySelectorAll('tr').length")
    cut = chromium.run(
        "const c = main.folding.cuts[0], box = lanes.getBoundingClientRect();"
        "return [box.left + xOf(main.folding.to((c.from + c.to) / 2), lanes.clientWidth),"
        "box.top + rows.find((r) => r.bars).y + 5]"
    )
    x, y = map(round, cut)
    chromium.hover(x, y)
    assert "more layers like layers." in said(chromium, "tip")
    chromium.click(x, y)
    assert chromium.run("return axis.length") > 5 * folded
    chromium.run("panel.querySelector('tr.layer').click()")
    assert chromium.run("return panel.querySelectorAll('tr').length") > 5 * rows
    assert chromium.errors() == []


def test_labels_and_the_device_are_explained(chromium: Browser, tmp_path: Path) -> None:
    """Accumulated gradients name a step several times; a small device does not fit."""
    plan = {**PLAN, "offload": {"optimizer": "cpu"}, "persist_below": 0}
    found = zerofx.rewrite(zerofx.capture(*stack()), plan, 4)
    small = {"base": "cpu-box", "device_memory_bytes": 4096}
    hardware = tmp_path / "small.json"
    hardware.write_text(json.dumps(small))
    chromium.open(found.view(tmp_path / "page.html", hardware=hardware))
    assert "does not fit" in said(chromium, "facts") and "missing" in said(chromium, "facts")
    assert chromium.run("return document.querySelectorAll('#facts .bad').length") == 1
    chromium.run("goTo(inOrder.find((b) => / AG b1$/.test(b.name)))")
    assert "all-gather of bucket 1" in said(chromium, "tip")
    again = chromium.run("return nameInWords({ name: 'backward pack b2 (3)' })")
    assert again == "bucket 2, number 3 of this name in a step"
    used = chromium.run("return new Set(D.tracks.flatMap((t) => t.bars).map(colour)).size")
    kinds = chromium.run("return new Set(D.tracks.flatMap((t) => t.bars).map(toneOf)).size")
    assert used == kinds > 5 and chromium.errors() == []
