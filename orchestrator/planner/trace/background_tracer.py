"""Traces layouts of a run in a process of its own: that which trains, giving way to all others, and before a start
those that may be too large.

It reads what is asked on its standard input and writes the answer on its standard output, both JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from cluster.workers.rank_process import die_with_parent


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What of plan.json a trace changes: `predicted` and `memory`. `asked` has the `job` as YAML, the `layout`, and of
    the closed formula the bytes `by_stage` and those of the rank that needs most; the bytes that a worker has.
    Where it has a number of `workers` and their `machine` instead, the `verdicts` on layouts for these."""
    from orchestrator.config.document import parse_yaml
    from orchestrator.config.spec import parse
    from orchestrator.parallel.layout import Layout
    from orchestrator.planner.device import Machine
    from orchestrator.planner.trace.layout_memory import confirmed, traced_memory
    from orchestrator.resolve.resolved_job import resolve

    spec = parse(parse_yaml(asked["job"], "job.yaml"), "job.yaml")
    if "workers" in asked:
        found = confirmed(resolve(spec), asked["workers"], Machine.from_json(asked["machine"]))
        verdicts = [(layout.to_json(), dataclasses.asdict(each)) for layout, each in found.verdicts.items()]
        return {"verdicts": verdicts}
    traced = traced_memory(resolve(spec), Layout.from_json(asked["layout"]))
    on_cpu, machine = not spec.resources.per_worker.gpu, Machine(memory=asked["memory"], flops=1.0)
    predicted, memory = traced.beside(asked["by_stage"], asked["formula"], machine, on_cpu)
    return {"predicted": predicted, "memory": memory}


def main() -> None:
    """Answer once; the argument is the process id of who asks."""
    die_with_parent(int(sys.argv[1]))
    asked = json.load(sys.stdin)
    if "layout" in asked:
        os.nice(19)
    found = answer(asked)
    sys.stdout.write("\n" + json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of libraries are not waited for
