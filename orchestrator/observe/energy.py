"""The energy that a run has used: measured by its nodes as far as possible, else estimated. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.workers.node_metrics import CPU_JOULES, GPU_JOULES, SECONDS
from orchestrator.config.resources import PerWorker
from orchestrator.storage.row_line import Row

# Defaults of Green Algorithms (Lannelongue et al., 2021) for an unknown CPU, data centre and country, and the board
# power of an H100 or H200 SXM. All at full load: an upper estimate, not a measurement.
WATTS_PER_CPU = 12.0
WATTS_PER_GPU = 700.0
PUE = 1.67  # power of the building per power of the machine (PUE)
KG_CO2E_PER_KWH = 0.475
JOULES_PER_KWH = 3.6e6


@dataclass
class Measured:
    """The readings of nodes.jsonl: joules by component, and `seconds` in which a gang was observed."""

    joules: dict[str, float] = field(default_factory=dict)
    """Only components in every reading: a machine without a reading would make the sum meaningless."""
    seconds: float = 0.0


def measured(rows: Iterable[Row]) -> Measured:
    """Return the sums of these rows of nodes.jsonl."""
    joules = {CPU_JOULES: 0.0, GPU_JOULES: 0.0}
    lacking = set[str]()
    watched: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        values = row["values"]
        watched[row["attempt"]][row["node"]] += _number(values.get(SECONDS))
        for key in joules:
            joules[key] += _number(values.get(key))
            if key not in values:
                lacking.add(key)
    seconds = sum(sum(nodes.values()) / len(nodes) for nodes in watched.values())
    joules_measured = {key: value for key, value in joules.items() if key not in lacking} if watched else {}
    return Measured(joules_measured, seconds)


def energy_of(
    worker: PerWorker, worker_hours: float, held_seconds: float, measured: Measured
) -> dict[str, Any]:
    """Return `kwh`, `co2e_kg`, `energy_source` (what was measured), and the assumptions as `energy_basis`.

    Components that were not measured, and times without readings, are estimated from the worker's CPUs and
    GPUs.
    """
    share = min(measured.seconds / held_seconds, 1.0) if held_seconds else 0.0
    kwh = 0.0
    sources = []
    is_measured = False
    for key, count, watts, component, by in (
        (CPU_JOULES, worker.cpu, WATTS_PER_CPU, "CPUs", "RAPL"),
        (GPU_JOULES, worker.gpu, WATTS_PER_GPU, "GPUs", "NVML"),
    ):
        estimated = worker_hours * count * watts / 1000
        if count and key in measured.joules and share:
            kwh += measured.joules[key] / JOULES_PER_KWH + (1 - share) * estimated
            sources.append(f"{component} measured by {by}")
            is_measured = True
        elif count:
            kwh += estimated
            sources.append(f"{component} estimated")
    source = ", ".join(sources) if is_measured else "estimated"
    basis = f"Energy is {source}"
    if is_measured:
        basis += f": of whole nodes, during {share:.0%} of the time"
    basis += (
        f". An estimate takes {worker.cpu:g} CPU x {WATTS_PER_CPU:g} W and {worker.gpu:g} GPU x "
        f"{WATTS_PER_GPU:g} W of a worker at full load. All is times {PUE} for the building, with "
        f"{KG_CO2E_PER_KWH} kg CO2e per kWh (defaults of Green Algorithms, Lannelongue et al., 2021; H100 SXM "
        "board power)."
    )
    kwh *= PUE
    return {
        "kwh": kwh,
        "co2e_kg": kwh * KG_CO2E_PER_KWH,
        "energy_source": source,
        "energy_basis": basis,
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0
