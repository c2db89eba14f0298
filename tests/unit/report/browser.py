"""A headless Chromium, offline, spoken to over its debugging protocol: opens a page, follows links, measures.

What the page logs, fails to run or asks the network for is kept, so that a test can say there was nothing of it.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
STARTS_S = 60
PROBLEMS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed")


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Browser:
    """One tab."""

    def __init__(self, socket):
        self._socket, self._id = socket, 0
        self.problems, self.requests = [], []
        for domain in ("Log", "Runtime", "Network", "Page"):
            self.send(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.send("Network.emulateNetworkConditions", **offline)

    def send(self, method, **params):
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": params}))
        return self._wait(lambda message: message.get("id") == self._id).get("result", {})

    def open(self, path: Path, width: int = 1280, fragment: str = ""):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        for url in ("about:blank", path.resolve().as_uri() + fragment):  # another fragment alone would load nothing
            self.send("Page.navigate", url=url)
            deadline = time.monotonic() + STARTS_S
            while self.run("location.href + ' ' + document.readyState") != f"{url} complete":
                assert time.monotonic() < deadline, f"{url} is not loaded after {STARTS_S} s"
                time.sleep(0.02)

    def run(self, script: str):
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, selector: str = "body"):
        box = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height} })()"
        )
        clip = {**box, "scale": 1}
        answer = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _wait(self, found):
        while True:
            message = json.loads(self._socket.recv(timeout=STARTS_S))
            assert "error" not in message, message
            if message.get("method") in PROBLEMS:
                self.problems.append(message)
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if found(message):
                return message


@contextmanager
def started(executable: str, profile: Path):
    """A browser with an empty profile, ended when done."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    command = [executable, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _port(profile / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=STARTS_S) as answer:
            url = next(t["webSocketDebuggerUrl"] for t in json.load(answer) if t["type"] == "page")
        with connect(url, max_size=None, proxy=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(timeout=STARTS_S)


def _port(file: Path, process: subprocess.Popen) -> int:
    deadline = time.monotonic() + STARTS_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        if file.exists() and (text := file.read_text()):
            return int(text.splitlines()[0])
        time.sleep(0.05)
    raise TimeoutError(f"no debugging port within {STARTS_S} s")
