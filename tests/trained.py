"""A run directory with a commit, made by the rank program without a controller."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jobs import job, write_text
from lasting_gang import lasting_gang
from prepared import prepare_here

from cluster.workers.gang import Bundle
from orchestrator.config.spec import dump, parse
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import ENTRY, Task


def trained(folder: Path, **workload: Any) -> Path:
    """Two steps of the small job, with another workload if one is given."""
    document = job(write_text(folder / "corpus"), steps=2, optimizer={"warmup": 0})
    spec = parse(document | {"workload": workload or document["workload"]})
    data = prepare_here(spec, str(folder / "_data"))
    (folder / "job.yaml").write_text(dump(spec))
    task = Task(
        spec.model_dump(mode="json"),
        Layout(micro_batch=8).to_json(),
        str(folder),
        data,
        1,
        None,
        2,
        token="t",
    )
    _train(task.to_json())
    return folder


def _train(task: dict[str, Any]) -> None:
    gang = lasting_gang()
    deadline = time.monotonic() + 120
    try:
        gang.start(1, Bundle(), ENTRY, task)
        while (rank := gang.poll(0).ranks[0]).state in ("starting", "running"):
            assert time.monotonic() < deadline, "the rank is not done after 120 s"
            time.sleep(0.05)
        assert rank.state == "done", rank.error
    finally:
        gang.close()
