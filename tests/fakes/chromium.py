"""A headless Chromium that sees only loopback, driven over its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",  # the suite may run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
SHIFT = 8


class Page:
    """One tab. `faults` are its uncaught exceptions, console errors and policy violations."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.faults: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        call_id = next(self._ids)
        self._socket.send(json.dumps({"id": call_id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == call_id:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline_s, f"{expression}\n{self.text('body')}"
            time.sleep(0.05)

    def open(self, url: str, ready: str = "#key") -> None:
        self.call("Page.navigate", url=url)
        selector = json.dumps(ready)
        self.wait_for(f"document.readyState === 'complete' && !!document.querySelector({selector})")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def use_dark_mode(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.faults.append(json.dumps(params["args"]))
            # Chromium logs every answer of 400 and above: tests that ask for one look themselves.
            case "Log.entryAdded" if params["entry"]["source"] != "network":
                if params["entry"]["level"] in ("error", "warning"):
                    self.faults.append(json.dumps(params["entry"]))


class Chromium:
    def __init__(self, devtools_url: str) -> None:
        self._devtools_url = devtools_url

    @contextmanager
    def page(self) -> Iterator[Page]:
        with httpx.Client(base_url=self._devtools_url, trust_env=False) as http:
            tab = http.put("/json/new?about:blank").raise_for_status().json()
            with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
                yield Page(socket)
            http.get(f"/json/close/{tab['id']}")


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """`profile` is an empty folder of its own."""
    assert CHROMIUM is not None
    with subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            port_file = profile / "DevToolsActivePort"
            deadline_s = time.monotonic() + 60
            while not (port_file.exists() and "\n" in port_file.read_text()):
                assert process.poll() is None, "chromium ended before it listened"
                assert time.monotonic() < deadline_s, "chromium did not listen within 60 s"
                time.sleep(0.05)
            yield Chromium(f"http://127.0.0.1:{port_file.read_text().split()[0]}")
        finally:
            process.terminate()
