"""A headless browser for tests, spoken to by the Chrome DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A page in a browser, spoken to by the Chrome DevTools protocol."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
        self._number = 0

    async def do(self, method: str, **facts: Any) -> Any:
        self._number += 1
        await self._ws.send_json({"id": self._number, "method": method, "params": facts})
        while (answer := await self._ws.receive_json(timeout=60)).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = await self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true; it is looked at whenever the document changes."""
        assert await self.run(
            f"""new Promise(done => {{
                const look = () => {{ if ({condition}) {{ watch.disconnect(); done(true); }} }};
                const watch = new MutationObserver(look);
                watch.observe(document, {{subtree: true, childList: true, characterData: true, attributes: true}});
                look();
            }})"""
        )

    async def text(self, name: str) -> str:
        return str(await self.run(f"document.getElementById('{name}').innerText"))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[str]:
    """A browser; the value is where its DevTools listen."""
    assert BROWSER is not None
    process = subprocess.Popen(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1400,1500", "about:blank"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        address = next(line.split()[-1].decode() for line in lines if b"DevTools listening on" in line)
        yield address.split("/")[2]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@contextlib.asynccontextmanager
async def browse(devtools: str, url: str) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as client:
        async with client.put(f"http://{devtools}/json/new?about:blank") as answer:
            target = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
        async with client.ws_connect(target, max_msg_size=0) as ws:
            page = Page(ws)
            await page.do("Page.enable")
            await page.do("Page.navigate", url=url)
            is_complete = "document.readyState === 'complete'"
            await page.run(f"new Promise(done => {is_complete} ? done() : addEventListener('load', done))")
            yield page


def save(name: str, data: str) -> None:
    Path(os.environ["DTORCH_SCREENSHOTS"], f"{name}.png").write_bytes(base64.b64decode(data))
