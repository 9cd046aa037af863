"""Totals of cleaning: what each step removed from each source, with samples.

Stored as clean.json next to the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data.clean import decisions
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.sources import Part
from orchestrator.data.sources.identity import part_key
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.read_at_once import read_at_once

TOTALS = "clean.json"
COUNTS = ("documents", "bytes", "removed", "removed_bytes", "changed", "bytes_after")
SAMPLES = 20
"""Samples of the documents that a step removed."""
REASONS = 40
"""Reasons that are listed individually."""


def totals(text: CleanedText, parts: Sequence[Part], sources: int) -> list[dict[str, Any]]:
    """Return for each step its name, options, reasons and samples, and its counts for each of the `sources`.

    Raises InputError if cleaning removes every document, or if a stored decision is missing or damaged.
    """
    folder = DataFolder(text.uri)
    keys = [part_key(part) for part in parts]
    result: list[dict[str, Any]] = []
    for step in text.cleaning.steps:
        counts: list[Counter[str]] = [Counter() for _ in range(sources)]
        reasons: Counter[str] = Counter()
        samples: list[list[str]] = []
        read = read_at_once(partial(decisions.read, folder, step.key), keys)
        for part, decision in zip(parts, read, strict=True):
            if decision is None:
                problem = f"a decision of {step.name} is missing or damaged"
                raise InputError(problem, text.uri, "run the same command again")
            counts[part[0].file.source].update({name: getattr(decision, name) for name in COUNTS})
            reasons += decision.reasons
            samples = decisions.sample([*samples, *decision.samples], SAMPLES)
        result.append(
            {
                "step": step.name,
                "options": step.options,
                "sources": [{name: count[name] for name in COUNTS} for count in counts],
                "reasons": dict(reasons.most_common(REASONS)),
                "samples": [{"reason": reason, "text": beginning} for _, reason, beginning in samples],
            }
        )
    if not sum(count["documents"] - count["removed"] for count in result[-1]["sources"]):
        largest = max(result, key=lambda entry: sum(entry["reasons"].values()))
        problem = f"removes every document, {largest['step']} most of them"
        raise InputError(problem, "data.clean", "relax it, or check the sources")
    return result


def read_totals(folder: DataFolder) -> list[dict[str, Any]]:
    """Return the totals stored beside prepared data; empty for data that was not cleaned."""
    result: list[dict[str, Any]] = folder.read_json(TOTALS) or []
    return result


def removed_in_all(folder: DataFolder) -> int:
    """Return how many documents cleaning removed from prepared data."""
    return sum(source["removed"] for step in read_totals(folder) for source in step["sources"])


def removed_by(uri: str, step: str) -> list[dict[str, Any]]:
    """Return the totals of the steps with this name. Raises InputError if there is no such step."""
    folder = DataFolder(uri)
    totals = read_totals(folder)
    if named := [entry for entry in totals if entry["step"] == step]:
        return named
    if not totals:
        raise InputError(
            "was not cleaned, or there is no prepared data", uri, "name data of a job with data.clean"
        )
    names = ", ".join(dict.fromkeys(entry["step"] for entry in totals))
    raise InputError(f"has no step {step}", "--removed-by", f"choose from {names}")
