"""Verify a resume: replay steps from a checkpoint and compare them with the record of the run.

The replay runs the same rank program in local processes, under the layout and thread counts of the recorded steps,
and writes nothing. Receipts must be equal, and losses equal to the last bit.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from cluster.workers.run_local_gang import run_to_the_end
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import teacher_of
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.data.samples.skips import on_record
from orchestrator.models.base import base_json
from orchestrator.models.pinned_base import same_teacher
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.commit_task import inputs_of_commit
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.train.task import ENTRY, Task

TIMEOUT = 600.0
"""Seconds without a new step after which a replay aborts."""


@dataclass(frozen=True)
class ReplayResult:
    """The rows {step, recorded, replayed, verdict} of the replayed steps: both losses, and "same" or the difference.

    `start` is the step of the commit from which the replay began.
    """

    start: int
    rows: list[Row]

    @property
    def same(self) -> bool:
        """Return whether all steps equal the record."""
        return bool(self.rows) and all(row["verdict"] == "same" for row in self.rows)

    @property
    def line(self) -> str:
        """Return the result in one line."""
        if self.same:
            return f"{len(self.rows)} steps replayed: receipts equal, losses equal to the last bit"
        bad = [str(row["step"]) for row in self.rows if row["verdict"] != "same"]
        return f"the replay differs at step {', '.join(bad)}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {**asdict(self), "same": self.same, "line": self.line}


def replay(spec: JobSpec, run: RunDir, step: int | None, steps: int) -> ReplayResult:
    """Replay up to `steps` steps from the commit at `step`, by default the earliest with recorded steps after it.

    Raises InputError if there is no such commit, or nothing recorded after it, and RuntimeError if a rank fails.
    """

    if spec.rollout is not None and spec.rollout.engine == "vllm":
        problem = "answers of vllm depend on its batches, so that no replay gets the same"
        raise InputError(problem, "rollout.engine", "replay runs whose rollout.engine is own")

    def replay_from(start: int) -> ReplayResult:
        manifest = Store(run.commits).manifest(start)
        recorded = _recorded(run, start)
        first = start + 1
        layout_text = recorded[first]["layout"]
        layout = next((c for c in _layouts(run, manifest) if c["text"] == layout_text), None)
        if layout is None:
            raise InputError(
                f"the layout of step {first}, {layout_text}, is not on record",
                run.uri,
                "choose another --step",
            )
        # When parameters thaw, a run restores the commit of that step. A replay makes no commits.
        beyond = min((step for step in spec.train.thaw if step >= first), default=first + steps) + 1
        replayable = itertools.takewhile(
            lambda n: n in recorded and recorded[n]["layout"] == layout_text,
            range(first, min(first + steps, beyond)),
        )
        last = list(replayable)[-1]
        teacher = (
            same_teacher(spec.distill, spec.workload, teacher_of(manifest.meta)) if spec.distill else None
        )
        task = Task(
            job=spec.model_dump(mode="json"),
            layout={k: v for k, v in layout.items() if k != "text"},
            attempt=0,
            restore=manifest.step,
            until=last,
            commit=False,
            teacher=base_json(teacher),
            skips=tuple(skip.to_json() for skip in on_record(run.rows("events.jsonl"))),
            **inputs_of_commit(
                run,
                manifest,
                spec.run_identity,
                workload=spec.workload,
                data=spec.data,
                reads_base=spec.reads_base,
            ),
        )
        bundle = spec.resources.per_worker.bundle
        made, _ = run_to_the_end(
            Layout.from_json(task.layout).world,
            bundle,
            entry=ENTRY,
            config=task.to_json(),
            patience=TIMEOUT,
            work="replay",
        )
        replayed = {row["step"]: row for row in made}
        return ReplayResult(
            manifest.step, [_compare(recorded[n], replayed[n]) for n in range(first, last + 1)]
        )

    return read_chosen(
        Store(run.commits),
        step,
        replay_from,
        lambda store, requested: _choose(store, _recorded(run, min(store.steps(), default=0)), requested),
    )


def _recorded(run: RunDir, step: int) -> dict[int, Row]:
    """Return the rows after a step."""
    return {row["step"]: row for row in run.log(METRICS).after(step)}


def _choose(store: Store, recorded: dict[int, Row], step: int | None) -> int:
    result = [number for number in store.steps() if number + 1 in recorded]
    if step is not None and step not in result:
        choices = ", ".join(map(str, result)) or "none"
        raise InputError(
            f"there is no commit at step {step} with steps after it", store.uri, f"choose from: {choices}"
        )
    if not result:
        raise InputError(
            "no commit is followed by recorded steps", store.uri, "raise checkpoint.keep, or train on"
        )
    return result[0] if step is None else step


def _layouts(run: RunDir, manifest: CommitManifest) -> list[dict[str, Any]]:
    """Return the recorded layouts with their texts: the layout of the checkpoint, and those of all starts."""
    layouts = [manifest.meta["layout"]]
    layouts += [event["layout"] for event in run.rows("events.jsonl") if event.get("layout")]
    return [{**layout, "text": str(Layout.from_json(layout))} for layout in layouts]


def _compare(recorded: Row, replayed: Row) -> Row:
    differ = [key for key in ("loss", "samples") if recorded.get(key) != replayed[key]]
    return {
        "step": recorded["step"],
        "recorded": recorded.get("loss"),
        "replayed": replayed["loss"],
        "verdict": "differs in " + " and ".join(differ) if differ else "same",
    }
