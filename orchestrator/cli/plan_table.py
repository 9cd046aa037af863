"""The plan of a job as tables for the terminal."""

from __future__ import annotations

from orchestrator.job.spec import JobSpec
from orchestrator.planning.layout import ModelShape
from orchestrator.planning.plan import Plan
from orchestrator.track.words import count, duration

SHOWN = 8


def show(spec: JobSpec, shape: ModelShape, plan: Plan) -> None:
    """Print the chosen layout, the next best ones, and why others were rejected."""
    from orchestrator.cli.options import table

    title = f"{spec.workload.model}: {count(shape.parameters)} parameters, {count(plan.tokens)} tokens a step"
    rows = [
        [
            "chosen" if candidate is plan.chosen else "",
            str(candidate.layout),
            f"{candidate.memory / 2**30:.2f} GiB",
            duration(candidate.seconds),
            f"{count(plan.tokens / candidate.seconds)} tokens/s",
        ]
        for candidate in plan.candidates[:SHOWN]
    ]
    table(title, ["", "layout", "memory a rank", "step", "speed"], rows)
    if more := len(plan.candidates) - SHOWN:
        print(f"  and {more} more legal layouts" if more > 0 else "", end="\n" if more > 0 else "")
    reasons: dict[str, int] = {}
    for _, reason in plan.rejected:
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        shown = sorted(reasons.items(), key=lambda item: -item[1])[:SHOWN]
        table("Rejected", ["layouts", "because"], [[str(n), reason] for reason, n in shown])
    print("Predicted, not measured: the run's report shows both side by side.")
