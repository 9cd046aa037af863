"""Traces the layouts of a run in a separate process.

It traces the layout that trains, at the lowest priority, and before a start the layouts that may be too large. It reads
a request on its standard input and writes the answer on its standard output, both as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from cluster.workers.rank_process import die_with_parent


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a trace changes in plan.json: `predicted` and `memory`.

    Args:
        request: the `job` as YAML, the `layout`, the formula's bytes `by_stage` and of the largest rank (`formula`),
            and a worker's `memory` in bytes. With `workers`, their `machine` and the `row_tokens` of a `ModelShape`
            instead of these, the result has the `verdicts` on layouts for such workers.
    """
    from orchestrator.config.document import parse_yaml
    from orchestrator.config.spec import parse
    from orchestrator.parallel.layout import Layout
    from orchestrator.planner.device import Machine
    from orchestrator.planner.trace.layout_memory import plan_with_traces, traced_memory
    from orchestrator.resolve.resolved_job import resolve

    spec = parse(parse_yaml(request["job"], "job.yaml"), "job.yaml")
    if "workers" in request:
        job = resolve(spec)
        job = dataclasses.replace(
            job, shape=dataclasses.replace(job.shape, row_tokens=tuple(map(tuple, request["row_tokens"])))
        )
        confirmed_plan = plan_with_traces(job, request["workers"], Machine.from_json(request["machine"]))
        verdicts = [
            (layout.to_json(), dataclasses.asdict(verdict))
            for layout, verdict in confirmed_plan.verdicts.items()
        ]
        return {"verdicts": verdicts}
    traced = traced_memory(resolve(spec), Layout.from_json(request["layout"]))
    on_cpu = not spec.resources.per_worker.gpu
    machine = Machine(memory=request["memory"], flops=1.0)
    predicted, memory = traced.replaced_memory(request["by_stage"], request["formula"], machine, on_cpu)
    return {"predicted": predicted, "memory": memory}


def main() -> None:
    """Answer one request. The argument is the process id of the parent, with which this process ends."""
    die_with_parent(int(sys.argv[1]))
    request = json.load(sys.stdin)
    if "layout" in request:
        os.nice(19)
    result = answer(request)
    sys.stdout.write("\n" + json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads of libraries
