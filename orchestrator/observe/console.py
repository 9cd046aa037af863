"""The display of a run on standard error while it trains, and its summary at the end on standard output."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, get_args

from orchestrator.config.loss_unit import loss_unit, read_unit
from orchestrator.config.metric_names import Metric
from orchestrator.config.records import worker_kind
from orchestrator.observe.formatting import count, duration, head, work_text
from orchestrator.observe.live import LiveScreen
from orchestrator.storage.row_log import steps_text

if TYPE_CHECKING:
    from cluster.workers.gang import RankStatus

LINE_SECONDS = 10.0
_NAMED = frozenset({*get_args(Metric), "tokens"})
"""Display names of a held-out set's built-in metrics; other metrics are the user's own."""


class ProgressDisplay:
    """A live screen on a terminal. Elsewhere, a plain line at every change of phase and every ten seconds, without
    repeats.

    `update` takes {phase, step, steps, loss, sparsity, open_heads, tokens_per_second, attempt, layout, eta_seconds,
    note}. Missing keys are left out of the line.
    """

    def __init__(self, stream: IO[str] | None = None, how: str | None = None) -> None:
        """`how` is lines, live or none. The default is live on a terminal, and lines elsewhere."""
        self._stream = stream or sys.stderr
        self._how = how or ("live" if self._stream.isatty() else "lines")
        self._live: LiveScreen | None = None
        self._phase: tuple[Any, ...] = ()
        self._printed = ""
        self._printed_at = -LINE_SECONDS
        self.left = False
        """Whether the user has left the screen. From then on, lines are printed."""

    def __enter__(self) -> ProgressDisplay:
        if self._how == "live":
            self._live = LiveScreen(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, status: Mapping[str, Any]) -> None:
        """Show the current state of the run."""
        phase = (status.get("phase"), status.get("attempt"), status.get("note"))
        changed = phase != self._phase
        self._phase = phase
        line = "  ".join([head(status), *_details(status)])
        if self._live:
            self._live.update(status)
            if self._live.is_left():
                self._live.stop()
                self._live = None
                self._how = "lines"
                self.left = True
        elif self._how == "none" or status.get("phase") == "check":
            return  # problems take one line
        elif line != self._printed and (changed or time.monotonic() - self._printed_at >= LINE_SECONDS):
            self._printed = line
            self._printed_at = time.monotonic()
            try:
                print(line, file=self._stream, flush=True)
            except BrokenPipeError:  # the reader has closed the pipe, as `head` does; the run continues
                self._how = "none"


@contextlib.contextmanager
def shown_work(phase: str) -> Iterator[Callable[[RankStatus], None]]:
    """Show what one process does on standard error. Yields the function that takes its status."""
    with ProgressDisplay() as progress:
        yield lambda rank: progress.update(
            {
                "phase": phase,
                "note": "" if rank.work else rank.activity,
                "evaluation": work_text(rank.work) if rank.work else "",
            }
        )


def final_table(summary: Mapping[str, Any], stream: IO[str] | None = None) -> None:
    """Print the summary of a run as a table to `stream`, by default standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{summary.get('name')}: {summary.get('state')}", title_justify="left", show_header=False
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in facts(summary):
        table.add_row(name, text)
    Console(file=stream or sys.stdout, markup=False, highlight=False).print(table)


