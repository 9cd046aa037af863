"""What a job file may say of evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.job.evaluate import EvaluateSpec


def test_prompts_are_continued_greedily_unless_told_otherwise() -> None:
    found = EvaluateSpec.model_validate({"prompts": ["Once upon", ""]})
    assert (found.prompts, found.prompt_tokens, found.temperature) == (["Once upon", ""], 64, 0.0)
    assert EvaluateSpec().prompts == []


@pytest.mark.parametrize("wrong", [{"prompts": "one"}, {"prompt_tokens": 0}, {"temperature": -0.1}])
def test_prompts_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvaluateSpec.model_validate(wrong)
