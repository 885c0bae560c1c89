"""A headless Chromium, driven by the plain HTTP of the WebDriver protocol (W3C, WebDriver 2)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-first-run", "--no-default-browser-check", "--window-size=1400,1000"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which the protocol hands out an element (WebDriver 2, section 12.2)."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def why_not() -> str | None:
    """The reason for a skip where the browser or its driver is missing."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: chromium-driver)" if missing else None


class Browser:
    """One session; elements are named by CSS selectors."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path) -> None:
        _call("POST", f"{self._session}/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a function body in the page."""
        return self._call("execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        self._call(f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call(f"element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Real key presses, on whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def emulate(self, **feature: str) -> None:
        """Set a media feature such as prefers-color-scheme through the DevTools protocol."""
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in feature.items()]
        params = {"media": "", "features": features}
        self._call("goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": params})

    def resize(self, width: int) -> None:
        """Make the window so wide, in pixels."""
        params = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": params}
        self._call("goog/cdp/execute", command)

    def problems(self) -> list[str]:
        """What the page wrote to the console as an error, and requests that failed."""
        rows = self._call("se/log", {"type": "browser"})
        return [row["message"] for row in rows if row["level"] == "SEVERE"]

    def _find(self, selector: str) -> str:
        found = self._call("element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _call(self, command: str, body: dict[str, Any]) -> Any:
        return _call("POST", f"{self._session}/{command}", body)


@contextmanager
def browser() -> Iterator[Browser]:
    """A driver on a free port, a session in it; both end with the block."""
    command = [shutil.which("chromedriver") or "chromedriver", "--port=0"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = f"http://127.0.0.1:{_port(driver)}"
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": FLAGS},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        body = {"capabilities": {"alwaysMatch": capabilities}}
        session = _call("POST", f"{address}/session", body)["sessionId"]
        yield Browser(f"{address}/session/{session}")
        _call("DELETE", f"{address}/session/{session}", None)
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        if driver.stdout is not None:
            driver.stdout.close()


def _port(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if match := re.search(r"started successfully on port (\d+)", line):
            return int(match[1])
    raise RuntimeError("chromedriver ended before it named its port")


def _call(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with _DIRECT.open(request, timeout=60) as answer:
        return json.load(answer)["value"]
