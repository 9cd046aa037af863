"""The report of prepared data, as a self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.observe.pages.page import render

WIDTH = 640.0
HEIGHT = 220.0
LEFT = 44.0
RIGHT = 8.0
TOP = 18.0
BOTTOM = 30.0
COLOURS = ("accent", "step", "prepare", "checkpoint_stall", "restore", "re_plan", "export", "data_stall")
"""The page's colour names, for the sources in order."""
LANGUAGES = 12
"""Number of languages that are listed individually."""


def page(census: Mapping[str, Any]) -> str:
    """Return the page for the result of `orchestrator.data.store.census`."""
    sources = [
        {**source, "colour": COLOURS[n % len(COLOURS)], "share": source["tokens"] / (census["tokens"] or 1)}
        for n, source in enumerate(census["sources"])
    ]
    rejected: Counter[tuple[str, str]] = Counter()
    for finding in census["rejected"]:
        rejected[finding["action"], finding["kind"]] += finding["count"]
    duplicate_counts = [source["duplicates"] for source in sources if source["duplicates"] is not None]
    content = {
        **census,
        "sources": sources,
        "lengths": _bars([source["lengths"] for source in sources]),
        "languages": _languages(sources),
        "fertility": _mean(sources),
        "duplicates": sum(duplicate_counts) if duplicate_counts else None,
        "rejected": [(action, kind, number) for (action, kind), number in rejected.most_common()],
        "findings": census["rejected"],
        "steps": [_step(step) for step in census["clean"]],
    }
    return render("data", content)


def _mean(sources: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean tokens per word over all sources, weighted by tokens."""
    fertilities = [(source["fertility"], source["tokens"]) for source in sources if source.get("fertility")]
    words = sum(tokens / fertility for fertility, tokens in fertilities)
    return sum(tokens for _, tokens in fertilities) / words if words else None


def _languages(sources: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return each language's share of the samples, weighted by the sources' documents, most frequent first."""
    shares: Counter[str] = Counter()
    for source in sources:
        sampled = sum(source.get("languages", {}).values())
        for language, number in source.get("languages", {}).items():
            shares[language] += source["documents"] * number / sampled
    total = sum(shares.values())
    shown = [(name, number / total) for name, number in shares.most_common(LANGUAGES)]
    left = 1.0 - sum(share for _, share in shown)
    return [*shown, ("others", left)] if len(shares) > LANGUAGES else shown


def _bars(counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a histogram as bars stacked by source, in SVG units. Bin n covers [2^n, 2^(n+1)) tokens."""
    totals = [sum(column) for column in zip(*counts, strict=True)]
    filled = [n for n, total in enumerate(totals) if total]
    first, last = (filled[0], filled[-1]) if filled else (0, 0)
    step = (WIDTH - LEFT - RIGHT) / (last - first + 1)
    highest = max([*totals, 1])
    bars = []
    labels = []
    for n in range(first, last + 1):
        x = LEFT + (n - first) * step
        y = HEIGHT - BOTTOM
        for source, column in enumerate(counts):
            height = column[n] / highest * (HEIGHT - TOP - BOTTOM)
            y -= height
            if column[n]:
                title = f"{column[n]} documents of {2**n} to {2 ** (n + 1) - 1} tokens"
                colour = COLOURS[source % len(COLOURS)]
                bars.append(
                    (round(x + 1.5, 1), round(y, 1), round(step - 3, 1), round(height, 1), colour, title)
                )
        labels.append(
            (round(x, 1), str(2**n) if n < 10 else f"{2 ** (n - 10)}k" if n < 20 else f"{2 ** (n - 20)}M")
        )
    return {"width": WIDTH, "height": HEIGHT, "base": HEIGHT - BOTTOM, "most": highest, "top": TOP, "bars": bars,
            "labels": labels, "left": LEFT, "right": WIDTH - RIGHT}  # fmt: skip


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    total = {key: sum(source[key] for source in step["sources"]) for key in step["sources"][0]}
    share = total["removed"] / total["documents"] if total["documents"] else 0.0
    return {**step, "total": total, "share": share, "less": total["bytes"] - total["bytes_after"]}
