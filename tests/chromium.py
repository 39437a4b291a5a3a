"""A headless Chromium without a network, led through its debugging pipe: what a page asks for, says and looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# Chromium takes its orders from descriptor 3 and answers on 4.
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"


def find() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, orders: int, answers: int) -> None:
        self.orders, self.answers = orders, answers
        self.count, self.session, self.rest = 0, "", b""
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        self.ask("Page.enable")
        self.ask("Network.enable")
        self.ask(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One order and its answer; requests that the page makes meanwhile are noted."""
        self.count += 1
        order = {"id": self.count, "method": method, "params": parameters}
        os.write(
            self.orders,
            json.dumps(
                order | ({"sessionId": self.session} if self.session else {})
            ).encode()
            + b"\0",
        )
        while True:
            while b"\0" not in self.rest:
                got = os.read(self.answers, 1 << 20)
                if not got:
                    raise EOFError("Chromium has ended")
                self.rest += got
            text, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def run(self, script: str) -> Any:
        """The value of a script, awaited."""
        answer = self.ask(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(
        self,
        address: str,
        scheme: str = "light",
        width: int = 1280,
        height: int = 900,
    ) -> None:
        """Until the page says that it is ready."""
        self.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=address)
        ready = f"location.href === {json.dumps(address)} && document.documentElement?.dataset.ready"
        end = time.monotonic() + 120
        while not self._there(ready):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{address} is not ready: {self.run('document.documentElement.dataset.errors')}"
                )
            time.sleep(0.05)

    def _there(self, script: str) -> bool:
        try:
            return bool(self.run(script))
        except RuntimeError:  # between two pages
            return False

    def picture(self, path: Path) -> Path:
        """What is seen of it."""
        path.write_bytes(
            base64.b64decode(self.ask("Page.captureScreenshot")["data"])
        )
        return path


@contextmanager
def browse(program: str, profile: Path) -> Iterator[Page]:
    """A browser with one tab, ended at the end."""
    pipes = [*os.pipe(), *os.pipe()]
    theirs, orders, answers, back = (
        fcntl(end, F_DUPFD, 10) for end in pipes
    )  # clear of the descriptors 3 and 4
    for end in pipes:
        os.close(end)
    command = [
        sys.executable,
        "-c",
        START,
        str(theirs),
        str(back),
        program,
        *FLAGS,
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs, back),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(back)
    try:
        yield Page(orders, answers)
    finally:
        os.close(orders)  # which ends it
        os.close(answers)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
