"""Rows in a run of Weights & Biases: one for all attempts, named by where the run is and when it began."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from typing import Any

from orchestrator.config.redact import redact
from orchestrator.observe.formatting import run_name
from orchestrator.observe.sinks.config import WandbSpec
from orchestrator.observe.sinks.sink import SinkContext, metrics_of
from orchestrator.storage.row_line import Row

CURSOR = "wandb.json"
"""The last step that was given to it, in the run directory: an offline run cannot be asked."""


LIBRARY = "wandb"


def build(context: SinkContext) -> WandbSink:
    """See `Sink`."""
    return WandbSink(context)


class WandbSink:
    """Raises what wandb raises, for example if there is no key."""

    last_event = 0

    def __init__(self, context: SinkContext) -> None:
        import wandb

        run = context.run
        wandb_spec: WandbSpec = context.config
        self._run_dir = run
        identity = hashlib.sha256(f"{redact(run.uri)} {context.began:.6f}".encode()).hexdigest()[:16]
        folder = run.path if run.local else tempfile.mkdtemp(prefix="wandb-")
        self._run: Any = wandb.init(
            project=wandb_spec.project,
            entity=wandb_spec.entity,
            name=run_name(context.job_name, run.name),
            id=identity,
            resume="allow",
            mode=wandb_spec.mode,
            dir=folder,
            config=context.job,
            settings=wandb.Settings(console="off", disable_git=True, silent=True, x_disable_stats=True),
        )
        last_step = int(run.read_json_or_empty(CURSOR).get("step", -1))
        self.last_step = max(last_step, int(self._run.step) - 1) if wandb_spec.mode == "online" else last_step

    def rows(self, rows: Sequence[Row]) -> None:
        """See `Sink`. wandb keeps what a step had first."""
        for row in rows:
            self._run.log({**metrics_of(row), "time": row["time"]}, step=row["step"], commit=True)
            self.last_step = row["step"]
        if rows:
            self._run_dir.write_json(CURSOR, {"step": self.last_step})

    def events(self, events: Sequence[Row]) -> None:
        """See `Sink`; the phase is in the run's summary."""
        for event in events:
            self._run.summary["phase"] = event["phase"]
            self.last_event = event["number"]

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()
