"""The job file's `notify`: where a run tells that something has happened. Importable without torch or ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.job.strict import StrictModel, WebAddress

Occasion = Literal["done", "failed", "landed", "stalled", "attention"]
OCCASIONS: tuple[Occasion, ...] = ("done", "failed", "landed", "stalled", "attention")


class NotifySpec(StrictModel):
    """Messages about a run to a webhook, in the form that Slack and what is compatible with it take."""

    webhook: WebAddress = Field(
        description="an http or https URL. It is a secret: reports and trackers have it as ***"
    )
    on: tuple[Occasion, ...] = Field(
        default=OCCASIONS,
        min_length=1,
        description="landed: stopped with a commit, by a limit or the user; stalled: a gang hung or fell silent; "
        "attention: saving fails, samples are left out, rows are lost, a ceiling is near, the controller had died",
    )
