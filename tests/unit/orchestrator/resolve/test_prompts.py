"""Which models continue prompts, and which prompts have room."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.resolve.prompts import check_generates
from orchestrator.resolve.resolved_job import ResolvedJob, resolve


def resolved(model: str, objective: str, evaluate: dict[str, Any]) -> ResolvedJob:
    workload = {"model": model, "objective": objective}
    return resolve(parse(job("a.txt") | {"workload": workload, "evaluate": evaluate}))


SAMPLES = {"samples": {"prompts": ["Once "], "tokens": 8}}


@pytest.mark.parametrize(("model", "objective"), [("gpt-tiny", "causal_lm"), ("t5-tiny", "span_corruption")])
def test_decoders_and_pairs_generate_and_need_no_held_out_text(model: str, objective: str) -> None:
    check_generates(resolved(model, objective, SAMPLES))


@pytest.mark.parametrize(
    ("model", "objective", "kind"),
    [("bert-tiny", "masked_lm", "encoder"), ("glm-tiny", "blank_infilling", "prefix")],
)
def test_what_generates_no_text_is_refused(model: str, objective: str, kind: str) -> None:
    with pytest.raises(
        InputError, match=rf"evaluate.samples: {model} \({kind}\), trained by {objective}, does not generate"
    ):
        check_generates(resolved(model, objective, SAMPLES))


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ({"prompts": []}, "prompts: list should have at least 1 item"),
        ({"prompts": [""]}, "string should have at least 1 character"),
        ({"prompts": ["a"], "tokens": 0}, "samples.tokens: should be greater than or equal to 1"),
        ({"prompts": ["a"], "temperature": -1}, "samples.temperature: should be greater than or equal"),
        ({}, "samples.prompts: is missing"),
    ],
)
def test_wrong_samples_are_one_line(samples: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(job("a.txt") | {"evaluate": {"samples": samples}})
    assert told in str(caught.value)
