"""The documentation in a headless browser, in both themes: nothing sticks out, everything can be read. With DTORCH_SCREENSHOTS
set to a folder, pictures are saved there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _browser import BROWSER, browse, browser, save

ROOT = Path(__file__).parents[1]
SHOWN = ("index", "tutorial", "reference", "performance", "ops")

# How far the page sticks out of the window, and texts whose contrast with what is behind them is too low.
LOOK = """
(() => {
    const channel = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    const numbers = text => (text.match(/[0-9.]+/g) || []).map(Number);
    const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
    const mix = (a, top, below) => [0, 1, 2].map(i => a * top[i] + (1 - a) * below[i]);
    const over = (top, below) => mix(top.length > 3 ? top[3] : 1, top, below);
    const behind = node => {
        const layers = [];
        for (let n = node; n; n = n.parentElement) layers.push(numbers(getComputedStyle(n).backgroundColor));
        return layers.reverse().reduce((below, top) => top.length ? over(top, below) : below, [255, 255, 255]);
    };
    const pale = [];
    for (const node of document.querySelectorAll('article :is(p, td, th, li, a, pre span)')) {
        if (!node.innerText.trim() || node.classList.contains('headerlink')) continue;
        const style = getComputedStyle(node), ground = behind(node), ink = over(numbers(style.color), ground);
        const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < WORST) pale.push(`${node.tagName} ${node.className} ${node.innerText.slice(0, 20)}`);
    }
    return [document.documentElement.scrollWidth - innerWidth, [...new Set(pale)].slice(0, 5)];
})()
"""
WORST = 3.0  # the theme's own colours for numbers and punctuation have little more


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_pages_can_be_read_in_light_and_dark(tmp_path: Path) -> None:
    config = str(ROOT / "docs/site/mkdocs.yml")
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", config, "-d", str(tmp_path / "site")]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr + done.stdout

    async def look(devtools: str) -> dict[str, Any]:
        found = {}
        for name in SHOWN:
            path = tmp_path / "site" / ("index.html" if name == "index" else f"{name}/index.html")
            for theme, scheme in (("light", "default"), ("dark", "slate")):
                async with browse(devtools, "about:blank") as page:
                    features = [{"name": "prefers-color-scheme", "value": theme}]
                    await page.do("Emulation.setEmulatedMedia", features=features)
                    forget = "try { localStorage.clear() } catch { /* about:blank has none */ }"
                    await page.do("Page.addScriptToEvaluateOnNewDocument", source=forget)
                    await page.do("Page.navigate", url=path.as_uri())
                    is_complete = "document.readyState === 'complete'"
                    await page.run(f"new Promise(done => {is_complete} ? done() : addEventListener('load', done))")
                    assert await page.run("document.body.getAttribute('data-md-color-scheme')") == scheme
                    for width in (1400, 500):
                        await page.do(
                            "Emulation.setDeviceMetricsOverride", width=width, height=1200, deviceScaleFactor=1, mobile=False
                        )
                        out, pale = await page.run(LOOK.replace("WORST", str(WORST)))
                        if out > 0 or pale:
                            found[f"{name}, {theme}, {width} wide"] = out, pale
                        if "DTORCH_SCREENSHOTS" in os.environ:
                            shot = await page.do("Page.captureScreenshot")
                            save(f"{name}-{theme}-{width}", shot["data"])
        return found

    with browser(tmp_path / "profile") as devtools:
        assert asyncio.run(look(devtools)) == {}
