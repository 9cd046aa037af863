"""Prices of the machines of a worker group, by machine type, market and zone, from the user's table (`limits.prices`).

The table is CSV. An empty zone means any zone, and a line may begin with #:

    machine,market,zone,usd_per_hour
    g5.xlarge,spot,us-west-2a,0.45
    g5.xlarge,on-demand,,1.006
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.controller.config import LimitSpec
from orchestrator.storage.input_files import open_input
from orchestrator.tune.config import TuneSpec

COLUMNS = ["machine", "market", "zone", "usd_per_hour"]
WARN_AT = 0.8
"""Share of a limit at which an event warns that the limit is near."""

Prices = Mapping[tuple[str, str, str], float]


def check(limits: LimitSpec, tune: TuneSpec | None) -> None:
    """Raise InputError if the price table cannot be read, or a limit in USD has no price.

    Args:
        limits: the key `limits` of the job.
        tune: the key `tune`; None without a search.
    """
    load(limits.prices)
    if limits.prices or limits.usd_per_worker_hour:
        return
    for where, ceiling in (
        ("limits.cost_usd", limits.cost_usd),
        ("tune.limits.cost_usd", tune and tune.limits.cost_usd),
    ):
        if ceiling:
            hint = "give limits.usd_per_worker_hour, or in limits.prices a CSV with the columns " + ",".join(
                COLUMNS
            )
            raise InputError("this limit needs a price, and none is known", where, hint)


def load(uri: str | None) -> Prices:
    """Return prices by (machine, market, zone) from the table at `uri`; empty without one. Raises InputError."""
    if uri is None:
        return {}
    try:
        with open_input(uri) as file:
            text = file.read().decode()
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        rows = list(csv.DictReader(lines, strict=True))
        if not rows or list(rows[0]) != COLUMNS:
            raise ValueError(f"its columns must be {','.join(COLUMNS)}")
        return {(row["machine"], row["market"], row["zone"] or ""): _usd(row) for row in rows}
    except (OSError, ValueError, TypeError, csv.Error, ImportError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = f"write CSV with the columns {','.join(COLUMNS)}"
        raise InputError(f"is not a table of prices ({reason})", uri, hint) from None


def _usd(row: Mapping[str, str]) -> float:
    usd = float(row["usd_per_hour"])
    if not 0.0 <= usd < 1e6:
        raise ValueError(f"{row['machine']} costs {usd:g}")
    return usd


def rate(machines: Sequence[Mapping[str, str]], prices: Prices) -> float | None:
    """Return USD per hour of whole machines, each with its `machine`, `market` and `zone`; None if one has no price.

    Args:
        machines: each with its `machine`, `market` and `zone`.
        prices: from `load`.
    """
    usd_by_machine = [
        prices.get((m["machine"], m["market"], m["zone"]), prices.get((m["machine"], m["market"], "")))
        for m in machines
    ]
    priced = [usd for usd in usd_by_machine if usd is not None]
    return sum(priced) if priced and len(priced) == len(usd_by_machine) else None


def by_zone(machines: Sequence[Mapping[str, str]], prices: Prices) -> list[dict[str, Any]]:
    """Return the number of machines in each zone and market, and their USD per hour; None if one has no price.

    Args:
        machines: each with its `machine`, `market` and `zone`.
        prices: from `load`.
    """
    machines_by_zone: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for machine in machines:
        machines_by_zone.setdefault((machine["zone"], machine["market"]), []).append(machine)
    return [
        {
            "zone": zone,
            "market": market,
            "nodes": len(zone_machines),
            "usd_per_hour": rate(zone_machines, prices),
        }
        for (zone, market), zone_machines in sorted(machines_by_zone.items())
    ]


@dataclass(frozen=True)
class Ceiling:
    """A limit of the job, `limits.<key>`, and the amount spent."""

    key: str
    limit: float
    spent: float

    def __str__(self) -> str:
        return f"{WARN_AT:.0%} of limits.{self.key} ({self.limit:g}) is reached: {self.spent:.4g} is spent"


def nearly_reached(
    limits: Mapping[str, float | None], spent: Mapping[str, float], reported: Set[tuple[str, float]]
) -> list[Ceiling]:
    """Return each limit that is now nearly reached and not yet `reported`, which has pairs of key and limit.

    Args:
        limits: by key; None for no limit.
        spent: by key.
        reported: pairs of key and limit that an event has named.
    """
    return [
        Ceiling(key, limit, spent[key])
        for key, limit in limits.items()
        if limit and spent[key] >= WARN_AT * limit and (key, limit) not in reported
    ]
