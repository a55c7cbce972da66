"""Headless Chromium over its own pipe (DevTools protocol): what a page asked for, complained of, and how it looks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
INSIDE = 'e.closest(".scroll, pre, svg, details:not([open])")'
PAST = f"e.getClientRects().length && !{INSIDE} && e.getBoundingClientRect().right > innerWidth + 0.5"
BEYOND = f'[...document.querySelectorAll("body *")].filter(e => {PAST}).map(e => e.outerHTML)'
"""What of a page is beyond the right edge, but for what scrolls by itself."""


@dataclass(frozen=True)
class Seen:
    """complaints: of the console, exceptions and broken policies; asked: every address but the page's own."""

    complaints: list[str]
    asked: list[str]
    beyond: list[str]
    width: int
    picture: bytes


class Browser:
    """A Chromium of its own; ``with`` ends it."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read_by_it, self.write_to = os.pipe()
        self.read_from, written_by_it = os.pipe()
        with (profile.parent / f"{profile.name}.log").open("wb") as log:
            piped = f'exec "$0" "$@" 3<&{read_by_it} 4>&{written_by_it}'  # where it reads and writes the protocol
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
            self.process = subprocess.Popen(
                ["bash", "-c", piped, CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(read_by_it, written_by_it),
                stderr=log,
                stdout=log,
            )
        os.close(read_by_it)
        os.close(written_by_it)
        self.unread, self.last, self.events = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = ""
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        os.close(self.write_to)
        os.close(self.read_from)

    def next(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            got = os.read(self.read_from, 1 << 20)
            assert got, "Chromium has ended"
            self.unread += got
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.last += 1
        session = {"sessionId": self.session} if getattr(self, "session", "") else {}
        said = json.dumps({"id": self.last, "method": method, "params": params, **session})
        os.write(self.write_to, said.encode() + b"\0")
        while (message := self.next()).get("id") != self.last:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, page: Path, width: int, height: int = 900) -> Seen:
        """``page`` in a window of ``width`` CSS pixels, a phone's below 640; the picture is of all of it."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        self.call("Emulation.setDeviceMetricsOverride", **shape)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next())
        found, beyond = self.value(f"[document.documentElement.scrollWidth, {BEYOND}]")
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        named = [(event.get("method", ""), event.get("params", {})) for event in self.events]
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        complaints = [json.dumps(params) for method, params in named if method in bad]
        asked = [params["request"]["url"] for method, params in named if method == "Network.requestWillBeSent"]
        asked = [url for url in asked if url != page.resolve().as_uri()]
        return Seen(complaints, asked, beyond, found, base64.b64decode(taken["data"]))

    def value(self, expression: str) -> Any:
        """Of JavaScript, in the page that is open."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]
