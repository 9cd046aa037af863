"""The faults of each disturbed run of a chaos: those that are named, the standard ones, or random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from cluster.local.external_faults import ExternalFault
from cluster.workers.gang import workers_text
from cluster.workers.injected_faults import FaultSpec
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.train.config import TrainSpec

STANDARD = (
    "kill@1:{a}", "kill@0:{a}", "stop@1:{a}", "raise@0:{a}", "slow@1:{a}=0.2", "nan@0:{a}", "driver@{a}",
    "controller@{a}", "node@1:{a}", "drain@1:{a}", "flip@{a}", "torn@{a}", "outage@{a}=2",
)  # fmt: skip
"""Default faults, at a step in the middle of the run, for the ranks that exist."""


def expand(
    faults: Sequence[str], randoms: int, seed: int, resources: ResourceSpec, train: TrainSpec
) -> list[tuple[str, ...]]:
    """Return the faults of each disturbed run: one run for each named fault, and one for all random ones.

    Raises InputError for an invalid fault, and for a step or rank that the job does not have.
    """
    steps, world = train.steps, resources.workers.max
    if not faults and not randoms:
        standard = [text.format(a=max(steps // 2, 2)) for text in STANDARD]
        faults = [text for text in standard if _fault(text).rank < world]
    for text in faults:
        fault = _fault(text)
        if not 1 <= fault.step <= steps or fault.rank >= world:
            problem = f"{text} is beyond the job's {steps} steps and {workers_text(world)}"
            raise InputError(problem, "--fault", f"choose a step up to {steps} and a rank below {world}")
    runs: list[tuple[str, ...]] = [(text,) for text in faults]
    if randoms:
        runs.append(tuple(_random(randoms, seed, steps, world)))
    return runs


def _fault(text: str) -> ExternalFault | FaultSpec:
    try:
        return ExternalFault.parse(text) or FaultSpec.parse(text)
    except ValueError as error:
        raise InputError(f"{text!r} is not a fault", "--fault", str(error)) from None


def _random(count: int, seed: int, steps: int, world: int) -> Iterator[str]:
    """Return kills, stops and exceptions at random ranks and steps."""
    if 2 * count >= steps:
        raise InputError(
            f"{count} random faults need more than {steps} steps",
            "--random",
            f"raise train.steps above {2 * count}",
        )
    generator = random.Random(seed)
    # Never two consecutive steps: the step that a rank had reached is known only to within one.
    at_steps = sorted(generator.sample(range(2, steps + 1, 2), count))
    for step in at_steps:
        kind = generator.choices(["kill", "stop", "raise"], [8, 1, 1])[0]
        yield f"{kind}@{generator.randrange(world)}:{step}/*"
