"""The screen of a run: what it draws of a status."""

from __future__ import annotations

import io
import math
import os
import sys
import termios

import pytest
from rich.console import Console

from orchestrator.observe.console import ProgressDisplay
from orchestrator.observe.live import CURVE, LiveScreen, curve, ranks

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
    screen.update({"validation": {"step": 3, "loss": {"wiki": 4.5}}})
    screen.update({"validation": {"step": 6, "loss": {"wiki": 2.5}}})
    found = drawn(
        screen, phase="train", attempt=2, step=7, steps=10, loss=1.0, tokens_per_second=2e3, eta_seconds=75,
        note="saving pauses: [disk] full", evaluation="step 4 is evaluated", layout="dp2", ranks=RANKS,
        validation={"step": 6, "loss": {"wiki": 2.5}}, goodput=0.931, memory_bytes=2**30, usd=1.5,
        nodes={"a": {"cpu_utilization_percentage": 93.0, "gpu_0_utilization_percentage": 50}},
        predicted_memory_bytes=2**31,
        latest_events=[{"time": 3600.0, "phase": "train", "reason": "the first step is done"}],
    )  # fmt: skip
    screen.stop()
    for part in (
        "train (attempt 2)", "7/10", "1 min 15 s left", "loss 1.0000  █▇▆▅▃▂▁", "2k tokens/s  dp2",
        "saving pauses: [disk] full", "step 4 is evaluated",
        "a: rank 0  (CPU 93%, GPUs 50%)", "wiki 2.5000 at step 6  █▁", "goodput about 93%",
        "memory 1.00 of 2.00 GiB planned", "1.50 USD so far", "01:00:00 train: the first step is done",
        "b: rank 1 3 steps behind, rank 2 dead",
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


def test_q_leaves_the_screen_for_lines_and_the_terminal_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))
    monkeypatch.setattr(os, "tcgetpgrp", lambda file: os.getpgrp())  # as in the foreground
    before, stream = termios.tcgetattr(theirs), io.StringIO()
    with ProgressDisplay(stream, how="live") as display:
        assert termios.tcgetattr(theirs) != before, "keys come one by one"
        os.write(ours, b"xy")
        display.update({"phase": "train", "step": 1})
        assert not display.left
        os.write(ours, b"q")
        display.update({"phase": "train", "step": 2})
        assert display.left
        assert termios.tcgetattr(theirs) == before
        display.update({"phase": "train", "step": 3, "steps": 9})
    assert stream.getvalue().endswith("train  step 3/9\n")
    os.close(ours)
