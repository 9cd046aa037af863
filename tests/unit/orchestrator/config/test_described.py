"""Keys of the job file, described for people."""

from __future__ import annotations

import pytest

from orchestrator.config.described import sections, sections_of
from orchestrator.config.errors import InputError


def test_a_key_is_described_with_those_below_it() -> None:
    found = sections_of("train.optimizer")
    assert [section.path for section in found][:2] == ["train.optimizer", "train.optimizer.name"]
    assert sections_of("job") == list(sections())
    (section,) = sections_of("train.optimizer.clip")
    (key,) = section.keys
    assert (section.path, key.name, key.type, key.default) == (
        "train.optimizer",
        "clip",
        "number > 0 or null",
        "1.0",
    )
    assert "gradient norm" in key.meaning


def test_a_key_that_is_not_there_is_refused_with_those_that_are_like_it() -> None:
    with pytest.raises(InputError, match=r"did you mean train\.optimizer\.lr\?"):
        sections_of("lr")
    with pytest.raises(InputError, match=r"did you mean .*checkpoint\.every"):
        sections_of("train.every")
    with pytest.raises(InputError, match=r"did you mean train\.optimizer\.warmup"):
        sections_of("warm-up")
    with pytest.raises(InputError, match="`orchestrator schema job` has all of them"):
        sections_of("frobnicate")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("swa", r"checkpoint\.average, as in \{last: 5\}"),
        ("lora", r"workload\.adapter, as in \{kind: lora, rank: 16\}"),
        ("ema", r"did you mean checkpoint\.average\.ema\?"),
        ("learning_rate", r"train\.optimizer\.lr"),
        ("lion", r"did you mean train\.optimizer\.name\?"),
        ("dpo", "it is a value of workload.objective: dpo"),
        ("grpo", "it is a value of workload.objective: grpo"),
        ("reward_funcs", r"rewards, as in \[\{own: module:function"),
        ("num_generations", r"rollout\.group"),
        ("ppo", "not here, because no value network is trained"),
        ("optimzer", r"did you mean train\.optimizer\?"),
        ("imize", "`orchestrator schema job` has all of them"),  # part of a word
    ],
)
def test_a_word_of_the_field_finds_what_it_means(word: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"the job file has no such key; {hint}"):
        sections_of(word)
