"""Drive a headless Chromium through its debugging pipe, without a driver or a library.

Chromium reads commands from file descriptor 3, and writes answers and events to 4. Each is a JSON object that ends in a
zero byte (https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE = 120.0  # seconds, for one answer on a busy machine


class Browser:
    """A page in Chromium.

    `problems` are errors of its scripts and console, and `requests` the addresses that it requested.
    """

    def __init__(self, *, width: int = 1200, dark: bool = False) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp()
        self._buffer = b""
        self._last = 0
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Copies above 4, so that neither is overwritten before it has become 3 or 4.
        high = [os.dup(fd) if fd > 4 else os.dup(os.dup(os.dup(fd))) for fd in (commands, answers)]
        self._process = os.posix_spawn(
            str(EXECUTABLE),
            [str(EXECUTABLE), *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),  # it logs errors on a machine without a desktop
                *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in zip((3, 4), high, strict=True)),
            ],
            setpgroup=0,
        )
        for fd in (commands, answers, *high):
            os.close(fd)
        try:
            self._attach()
            self.resize(width)
            self.set_dark(dark)
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        """Find the page, and enable the events that `_note` reads."""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End Chromium and everything that it started."""
        os.close(self._to)
        os.close(self._from)
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        shutil.rmtree(self._profile, ignore_errors=True)

    def resize(self, width: int, height: int = 900, *, scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels. `scale` is the number of screenshot pixels for each of them."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def set_dark(self, dark: bool) -> None:
        """Set `prefers-color-scheme`."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path) -> None:
        """Open a file, and return when it has loaded."""
        if error := self.call("Page.navigate", url=path.resolve().as_uri()).get("errorText"):
            raise RuntimeError(f"{path}: {error}")
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it returns.

        Raises:
            RuntimeError: the expression throws.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Return as soon as the expression is true.

        Raises:
            TimeoutError: it does not become true.
        """
        end = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Scroll to the first element that matches, and click its centre with the mouse."""
        x, y = self._centre(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Scroll to the first element that matches, and move the mouse to its centre."""
        x, y = self._centre(selector)
        for step in (3, 2, 1, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)

    def press(self, key: str, code: int) -> None:
        """Press a key in the focused element, given by its name and its Windows key code."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def _centre(self, selector: str) -> tuple[float, float]:
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
        )
        return float(x), float(y)

    def screenshot(self, path: Path, clip: dict[str, float] | None = None, quality: int = 80) -> None:
        """Write a screenshot of the window, or a part of it. The suffix is .png or .webp."""
        kind: dict[str, Any] = {"format": path.suffix[1:]}
        if kind["format"] == "webp":
            kind["quality"] = quality
        area = {} if clip is None else {"clip": {"scale": 1, **clip}}
        data = self.call("Page.captureScreenshot", **kind, **area)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command for the page."""
        return self._call(method, session=self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE)
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("Chromium does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
