"""The screen of a run: what it draws of a status."""

from __future__ import annotations

import io
import math

from rich.console import Console

from orchestrator.track.live import CURVE, LiveScreen, curve, ranks

RANKS = [
    {"rank": 0, "node": "a", "pid": 1, "state": "running", "step": 7},
    {"rank": 1, "node": "b", "pid": 2, "state": "running", "step": 4},
    {"rank": 2, "node": "b", "pid": 3, "state": "dead", "step": 7},
]


def drawn(screen: LiveScreen, **status: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(screen.render(status))
    return stream.getvalue()


def test_all_that_is_known_is_shown() -> None:
    screen = LiveScreen(io.StringIO())
    for step in range(1, 8):
        screen.update({"step": step, "loss": 8.0 - step})
    found = drawn(
        screen, phase="train", attempt=2, step=7, steps=10, loss=1.0, tokens_per_second=2e3, eta_seconds=75,
        note="saving pauses: [disk] full", evaluation="step 4 is evaluated", layout="dp2", ranks=RANKS,
    )  # fmt: skip
    screen.stop()
    for part in (
        "train (attempt 2)", "7/10", "1 min 15 s left", "loss 1.0000  █▇▆▅▃▂▁", "2k tokens/s  dp2",
        "saving pauses: [disk] full", "step 4 is evaluated", "a: rank 0\n", "b: rank 1 3 steps behind, rank 2 dead",
    ):  # fmt: skip
        assert part in found, found


def test_what_is_not_known_is_left_out() -> None:
    screen = LiveScreen(io.StringIO())
    assert drawn(screen, phase="check", note="reading").split()[1:] == ["check", "reading"]
    screen.stop()


def test_a_curve_has_one_width_forgets_what_is_done_again_and_gaps_for_what_is_no_number() -> None:
    assert len(curve([(step, 1 / step) for step in range(1, 1000)])) <= CURVE
    assert curve([(1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf)]) == "█ ▁ "
    assert curve([(1, math.nan)]) == ""
    assert set(curve([(1, 3.0), (2, 3.0)])) == {"▁"}
    screen = LiveScreen(io.StringIO())
    for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (2, 1.0)):
        screen.update({"step": step, "loss": loss})
    assert "█▁" in drawn(screen, step=2, loss=1.0)
    screen.stop()


def test_of_many_nodes_some_are_shown() -> None:
    many = [{"rank": n, "node": f"node-{n}", "state": "running", "step": 1} for n in range(20)]
    assert ranks({"ranks": many})[-1] == "and 12 more nodes"
