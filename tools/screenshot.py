"""Takes a picture of a web page with headless Chromium, after it has had time to come alive.

python tools/screenshot.py http://127.0.0.1:8080/ docs/dashboard.png --dark --size 1280x800
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


async def take(url: str, *, dark: bool, size: tuple[int, int], wait_s: float) -> bytes:
    """Opens the page, waits, returns a PNG."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("screenshot: chromium: not found on PATH")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            chromium,
            *FLAGS,
            f"--user-data-dir={profile}",
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(wait_s + 60):
                port = await _port(browser)
                return await _capture(port, url, dark=dark, size=size, wait_s=wait_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                browser.kill()
            await browser.wait()


async def _port(browser: asyncio.subprocess.Process) -> int:
    assert browser.stderr is not None
    async for line in browser.stderr:
        if b"DevTools listening on ws://" in line:
            return int(line.split(b"ws://")[1].split(b"/")[0].rsplit(b":", 1)[1])
    raise SystemExit("screenshot: chromium ended before it listened")


async def _capture(
    port: int, url: str, *, dark: bool, size: tuple[int, int], wait_s: float
) -> bytes:
    async with aiohttp.ClientSession() as http:
        async with http.put(f"http://127.0.0.1:{port}/json/new?about:blank") as reply:
            page = await reply.json()
        async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            number = 0

            async def call(method: str, **params: Any) -> dict[str, Any]:
                nonlocal number
                number += 1
                await socket.send_json({"id": number, "method": method, "params": params})
                while True:
                    message = await socket.receive_json()
                    if message.get("id") == number:
                        if "error" in message:
                            raise SystemExit(f"screenshot: {method}: {message['error']['message']}")
                        return dict(message["result"])

            await call(
                "Emulation.setDeviceMetricsOverride",
                width=size[0],
                height=size[1],
                deviceScaleFactor=1,
                mobile=False,
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await call("Emulation.setEmulatedMedia", features=[scheme])
            await call("Page.navigate", url=url)
            await asyncio.sleep(wait_s)
            shot = await call("Page.captureScreenshot", format="png")
            return base64.b64decode(shot["data"])


def main() -> None:
    """Reads the arguments and takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", default="1280x800")
    parser.add_argument("--wait", type=float, default=4.0, help="seconds for the page to live")
    arguments = parser.parse_args()
    width, height = arguments.size.split("x")
    size = (int(width), int(height))
    shot = asyncio.run(take(arguments.url, dark=arguments.dark, size=size, wait_s=arguments.wait))
    arguments.out.write_bytes(shot)


if __name__ == "__main__":
    main()
