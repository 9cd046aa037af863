"""How often a run reads each source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.mixture.sectioned_mixture import SectionedMixture
from orchestrator.data.samples.order import Order
from orchestrator.data.samples.sections.order import SectionedOrder
from orchestrator.train.config import Reading

MANY = 4.0
"""Beyond this number of passes, repeated text teaches little (Muennighoff et al., 2023, figure 1)."""


AnyOrder = Order | MixedOrder | SectionedOrder | SectionedMixture


def is_long_enough(order: AnyOrder, positions: int) -> bool:
    """Return whether an order has so many positions. It ends if every source has reached max_passes."""
    return not isinstance(order, MixedOrder | SectionedMixture) or order.has(positions)


def check_length(order: AnyOrder, positions: int) -> None:
    """Raise InputError if the order ends before `positions` because every source has reached max_passes."""
    if isinstance(order, MixedOrder | SectionedMixture) and not order.has(positions):
        problem = f"all sources reach max_passes after {order.size} of the run's {positions} samples"
        raise InputError(
            problem, "data.sources", "raise max_passes, give more text, or train for fewer steps"
        )


def course(order: AnyOrder, uris: Sequence[str], reading: Reading, positions: int) -> dict[str, Any]:
    """Return the sources of a run of `positions` samples, with the samples drawn from each and the passes over it.

    For a mixture, also return the steps at which the proportions change, with the new shares of samples.
    """
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
        {"step": reading.first_step_of(start), "shares": [round(w / sum(weights), 6) for w in weights]}
        for start, weights in order.changes()
    ]
    return {"mixture": changes, "sources": sources}


def notes(course_of_run: dict[str, Any]) -> list[str]:
    """Return one line for each source that is read more often than is useful."""
    return [
        f"source {number} ({source['uri']}) is read {source['passes']:.1f} times; beyond {MANY:g} passes repeated "
        "text teaches little"
        for number, source in enumerate(course_of_run["sources"])
        if source["passes"] > MANY
    ]
