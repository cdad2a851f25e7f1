"""A real browser for tests: headless Chromium, driven by chromedriver's HTTP interface alone."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--window-size=1400,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
)  # fmt: skip


class Browser:
    """One tab. Positions are pixels of the window."""

    def __init__(self, port: int, profile: Path) -> None:
        self._at = f"http://127.0.0.1:{port}/session"
        wanted = {
            "goog:chromeOptions": {"args": [*OPTIONS, f"--user-data-dir={profile}"]},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._at += "/" + self._post("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._at + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]

    def open(self, path: Path) -> float:
        """Open a file; return how many seconds it took to load."""
        began = time.monotonic()
        self._post("/url", {"url": path.resolve().as_uri()})
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """Run a script's body in the page; return what it returns."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def pointer(self, *steps: dict[str, Any]) -> None:
        """Move the pointer and press: steps of a WebDriver pointer."""
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self._post("/actions", {"actions": [{**mouse, "actions": list(steps)}]})

    def move(self, x: int, y: int) -> dict[str, Any]:
        return {"type": "pointerMove", "x": x, "y": y, "duration": 0, "origin": "viewport"}

    def hover(self, x: int, y: int) -> None:
        self.pointer(self.move(x, y))

    def click(self, x: int, y: int) -> None:
        press, lift = ({"type": f"pointer{what}", "button": 0} for what in ("Down", "Up"))
        self.pointer(self.move(x, y), press, lift)

    def drag(self, x: int, y: int, by: int) -> None:
        press, lift = ({"type": f"pointer{what}", "button": 0} for what in ("Down", "Up"))
        self.pointer(self.move(x, y), press, self.move(x + by, y), lift)

    def wheel(self, x: int, y: int, by: int) -> None:
        turn = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": by, "duration": 0}
        self._post("/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [turn]}]})

    def keys(self, pressed: str) -> None:
        """Press keys, one after another, where the focus is."""
        steps = [{"type": f"key{what}", "value": key} for key in pressed for what in ("Down", "Up")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def prefer(self, style: str) -> None:
        """Let pages know that the user prefers "light" or "dark"."""
        wanted = [{"name": "prefers-color-scheme", "value": style}]
        what = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": wanted}}
        self._post("/goog/cdp/execute", what)
        self.run("return new Promise((done) => requestAnimationFrame(() => done()))")

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        self._post("/window/rect", {"width": width, "height": height})

    def errors(self) -> list[str]:
        """Return what the console was told since it was last asked."""
        return [line["message"] for line in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        found = []
        for line in self._post("/se/log", {"type": "performance"}):
            message = json.loads(line["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def picture(self, path: Path) -> None:
        """Write what is to be seen as a PNG file."""
        with urllib.request.urlopen(f"{self._at}/screenshot", timeout=60) as reply:
            path.write_bytes(base64.b64decode(json.load(reply)["value"]))

    def close(self) -> None:
        request = urllib.request.Request(self._at, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()


def missing() -> str:
    """Say what is not installed here, or nothing."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)}: Debian's chromium and chromium-driver" if absent else ""


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Browser]:
    """Run a browser whose profile is in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder / "chromedriver.log").open("wb")
    command = ["chromedriver", f"--port={port}"]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as driver:
        try:
            _await(port)
            found = Browser(port, folder / "profile")
            try:
                yield found
            finally:
                found.close()  # else the browser outlives its driver
        finally:
            driver.terminate()


def _await(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
            return
        time.sleep(0.05)
    pytest.fail("chromedriver did not start within 10 s")
