"""A profile refined by a finished run: bounded, on record, and undone in one step. Pure.

What a part of the step took, over what is predicted of it now, scales the figures that it is predicted by. One run says
as much about what else the machine did as about the machine: it moves a figure by its root, and by so much at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from orchestrator.config.errors import InputError
from orchestrator.planner.profile import Change, Profile, Refinement

ONCE = 1.25
"""How many times larger or smaller one run may make a figure."""
TOGETHER = 2.0
"""And all runs together, of what was measured by calibration."""
SLOWS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "compute": (
        ("peak.fp32", -1),
        ("peak.bf16", -1),
        ("peak.fp16", -1),
        ("memory_bandwidth.value", -1),
        ("launch.value", 1),
        ("narrow.launch", 1),
    ),
    "optimizer": (("optimizer_share.value", -1),),
    "communication": (
        ("collective.value", 1),
        ("waking.value", 1),
        ("message.value", 1),
        ("inside.latency", 1),
        ("inside.bandwidth", -1),
    ),
    "delay": (("delay.value", 1),),
}
"""By part of a step, and by the delay of a rank, the figures that it is predicted by, and whether it takes longer with
more (1) or less (-1) of each."""


def refined(
    profile: Profile,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    record: Mapping[str, Any],
) -> Profile:
    """The profile after a run of which these seconds by part were measured, where it predicts those, and under `delay`
    the share by which a rank's seconds are beyond its least; `record` says when, by whom, of which run and how many
    steps."""
    ratios = {
        part: measured[part] / predicted[part]
        for part in SLOWS
        if predicted.get(part, 0.0) > 0.0 and measured.get(part, 0.0) > 0.0
    }
    document, changes = profile.model_dump(mode="json"), []
    bandwidth = profile.memory_bandwidth.value
    for part, ratio in ratios.items():
        factor = _moved(ratio)
        if part == "optimizer":  # whose share is of a bandwidth that has moved already
            factor /= bandwidth / _value(document, "memory_bandwidth.value")
        for key, sign in SLOWS[part]:
            if document[key.partition(".")[0]] is None:
                continue
            before = _value(document, key)
            after = _bounded(profile, key, before, before * factor**sign)
            if after != before:
                _set(document, key, after)
                changes.append(Change(figure=key, before=before, after=after))
    entry = Refinement(**record, ratios=ratios, changes=tuple(changes))
    return Profile.model_validate({**document, "refined": [*document["refined"], entry.model_dump()]})


def undone(profile: Profile) -> Profile:
    """The profile as it was before the last run that has refined it. Raises ValueError if none has, InputError if its
    record is damaged."""
    if not profile.refined:
        raise ValueError("no run has refined it")
    found = profile.model_copy(update={"refined": profile.refined[:-1]})
    document = profile.model_dump(mode="json")
    for change in profile.refined[-1].changes:
        try:
            _set(document, change.figure, change.before)
            found = Profile.model_validate({**document, "refined": document["refined"][:-1]})
        except (KeyError, TypeError, ValidationError):
            what = f"says that {change.figure} was {change.before:g}, which it cannot have been"
            raise InputError(
                what, "the last record of a run", "orchestrator calibrate measures anew"
            ) from None
    return found


def _moved(ratio: float) -> float:
    return min(max(math.sqrt(ratio), 1.0 / ONCE), ONCE)


def _bounded(profile: Profile, key: str, before: float, after: float) -> float:
    """`after`, within TOGETHER of what the figure was before any run; a share grows to 1 at most."""
    begun = next((c.before for entry in profile.refined for c in entry.changes if c.figure == key), before)
    most = min(begun * TOGETHER, max(begun, 1.0)) if "share" in key else begun * TOGETHER
    return min(max(after, begun / TOGETHER), most)


def _value(document: Mapping[str, Any], key: str) -> float:
    found: Any = document
    for name in key.split("."):
        found = found[name]
    return float(found)


def _set(document: dict[str, Any], key: str, value: float) -> None:
    *path, last = key.split(".")
    found: Any = document
    for name in path:
        found = found[name]
    found[last] = value
