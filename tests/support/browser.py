"""A headless Chromium, driven through its debugging protocol. Used by tests/end_to_end/test_page_in_browser.py."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
_LIMIT_S = 60.0


class Browser:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._num_calls = 0
        self.messages: list[str] = []  # what the page logged, and errors of its scripts

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises RuntimeError for its error."""
        self._num_calls += 1
        number = self._num_calls
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_LIMIT_S):
            while True:
                answer = json.loads(await self._socket.receive_str())
                if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                    self.messages.append(json.dumps(answer["params"]))
                if answer.get("id") == number:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    return dict(answer["result"])

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(_LIMIT_S):
            await self.evaluate(
                f"new Promise((done) => {{ const look = () => ({expression}) ? done() : setTimeout(look, 50); look(); }})"
            )

    async def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in pixels, and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """What the window shows, as a PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


def _port_of(file: Path) -> str:
    """The port that the browser has chosen. Raises TimeoutError."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if file.exists() and len(lines := file.read_text().splitlines()) == 2:
            return lines[0]
        time.sleep(0.05)
    raise TimeoutError(f"{PROGRAM} did not start within {_LIMIT_S:g} s")


@contextlib.asynccontextmanager
async def open_browser(url: str, profile: Path) -> AsyncIterator[Browser]:
    """Open a page. profile: an empty folder for the browser's files."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *options,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await asyncio.to_thread(_port_of, profile / "DevToolsActivePort")
        address = f"http://127.0.0.1:{port}/json/list"
        async with aiohttp.ClientSession() as session:
            async with session.get(address) as answer:
                tab = next(tab for tab in await answer.json() if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await browser.call(f"{domain}.enable")
                await browser.resize(1280, 900)
                await browser.call("Page.navigate", url=url)
                for _ in range(100):
                    with contextlib.suppress(RuntimeError):  # the page changes while it is asked
                        if await browser.evaluate(
                            "document.readyState === 'complete' && location.protocol !== 'about:'"
                        ):
                            break
                    await asyncio.sleep(0.1)
                yield browser
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
