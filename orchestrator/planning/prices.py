"""What the machines of a gang cost: looked up by machine type, market and zone in a small dated table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.job.errors import InputError
from orchestrator.storage.inputs import open_input

TABLE = Path(__file__).with_name("prices.csv")
COLUMNS = ["machine", "market", "zone", "usd_per_hour"]
WARN_AT = 0.8
"""Share of a ceiling at which the events say that it comes near."""

TOLD = " of limits."
"""What every line that says so has in it."""

Prices = Mapping[tuple[str, str, str], float]


def load(uri: str | None = None) -> Prices:
    """Prices by (machine, market, zone) from a table of the user's, else from our own. Raises InputError."""
    where = uri or str(TABLE)
    try:
        with open_input(where) as file:
            text = file.read().decode()
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        rows = list(csv.DictReader(lines, strict=True))
        if not rows or list(rows[0]) != COLUMNS:
            raise ValueError(f"its columns must be {','.join(COLUMNS)}")
        return {(row["machine"], row["market"], row["zone"] or ""): _usd(row) for row in rows}
    except (OSError, ValueError, TypeError, csv.Error, ImportError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"is no table of prices ({reason})", where, f"see {TABLE}") from None


def _usd(row: Mapping[str, str]) -> float:
    usd = float(row["usd_per_hour"])
    if not 0.0 <= usd < 1e6:
        raise ValueError(f"{row['machine']} costs {usd:g}")
    return usd


def rate(machines: Sequence[Mapping[str, str]], prices: Prices) -> float | None:
    """USD an hour of whole machines, each with its `machine`, `market` and `zone`; None if one has no price."""
    found = [
        prices.get((m["machine"], m["market"], m["zone"]), prices.get((m["machine"], m["market"], "")))
        for m in machines
    ]
    known = [usd for usd in found if usd is not None]
    return sum(known) if known and len(known) == len(found) else None


def by_zone(machines: Sequence[Mapping[str, str]], prices: Prices) -> list[dict[str, Any]]:
    """How many of these machines are in each zone and market, and their USD an hour, None if one has no price."""
    places: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for machine in machines:
        places.setdefault((machine["zone"], machine["market"]), []).append(machine)
    return [
        {"zone": zone, "market": market, "nodes": len(found), "usd_per_hour": rate(found, prices)}
        for (zone, market), found in sorted(places.items())
    ]


def near(limits: Mapping[str, float | None], spent: Mapping[str, float], told: Sequence[str]) -> list[str]:
    """A line for each ceiling that has come near and has not been told of."""
    lines = []
    for key, ceiling in limits.items():
        if ceiling and spent[key] >= WARN_AT * ceiling:
            start = f"{WARN_AT:.0%} of limits.{key} {ceiling:g} are reached"
            if not any(line.startswith(start) for line in told):
                lines.append(f"{start}: {spent[key]:.4g}")
    return lines
