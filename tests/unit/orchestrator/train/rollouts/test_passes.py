"""pass@k: the probability that some of the answers to a prompt contain a right one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.metric_names import larger_is_better
from orchestrator.config.spec import parse
from orchestrator.train.rollouts.passes import PassSpec, pass_probability
from orchestrator.train.rollouts.rollout_data import Scored
from workloads.model.answers import Drawn


def document() -> dict[str, Any]:
    """A job that draws six answers to each held-out prompt."""
    return {
        "name": "small",
        "workload": {"model": "gpt-tiny", "objective": "grpo"},
        "data": {
            "sources": [{"uri": "rows.jsonl", "field": {"prompt": "q", "answer": "a"}}],
            "tokenizer": "tokenizer", "sequence_length": 64, "validation": {"share": 0.1},
        },
        "train": {"steps": 8, "global_batch": 16},
        "rollout": {"max_tokens": 32},
        "rewards": [{"kind": "exact_match"}],
        "evaluate": {"answers": 6},
        "checkpoint": {"every": 4, "keep_best": "validation.pass_at_6"},
    }  # fmt: skip


@pytest.mark.parametrize("answers", [1, 4, 7])
def test_it_is_the_share_of_all_choices_with_a_right_answer(answers: int) -> None:
    for right, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        chosen = list(itertools.combinations([n < right for n in range(answers)], k))
        assert pass_probability(answers, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_an_answer_is_right_by_the_first_reward_and_means_are_over_prompts() -> None:
    passes = PassSpec(4, [1, 2, 4], "exact_match")

    def scored(value: float) -> Scored:
        rewards = {"exact_match": value, "length": 1.0}
        return Scored(Drawn([1], [-0.1], 0.0, True), "a", rewards, sum(rewards.values()))

    assert [passes.is_right(scored(value)) for value in (1.0, 0.5, float("nan"))] == [True, False, False]
    found = passes.metrics([0, 1, 4])
    assert found == pytest.approx(
        {"pass_at_1": (0 + 0.25 + 1) / 3, "pass_at_2": (0 + 0.5 + 1) / 3, "pass_at_4": 2 / 3}
    )


def test_a_job_names_the_number_of_answers_and_may_decide_by_it() -> None:
    found = document()
    job = parse(found)
    assert job.evaluate is not None
    assert job.evaluate.sizes == [1, 2, 4, 6]
    assert larger_is_better("validation.pass_at_6")
    found["checkpoint"]["keep_best"] = "validation.pass_at_3"
    with pytest.raises(InputError, match=r"validation\.pass_at_3 is not measured; name one of .*pass_at_4"):
        parse(found)
    del found["rollout"], found["rewards"]
    found["workload"]["objective"] = "causal_lm"
    found["checkpoint"]["keep_best"] = False
    with pytest.raises(InputError, match="answers is for grpo and reinforce"):
        parse(found)
