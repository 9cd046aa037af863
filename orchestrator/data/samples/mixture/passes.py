"""How often each source is read in the course of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.mixture.sectioned_mixture import SectionedMixture
from orchestrator.data.samples.order import Order
from orchestrator.data.samples.sections.order import SectionedOrder

MANY = 4.0
"""Passes beyond which text that is read again teaches little (Muennighoff et al., 2023, figure 1)."""


AnyOrder = Order | MixedOrder | SectionedOrder | SectionedMixture


def check_length(order: AnyOrder, positions: int) -> None:
    """Raise InputError if the order ends before so many positions, since every source has made all of its passes."""
    if not isinstance(order, MixedOrder | SectionedMixture):
        return
    if order.size is not None and order.size < positions:
        what = f"all sources have made the passes that they may after {order.size} of the run's {positions} samples"
        raise InputError(what, "data.sources", "raise max_passes, give more text, or train for fewer steps")


def course(order: AnyOrder, uris: Sequence[str], global_batch: int, positions: int) -> dict[str, Any]:
    """The sources of a run of so many `positions` with the samples that it draws of each and the passes that it makes
    over it; and where the proportions change, the shares of samples from which step on."""
    drawn = order.drawn(positions)
    sources = [
        {
            "uri": uri,
            "samples": samples,
            "drawn": count,
            "passes": round(count / samples, 4) if samples else 0.0,
        }
        for uri, samples, count in zip(uris, order.samples, drawn, strict=True)
    ]
    if not isinstance(order, MixedOrder | SectionedMixture):
        return {"epochs": round(positions / order.epoch_size, 4), "sources": sources}
    changes = [
        {"step": start // global_batch, "shares": [round(w / sum(weights), 6) for w in weights]}
        for start, weights in order.changes()
    ]
    return {"mixture": changes, "sources": sources}


def notes(found: dict[str, Any]) -> list[str]:
    """A line for each source that a run with this course reads more often than is of use."""
    return [
        f"source {number} ({source['uri']}) is read {source['passes']:.1f} times; beyond {MANY:g} passes repeated "
        "text teaches little"
        for number, source in enumerate(found["sources"])
        if source["passes"] > MANY
    ]
