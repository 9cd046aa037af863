"""Whole runs on gangs of local processes: the controller in this process, the ranks real, and no Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prepared import prepare_here
from scripted import Holders

from cluster.gang import Gang
from cluster.machine import Offer
from cluster.place import Cluster
from cluster.process_gang import ProcessGang
from orchestrator.controller import Controller
from orchestrator.rundir import RunDir
from orchestrator.spec import parse


def drive_here(
    document: dict[str, Any],
    run: str,
    cache: Path,
    *,
    gang: Callable[[], Gang] = ProcessGang,
    capacity: Callable[[], int] = lambda: 2,
    faults: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run a job that exports nothing, with its data prepared in `cache`. Returns the summary."""
    document["data"]["cache"] = str(cache)
    spec = parse(document)
    prepare_here(spec, str(cache))
    place = RunDir(run)
    place.create()
    cluster = Cluster(
        gang=gang,
        capacity=lambda bundle: capacity(),
        offer=lambda bundle: Offer(8e9),
        errand=lambda *call: pytest.fail("nothing is exported"),
        services=Holders,
    )
    return Controller(spec, place, None, cluster, faults).drive()