def _why(summary: Mapping[str, Any]) -> list[str]:
    return [str(summary["cost_unknown"])] if summary.get("cost_unknown") else []


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of that table: (name, text)."""
    ledger = summary.get("ledger") or {}
    measured = summary.get("measured") or {}
    predicted = summary.get("predicted") or {}
    goodput = ledger.get("goodput")
    cost = summary.get("cost_usd")
    loss = summary.get("final_loss")
    reward = summary.get("final_reward")
    entropy = summary.get("unigram_entropy")
    kwh = summary.get("kwh")
    objective = summary.get("objective") or ""
    unit = loss_unit(objective)
    read = read_unit(objective)
    rows = [
        ("steps", f"{summary.get('step')} of {summary.get('steps')}, {count(summary.get('tokens'))} {read}"),
        (
            "loss",
            (
                "unknown"
                if loss is None
                else f"{loss:.4f}{_parts(summary.get('final_loss_parts')) or f' {unit}'}"
            )
            + (f" (unigram entropy {entropy:.4f})" if entropy is not None else ""),
        )
        if reward is None  # else the loss says nothing
        else ("reward", f"{reward:.4f}, the mean over the last step's answers"),
        *[
            (
                f"loss of {name}" if "loss" in metrics else name,
                _held_out(metrics, summary.get("metrics"), unit),
            )
            for name, metrics in _sets(summary, "evaluation").items()
        ],
        *[(f"task {name}", _scores(metrics)) for name, metrics in _sets(summary, "tasks").items()],
        ("speed", f"{count(measured.get('tokens_per_second'))} {read}/s{_precision(summary)}"),
        (
            "a step",
            f"{duration(measured.get('step_seconds'))} in the median "
            f"(predicted {duration(predicted.get('step_seconds'))})" + _without_rollout(measured),
        ),
        ("wall time", _where_it_went(ledger)),
        ("goodput", "unknown" if goodput is None else f"{goodput:.1%}"),
        ("attempts", f"{summary.get('attempts')}, {ledger.get('lost_steps', 0)} steps lost"),
        ("cost", f"{cost:.2f} USD" if cost is not None else ": ".join(["unknown", *_why(summary)])),
        (
            "energy",
            "unknown"
            if kwh is None
            else f"{kwh:.3g} kWh, {summary.get('co2e_kg'):.3g} kg CO2e "
            f"({summary.get('energy_source', 'estimated')})",
        ),
        ("receipt", str(summary.get("receipt") or "none")),
    ]
    if continued_from := summary.get("continued_from"):
        rows.append(("goes on from", f"{continued_from['run']} at step {continued_from['step']}"))
    if summary.get("why_slow"):
        rows.append(("why so long", str(summary["why_slow"])))
    if generating := summary.get("rollout_worker_hours"):
        rows.append(
            (
                f"{worker_kind(summary.get('objective', ''))} workers",
                f"{duration(3600 * generating)} of one worker, which the cost includes",
            )
        )
    if beside := summary.get("evaluated_beside"):
        usd = "" if beside["cost_usd"] is None else f", {beside['cost_usd']:.2f} USD"
        rows.append(("evaluated beside", f"{duration(3600 * beside['worker_hours'])} of one worker{usd}"))
    if summary.get("best_without_commit"):
        rows.append(("best", summary["best_without_commit"]))
    if summary.get("missing_rows"):
        rows.append(
            ("lost rows", f"of step {steps_text(summary['missing_rows'])}: no figure here includes them")
        )
    if summary.get("missing_events"):
        rows.append(("lost events", f"{steps_text(summary['missing_events'])}: no figure here includes them"))
    if summary.get("reason"):
        rows.insert(0, ("reason", str(summary["reason"])))
    return rows


def _precision(summary: Mapping[str, Any]) -> str:
    """Return the precision in which the run has trained, as text; empty for summaries of earlier versions."""
    return f" in {summary['precision']}" if summary.get("precision") else ""


def _without_rollout(measured: Mapping[str, Any]) -> str:
    """Return how long a step takes without its share of a rollout, as text; empty for other runs."""
    if "update_seconds" not in measured:
        return ""
    return f", {duration(measured['update_seconds'])} without its rollout"


def _where_it_went(ledger: Mapping[str, Any]) -> str:
    """Return the wall time, with everything that took at least one percent of it."""
    wall = ledger.get("wall_seconds")
    seconds = ledger.get("seconds") or {}
    parts = [
        f"{bucket.replace('re_plan', 'replan').replace('_', ' ')} {duration(amount)}"
        for bucket, amount in seconds.items()
        if wall and amount >= wall / 100
    ]
    stopped = ledger.get("stopped_seconds")
    between = f"; stopped for {duration(stopped)}, which is no part of it" if stopped else ""
    ahead = ledger.get("overlapped_seconds")
    beside = f"; answers were generated beside training for {duration(ahead)} of it" if ahead else ""
    return duration(wall) + (f": {', '.join(parts)}" if parts else "") + beside + between


def _sets(summary: Mapping[str, Any], of: str) -> dict[str, dict[str, float]]:
    """Return the metrics of the last evaluation by set, or those of the tasks."""
    return dict((summary.get(of) or {}).get("sets") or {})


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "examples")


def _held_out(metrics: Mapping[str, float], requested: Sequence[str] | None, unit: str) -> str:
    """Return the requested metrics or, without a request, the usual and the user's own ones, as far as measured."""
    texts = {"loss": f"{{:.4f}} {unit}", "bits_per_byte": "{:.4f} bits per byte", "accuracy": "{:.1%} right"}
    defaults = [*texts, "reward_margin", "reward", "answer_tokens"]
    own_metrics = [name for name in metrics if name not in _NAMED and not name.startswith("router_")]
    return ", ".join(
        (
            texts[name].format(metrics[name])
            if name in texts
            else f"{name.replace('_', ' ') if name in _NAMED else name} {metrics[name]:.4f}"
        )
        for name in requested or [*defaults, *own_metrics]
        if name in metrics
    )


def _parts(values: Mapping[str, float] | None) -> str:
    """Return the parts of a loss in brackets; empty without any."""
    text = ", ".join(f"{name} {value:.4f}" for name, value in (values or {}).items())
    return f" ({text})" if text else ""


def _details(status: Mapping[str, Any]) -> list[str]:
    parts = []
    if status.get("step") is not None:
        parts.append(f"step {status['step']}/{status.get('steps') or '?'}")
    if status.get("reward") is not None:  # whose loss says nothing
        parts.append(f"reward {status['reward']:.4f}")
    elif status.get("loss") is not None:
        parts.append(f"loss {status['loss']:.4f}{_parts(status.get('loss_parts'))}")
    if status.get("sparsity"):
        parts.append(f"{status['sparsity']:.1%} pruned")
    if status.get("open_heads") is not None:
        parts.append(f"{status['open_heads']:.0f} heads open")
    if status.get("tokens_per_second") is not None:
        parts.append(f"{count(status['tokens_per_second'])} {read_unit(status.get('objective') or '')}/s")
    if status.get("eta_seconds") is not None:
        parts.append(f"{duration(status['eta_seconds'])} left")
    return parts + [str(status[key]) for key in ("note", "evaluation", "layout") if status.get(key)]
