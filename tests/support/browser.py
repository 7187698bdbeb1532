# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no library, no port."""

import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.support.programs import lacking

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """A context manager around one page as a phone shows it; every name but this machine's is unknown. Skips where no Chromium is.

    Args:
        width: of the screen, in CSS pixels.
        height: as ``width``.
    """

    def __init__(self, width: int, height: int) -> None:
        program = next((path for name in _NAMES if (path := shutil.which(name))), None)
        if program is None:
            lacking(f"needs a Chromium: one of {', '.join(_NAMES)}")
        self._size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        # The pipes' numbers in the browser are 3 and 4.
        line = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        command = ["bash", "-c", line, "bash", program, *_FLAGS, rules, f"--user-data-dir={self._folder.name}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the page reported, in order."""

    def __enter__(self) -> "Page":
        try:
            (target,) = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
            self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                self.call(f"{domain}.enable")
            self.call("Emulation.setDeviceMetricsOverride", **self._size)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def call(self, method: str, timeout_s: float = 30.0, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({} if self._session is None else {"sessionId": self._session})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
                more = os.read(self._read, 1 << 16) if ready else b""
                assert more, f"the browser did not answer {method}; exit code {self._process.poll()}"
                self._buffer += more
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str, done: Callable[[Any], bool] = bool, timeout_s: float = 30.0) -> Any:
        """The value of an expression once it is as wanted."""
        deadline = time.monotonic() + timeout_s
        while not done(value := self.run(script)):
            assert time.monotonic() < deadline, f"{script} stayed {value!r}"
            time.sleep(0.02)
        return value

    def type(self, element: str, text: str) -> None:
        """Type into an element, as keys of a person would: events of its own, and the policy of the page holds."""
        self.run(f"document.getElementById({element!r}).focus()")
        self.run(f"document.getElementById({element!r}).select()")
        self.call("Input.insertText", text=text)
        self.run(f"document.getElementById({element!r}).blur()")

    def tap(self, element: str) -> None:
        """Touch an element where it is on the screen; it must be there, and nothing above it."""
        box = f"document.getElementById({element!r})"
        self.run(f"{box}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y, is_seen = self.run(
            f"(() => {{ const r = {box}.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;"
            f" return [x, y, {box}.contains(document.elementFromPoint(x, y))]; }})()"
        )
        assert is_seen, f"{element} is covered or off the screen at {x}, {y}"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
