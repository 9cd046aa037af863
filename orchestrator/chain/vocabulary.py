"""A stage that removes tokens: it trains nothing, and its result is the folder `export` of its directory.

The folder appears at once and whole, with what it was made of in its export.json. So a chain that was killed while it
was made makes it again, and one that was killed afterwards finds it.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cluster.workers.stop_signals import held_interruptions
from orchestrator.chain.stage_run import StageRun, export_of
from orchestrator.checkpoint.identity import differences
from orchestrator.checkpoint.identity import shown as shown_value
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.controller.stop_file import REQUEST, StopRequests
from orchestrator.export.target import mark_of
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from orchestrator.models.base import Base


STATUS = "status.json"
EVERY = 1.0
"""Seconds between two writes of the status, and between two looks for a request to stop."""


@contextlib.contextmanager
def announced(run: RunDir, note: str) -> Iterator[None]:
    """Write status.json of a stage during the block. If another process asks the stage to stop, the block is
    interrupted, as by Ctrl-C.

    Both files are removed at the end, so they remain only where this process was killed. A thread that is not the main
    one cannot be interrupted, and announces nothing.

    Args:
        run: the directory of the stage, on the local file system.
        note: what the stage does, as text for people.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    os.makedirs(run.path, exist_ok=True)
    processes = lineage(1)  # nothing starts this process again, as Ray does with a controller
    requests = StopRequests(run, processes[0])
    watch = _Watch(run, {"phase": "prepare", "started": time.time(), "note": note, "processes": processes})
    thread = threading.Thread(target=partial(watch.until_end, requests), name="stage status", daemon=True)
    thread.start()
    noticed = False
    try:
        yield
    except KeyboardInterrupt:
        noticed = True
        raise
    finally:
        with held_interruptions():
            watch.ended.set()
            thread.join()
            requests.close()
            for name in (STATUS, REQUEST):
                with contextlib.suppress(OSError):
                    run.remove(name)
    if watch.asked and not noticed:  # Python drops an exception in some places, such as the hooks of a fork
        raise KeyboardInterrupt


class _Watch:
    """Writes a status again and again, and interrupts the main thread once it is asked to."""

    def __init__(self, run: RunDir, status: dict[str, Any]) -> None:
        self.ended = threading.Event()
        self.asked = False
        """Whether another process has asked for the end."""
        self._run = run
        self._status = status

    def until_end(self, requests: StopRequests) -> None:
        """Work until `ended` is set."""
        while not self.ended.is_set():
            with contextlib.suppress(InputError, OSError):  # a missing status stops nothing
                self._run.write_json(STATUS, self._status | {"time": time.time()})
            if not self.asked and requests.look():
                self.asked = True
                _thread.interrupt_main(signal.SIGTERM)  # a shell may ignore SIGINT for its background jobs
            self.ended.wait(EVERY)


Prepare: TypeAlias = Callable[[JobSpec, RunDir, PreparedData], PreparedData]
"""Prepares the missing data of a job, given its run directory and the data prepared before."""
STAGE = "stage"
"""The key of export.json with what the stage was made of: {"data", "workload", "at_least", "of", "prepared",
"started"}. `of` is the checksum of the model, `prepared` the place of the prepared data."""
COMPARED = ("data", "workload")
"""The parts of a job's identity that determine the folder."""


def make(stage: StageRun, prepare: Prepare) -> None:
    """Write the folder of a stage. Raises InputError if its tokens cannot be removed, and KeyboardInterrupt if another
    process asks it to stop."""
    with announced(stage.run, "removes tokens"):
        _make(stage, prepare)


def _make(stage: StageRun, prepare: Prepare) -> None:
    from orchestrator.export.vocabulary import without_unused_tokens

    vocabulary = stage.stage.vocabulary
    assert vocabulary is not None
    job, identity, started = stage.job, stage.job.identity(), time.time()
    if (base := base_of(job.workload)) is None:
        hint = "give a folder with config.json and safetensors"
        raise InputError("has no configuration or no weights", str(job.data.tokenizer), hint)
    data = prepare(job, stage.run, PreparedData())

    made_of = {
        **{part: identity[part] for part in COMPARED},
        "at_least": vocabulary.at_least,
        "of": base.digest,
        "prepared": data.uri,
        "started": started,
    }
    without_unused_tokens(
        job.workload.model,
        job.data.tokenizer,
        data,
        export_of(stage),
        lambda folder: prepare(job.over_folder(folder), stage.run, PreparedData()),
        at_least=vocabulary.at_least,
        more={STAGE: made_of},
    )


def base_of(workload: WorkloadSpec) -> Base | None:
    """Return the weights of the model that loses tokens; None if its folder is gone."""
    from orchestrator.models.base import named_base

    if not Path(workload.model.removeprefix("hf:"), "config.json").is_file():
        return None
    return named_base(workload, None)


def facts_of(stage: StageRun) -> dict[str, Any]:
    """Return export.json of a stage that removes tokens; empty before its folder is made."""
    text = mark_of(export_of(stage))
    found = json.loads(text) if text else {}
    return found if STAGE in found else {}


def changed_since(stage: StageRun, facts: Mapping[str, Any]) -> str:
    """Return how the stage differs from the one that made the folder; empty if it does not."""
    assert stage.stage.vocabulary is not None
    before, now = facts[STAGE], stage.stage.vocabulary.at_least
    if before["at_least"] != now:
        return f"vocabulary.at_least is {before['at_least']} in this stage and {now} in the job file"
    ours = stage.job.identity()
    for key, was, wanted in differences(ours, {**ours, **{part: before[part] for part in COMPARED}}):
        return f"{key} is {shown_value(was)} in this stage and {shown_value(wanted)} in the job file"
    base = base_of(stage.job.workload)
    return "the model that it was made of has changed" if base and base.digest != before["of"] else ""


def shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table of a chain shows of a stage with these facts: when it was made, and what it removed."""
    from orchestrator.export.vocabulary import VOCABULARY, WRITTEN

    counts = facts[VOCABULARY]
    line = (
        f"{counts['tokens']} of {counts['tokens_before']} tokens, {counts['parameters']} of "
        f"{counts['parameters_before']} parameters"
    )
    return {"started": facts[STAGE]["started"], "ended": facts[WRITTEN], "reason": line}
