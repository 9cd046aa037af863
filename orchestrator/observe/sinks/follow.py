"""The process that copies a run's rows and events to its sinks.

    python -m orchestrator.observe.sinks.follow RUN PARENT [FOLDER ...]

The process reads the run directory until its standard input is closed, and then the rest. It prints one line for each
error. A sink that fails is built again after a pause, and continues where it was.
"""

from __future__ import annotations

import itertools
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import yaml

from cluster.workers.rank_process import die_with_parent
from orchestrator.config.errors import one_line
from orchestrator.config.redact import redact
from orchestrator.config.spec import parse
from orchestrator.observe.sink_cursor import Received
from orchestrator.observe.sinks.check import module_of, parts_of
from orchestrator.observe.sinks.config import SinkSpec
from orchestrator.observe.sinks.sink import Sink, SinkContext
from orchestrator.storage.row_line import EVENTS, METRICS
from orchestrator.storage.run_directory import RunDir
from workloads.own.object_reference import load

EVERY, EVERY_REMOTE = 1.0, 30.0
"""Seconds between looks at the run directory: on a local file system, on an object store."""
PAUSES = (1.0, 60.0)
"""First and longest wait after a sink has failed."""
LAST_TRIES = 3
BATCH = 1000


class Followed:
    """One sink, and the position in the run up to which it has received rows."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        """Keep a sink to build later.

        Args:
            name: the sink's name in messages.
            make: builds the sink; called again after each failure.
        """
        self._name, self._make = name, make
        self._sink: Sink | None = None
        self._received = Received()
        self._pause, self._at = PAUSES[0], 0.0
        self.failed = False

    def update(self, run: RunDir, closing: bool) -> None:
        """Deliver new rows and events, unless the sink has just failed. Never raises.

        Args:
            run: the run directory.
            closing: whether the run has ended, so that the sink is closed and no pause is kept.
        """
        if time.monotonic() < self._at and not closing:
            return
        try:
            if self._sink is None:
                self._sink = self._make()
                self._received = self._received.at(self._sink.last_step)
            self._give(run, self._sink)
            self._pause, self.failed = PAUSES[0], False
            if closing:
                self._sink.close()
        except Exception as error:  # whatever a library raises
            print(f"{self._name}: {redact(one_line(error))}", flush=True)
            self._sink = None
            self._at = time.monotonic() + self._pause
            self.failed = True
            self._pause = min(2 * self._pause, PAUSES[1])

    def _give(self, run: RunDir, sink: Sink) -> None:
        rows = self._received.lacking(run.log(METRICS).after(self._received.since))
        while batch := list(itertools.islice(rows, BATCH)):
            sink.rows([row for row, _ in batch])
            self._received = batch[-1][1]
        events = [event for event in run.rows(EVENTS) if event.get("number", 0) > sink.last_event]
        sink.events(redact(events))


def _build_own(reference: str, context: SinkContext) -> Sink:
    sink: Sink = load(reference)(context)
    return sink


def sinks_of(name: str, spec: SinkSpec | None, document: dict[str, Any], run: RunDir) -> list[Followed]:
    """Return the sinks of the job. Each imports its library when it is built.

    Args:
        name: the name of the job.
        spec: the key `sinks` of the job; None for no sinks.
        document: the job as plain data, which sinks get without secrets.
        run: the run directory, which has at least one event.
    """
    if spec is None:
        return []
    began = run.rows(EVENTS)[0]["time"]
    job = redact(document)

    def context(config: Any) -> SinkContext:
        return SinkContext(config, name, job, run, began)

    sinks = [
        Followed(key, partial(module_of(key).build, context(part))) for key, part in parts_of(spec).items()
    ]
    for user_sink in spec.own:
        sinks.append(Followed(str(user_sink), partial(_build_own, user_sink.use, context(user_sink.options))))
    return sinks


def _begun(run: RunDir) -> list[Followed] | None:
    """The sinks of a run; None while storage does not give what it began with. Never raises."""
    try:
        spec = parse(yaml.safe_load(run.read_text("job.yaml") or ""))
        return sinks_of(spec.name, spec.sinks, spec.model_dump(mode="json"), run)
    except Exception as error:  # of a store's library too; an event may still be on its way
        print(f"the run is not read yet: {redact(one_line(error))}", flush=True)
        return None


def main() -> None:
    """Follow the run until the end of standard input."""
    die_with_parent(int(sys.argv[2]))
    sys.path += sys.argv[3:]  # the folders of the user's own sinks
    run = RunDir(sys.argv[1])
    sinks: list[Followed] | None = None
    closing, tries = False, 0
    while not closing:
        closing = bool(select.select([sys.stdin], [], [], EVERY if run.local else EVERY_REMOTE)[0])
        sinks = _begun(run) if sinks is None else sinks
        for sink in sinks or ():
            sink.update(run, closing)
    while sinks and any(sink.failed for sink in sinks) and tries < LAST_TRIES:
        time.sleep(PAUSES[0])
        tries += 1
        for sink in sinks:
            if sink.failed:
                sink.update(run, closing)


if __name__ == "__main__":
    main()
