"""A headless Chromium driven over the DevTools protocol through a pair of pipes: no driver, no client library."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)

_LAUNCH = "import os, sys; a = sys.argv[1:]; os.dup2(int(a[0]), 3); os.dup2(int(a[1]), 4); os.execv(a[2], a[2:])"


def executable() -> str | None:
    """Path of an installed Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page.

    Attributes:
        errors: what the page complained of: exceptions, console errors, failed loads, refused policies.
        requests: addresses that the page asked for, the page itself included.
    """

    def __init__(self, folder: Path, *, width: int = 1440, height: int = 1000) -> None:
        path = executable()
        assert path is not None
        # Chromium reads commands from descriptor 3 and writes to 4; higher numbers cannot collide with these.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        command = [path, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        launch = [sys.executable, "-c", _LAUNCH, *map(str, high), *command]
        self._process = subprocess.Popen(
            launch, pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in high:
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(60)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, address: str) -> None:
        """Loads a page and waits for it."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Waits until a JavaScript expression is true."""
        self._until(lambda: bool(self.run(condition)), condition, seconds)

    def frames(self, count: int = 2) -> None:
        """Waits until the page has drawn that many frames."""
        step = "const step = () => n-- ? requestAnimationFrame(step) : done(1); step();"
        self.run(f"new Promise(done => {{ let n = {count}; {step} }})")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Presses and releases the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str, text: str = "") -> None:
        """Presses and releases a key."""
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        """Writes what can be seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def _until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        stop = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < stop, f"{what}: not within {seconds} s"
            time.sleep(0.02)

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], seconds)
            assert ready, f"Chromium says nothing for {seconds} s"
            piece = os.read(self._in, 1 << 16)
            assert piece, "Chromium went away"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        method = event.get("method")
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
