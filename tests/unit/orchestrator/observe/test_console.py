from __future__ import annotations

import io
import os
import pty
import select

import pytest

from orchestrator.observe import console
from orchestrator.observe.console import ProgressDisplay, facts, final_table
from orchestrator.observe.formatting import count, duration

STATUS = {
    "phase": "train", "step": 3, "steps": 10, "loss": 4.56789, "tokens_per_second": 12345.0, "attempt": 2,
    "layout": "dp2 zero0 mb4", "eta_seconds": 75, "note": "tracking server is down",
}  # fmt: skip


def test_who_reads_no_further_stops_no_run() -> None:
    """As `run 2>&1 | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with ProgressDisplay(stream) as progress:
        for step in (3, 4):
            progress.update({**STATUS, "step": step, "phase": f"phase {step}"})
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_elsewhere_than_on_a_terminal_plain_lines() -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream) as progress:
        progress.update({"phase": "check", "note": "what is wrong would be one line"})
        progress.update({"phase": "prepare", "attempt": 1})
        progress.update(STATUS)
        progress.update({**STATUS, "step": 4})  # nothing but the step, within ten seconds
        progress.update({**STATUS, "step": 5, "phase": "export"})
    assert stream.getvalue().splitlines() == [
        "prepare",
        "train (attempt 2)  step 3/10  loss 4.5679  12.3k tokens/s  1 min 15 s left"
        "  tracking server is down  dp2 zero0 mb4",
        "export (attempt 2)  step 5/10  loss 4.5679  12.3k tokens/s  1 min 15 s left"
        "  tracking server is down  dp2 zero0 mb4",
    ]


def test_own_samples_are_no_tokens() -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream) as progress:
        progress.update({**STATUS, "objective": "samples"})
    assert "12.3k samples/s" in stream.getvalue()


def test_what_is_asked_for_is_shown_wherever_that_is() -> None:
    shown = {}
    for how in ("lines", "live", "none"):
        stream = io.StringIO()
        with ProgressDisplay(stream, how) as progress:
            progress.update(STATUS)
        shown[how] = stream.getvalue()
    assert shown["lines"].startswith("train (attempt 2)  step 3/10")
    assert not shown["live"].startswith("train"), "no plain line"
    assert shown["none"] == ""


def test_no_line_is_printed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with ProgressDisplay(stream) as progress:
        for step in (3, 3, 4):
            progress.update({**STATUS, "step": step})
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["step 3/10", "step 4/10"]


def test_on_a_terminal_a_live_screen() -> None:
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        with ProgressDisplay(stream) as progress:
            progress.update({**STATUS, "note": "[red]x[/red]", "eta_seconds": None})
        shown = b""
        while select.select([main], [], [], 0.2)[0]:
            shown += os.read(main, 65536)
    os.close(main)
    for part in ("train (attempt 2)", "3/10", "loss 4.5679"):
        assert part in shown.decode()
    assert b"[red]x" in shown, "what a message says is no markup"


def test_the_summary_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as progress:
        progress.update(STATUS)
    final_table({"name": "demo", "state": "done"})
    out, err = capsys.readouterr()
    assert out.startswith("demo: done")
    assert "train" in err
    assert "demo: done" not in err


def test_final_table_says_what_is_not_known() -> None:
    stream = io.StringIO()
    final_table(
        {"name": "demo[/x]", "state": "failed", "reason": "[bold]too many restarts", "final_loss": None},
        stream,
    )
    shown = stream.getvalue()
    assert "[bold]too many restarts" in shown
    assert "unknown" in shown


def test_facts() -> None:
    found = dict(
        facts(
            {
                "objective": "causal_lm",
                "step": 200, "steps": 200, "tokens": 819200, "final_loss": 5.1, "unigram_entropy": 6.2,
                "measured": {"tokens_per_second": 3500.0, "step_seconds": 0.5},
                "predicted": {"step_seconds": 0.4},
                "ledger": {"goodput": 0.815, "wall_seconds": 130.0, "lost_steps": 7,
                           "seconds": {"launch": 4.0, "data_stall": 0.1, "step": 106.0, "export": 20.0}},
                "attempts": 2,
                "receipt": "abcd", "kwh": 0.00123, "co2e_kg": 0.0005, "cost_usd": None,
            }
        )
    )  # fmt: skip
    assert found["loss"] == "5.1000 nats per token (unigram entropy 6.2000)"
    assert found["goodput"] == "81.5%"
    assert found["wall time"] == "2 min 10 s: launch 4.0 s, step 1 min 46 s, export 20 s"
    assert found["attempts"] == "2, 7 steps lost"
    assert found["cost"] == "unknown"
    assert found["energy"].startswith("0.00123 kWh")


def test_the_time_for_which_a_run_was_stopped_is_named_beside_its_wall_time() -> None:
    ledger = {"wall_seconds": 130.0, "stopped_seconds": 1500.0, "seconds": {"step": 106.0}}
    text = dict(facts({"ledger": ledger}))["wall time"]
    assert text == "2 min 10 s: step 1 min 46 s; stopped for 25 min 00 s, which is no part of it"


@pytest.mark.parametrize(
    ("objective", "unit", "read"),
    [
        ("masked_lm", "nats per token", "tokens"),
        ("sequence_classification", "nats per record", "tokens"),
        ("regression", "per record", "tokens"),
        ("dpo", "nats per pair", "tokens"),
        ("samples", "per sample", "samples"),
    ],
)
def test_a_loss_has_the_unit_of_its_objective(objective: str, unit: str, read: str) -> None:
    sets = {"test": {"loss": 0.5, "tokens": 25.0}}
    found = dict(
        facts({"objective": objective, "tokens": 640, "final_loss": 0.25, "evaluation": {"sets": sets}})
    )
    assert found["loss"] == f"0.2500 {unit}"
    assert found["loss of test"] == f"0.5000 {unit}"
    assert found["steps"].endswith(f"640 {read}")
    assert f" {read}/s" in found["speed"]


@pytest.mark.parametrize(
    ("asked", "name", "text"),
    [
        (["accuracy", "f1", "mine:margin_of"], "test", "75.0% right, f1 0.8000, mine:margin_of 0.1250"),
        (["loss", "perplexity"], "loss of test", "0.5000 nats per record, perplexity 1.6500"),
        (None, "loss of test", "0.5000 nats per record, 75.0% right, mine:margin_of 0.1250"),
    ],
)
def test_every_metric_that_was_asked_for_is_told(asked: list[str] | None, name: str, text: str) -> None:
    """And an own one, asked for or not."""
    measured = {"loss": 0.5, "perplexity": 1.65, "accuracy": 0.75, "f1": 0.8, "mine:margin_of": 0.125}
    if asked and "loss" not in asked:
        del measured["loss"]
    sets = {"test": {**measured, "tokens": 25.0, "router_load": 1.0}}
    summary = {"objective": "sequence_classification", "metrics": asked, "evaluation": {"sets": sets}}
    assert dict(facts(summary))[name] == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0, "0.0 s"),
        (0.0412, "41.2 ms"),
        (3.07e-5, "30.7 µs"),
        (4e-9, "0.0 s"),
        (8.24, "8.2 s"),
        (59.4, "59 s"),
        (61, "1 min 01 s"),
        (3 * 3600 + 180, "3 h 03 min"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "unknown"), (0, "0"), (812, "812"), (12345, "12.3k"), (4.56e6, "4.56M"), (2e9, "2G")],
)
def test_count(number: float | None, text: str) -> None:
    assert count(number) == text
