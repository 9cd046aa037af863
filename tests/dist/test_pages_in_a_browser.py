"""The pages of `serve` and the report in a real Chromium: light, dark, and as narrow as a telephone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_directories import run_of

from orchestrator.observe.pages.page_server import PageServer

WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 400, "height": 800}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": WIDE},
    "dark": {"color_scheme": "dark", "viewport": WIDE},
    "narrow": {"color_scheme": "light", "viewport": NARROW},
}
LOSSES = tuple(4.0 / (1 + step / 40) for step in range(200))
ACTIONS = [
    ["F", 0, 0, 0.0, 1.0], ["F", 0, 1, 1.0, 2.0], ["B", 0, 0, 4.0, 6.0], ["B", 0, 1, 6.0, 8.0],
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("served") / "runs"
    for name in ("base", "wide"):
        run_of(folder / name, losses=LOSSES)
    run_of(folder / "live", "train", losses=LOSSES[:60])
    planned = [[rank, *action] for rank in (0, 1) for action in ACTIONS]
    plan = {"attempt": 1, "chosen": {"pp": 2, "dp": 1, "text": "pp2 mb2"}, "timeline": planned}
    parts = {
        "compute": 0.5,
        "communication": 0.2,
        "bubble": 0.2,
        "optimizer": 0.1,
        "data": 0.0,
        "commit": 0.0,
    }
    plan["predicted"] = {"step_seconds": 1.0, "seconds_by_part": parts}
    (folder / "base" / "plan.json").write_text(json.dumps(plan))
    timeline = folder / "base" / "profiles" / "timeline"
    timeline.mkdir(parents=True)
    for rank in (0, 1):
        (timeline / f"rank-{rank}.json").write_text(json.dumps({"attempt": 1, "step": 8, "actions": ACTIONS}))
    found = PageServer(str(folder))
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no chromium on the PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_whole_and_legible(look: str, server: PageServer, browser: Any, tmp_path: Path) -> None:
    """Nothing is loaded from elsewhere, nothing is wider than the window, and text differs from what is behind it."""
    context = browser.new_context(**LOOKS[look])
    page, problems, asked = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    base = f"http://127.0.0.1:{server.port}"
    page.goto(server.url)
    assert "token" not in page.url
    shots = {"runs": page.screenshot(path=str(tmp_path / f"runs-{look}.png"), full_page=True)}
    page.fill("input[name=q]", "base")
    page.click("button:has-text('Search')")
    page.wait_for_url("**q=base*")
    assert page.locator("table a").all_inner_texts() == ["base"]
    page.goto(f"{base}/")
    for name in ("base", "wide"):
        page.check(f"input[value='{name}']")
    page.click("text=Compare the chosen runs")
    page.wait_for_selector("svg")
    shots["compare"] = page.screenshot(path=str(tmp_path / f"compare-{look}.png"), full_page=True)
    page.goto(f"{base}/run/base")
    page.wait_for_selector("svg")
    assert page.locator("svg[aria-label^='timeline of the pipeline']").count() == 2
    shots["report"] = page.screenshot(path=str(tmp_path / f"report-{look}.png"), full_page=True)
    for path in ("/", "/run/base", "/compare?run=base&run=wide"):
        page.goto(f"{base}{path}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= LOOKS[look]["viewport"]["width"], (path, wide)
        colours = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        text, behind = (sum(map(int, colour[4:-1].split(",")[:3])) for colour in colours)
        assert (text > behind + 300) if look == "dark" else (behind > text + 300), (path, colours)
        highest = page.evaluate(
            "Math.max(...[...document.querySelectorAll('section')].map(s => s.offsetHeight))"
        )
        assert highest < 1200, (path, highest)
    assert problems == []
    assert all(url.startswith(base) for url in asked), asked
    assert all(len(shot) > 10_000 for shot in shots.values())
    context.close()
