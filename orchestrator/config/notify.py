"""The job file's `notify`: where a run tells that something has happened. Importable without torch or ray."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from orchestrator.config.strict import StrictModel, web_address

VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
"""A variable of the environment of the node on which a run's controller is."""

Occasion = Literal["done", "failed", "landed", "stalled", "attention"]
OCCASIONS: tuple[Occasion, ...] = ("done", "failed", "landed", "stalled", "attention")


def _address(value: str) -> str:
    return value if VARIABLE.fullmatch(value) else web_address(value)


class NotifySpec(StrictModel):
    """Messages about a run to a webhook, in the form that Slack and what is compatible with it take."""

    webhook: Annotated[str, AfterValidator(_address)] = Field(
        description="an http or https URL, or as $NAME the variable of the environment that has it where the run's "
        "controller is. The URL is a secret: reports and trackers have it as ***"
    )
    on: tuple[Occasion, ...] = Field(
        default=OCCASIONS,
        min_length=1,
        description="landed: stopped with a commit, by a limit or the user; stalled: a gang hung or fell silent; "
        "attention: saving fails, samples are left out, rows are lost, a ceiling is near, the controller had died",
    )
