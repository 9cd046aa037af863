import re
from typing import Any

import pytest
from pydantic import BaseModel

from orchestrator.config import spec
from orchestrator.config.errors import InputError
from orchestrator.config.other_names import KEYS
from orchestrator.config.overrides import override
from orchestrator.config.validation_messages import _keys

SECTIONS = "|".join(spec.JobSpec.model_fields)
HINTS = sorted({*KEYS.values()})


def document() -> dict[str, Any]:
    """A job in which all that hints name has what it needs."""
    return {
        "name": "a",
        "workload": {"model": "hf:base", "adapter": {"kind": "lora"}},
        "data": {
            "sources": [{"uri": "a.txt"}],
            "tokenizer": "base",
            "sequence_length": 64,
            "validation": {"share": 0.1},
        },
        "train": {"steps": 10, "global_batch": 4},
        "evaluate": {"every": 5},
        "parallel": {"zero": 0},
        "sinks": {},
    }


@pytest.mark.parametrize("hint", HINTS)
def test_the_keys_of_a_hint_are_there(hint: str) -> None:
    root: type[BaseModel] = spec.JobSpec
    for key in re.findall(rf"\b(?:{SECTIONS})(?:\.\w+)+", hint):
        *parents, last = key.split(".")
        assert last in ("jsonl", *_keys(root, parents)), key


@pytest.mark.parametrize("hint", HINTS)
def test_what_a_hint_writes_is_a_job(hint: str) -> None:
    """Hints such as `train.precision: bf16` and `checkpoint.average, as in {ema: 0.999}`."""
    for key, value in re.findall(r"((?:[a-z_]+\.)*[a-z_]+)(?:: |, as in )([\[{'].*[\]}']|[a-z0-9_]+$)", hint):
        given = document()
        override(given, f"{key}={value}")
        spec.parse(given)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.optimizer.min_lr", "train.optimizer.final_lr is min_lr divided by lr"),
        ("train.optimizer.no_decay", "biases and norms (vectors) never have weight decay"),
        ("gradient_clipping", "train.optimizer.clip"),
        ("workload.adapter.r", "workload.adapter.rank"),
        ("workload.lora", "workload.adapter, as in {kind: lora, rank: 16}"),
        ("train.resume_from", "run the same command again to resume from the last commit"),
        ("train.optimizer.beta", "did you mean 'betas'?"),
        ("train.micro_batch", "did you mean parallel.micro_batch?"),
        ("train.weight_decay", "did you mean train.optimizer.weight_decay?"),
        ("train.seed", "did you mean seed?"),
        ("train.every", "did you mean evaluate.every or checkpoint.every?"),
        ("train.optimizer.final_lrs", "did you mean 'final_lr'?"),
        ("train.patience", "did you mean stop_when.patience?"),
        ("data.weight", "did you mean data.sources.0.weight or "),
    ],
)
def test_an_unknown_key_has_a_hint_to_the_right_one(key: str, hint: str) -> None:
    given = document()
    override(given, f"{key}=4")
    with pytest.raises(InputError) as told:
        spec.parse(given)
    assert str(told.value.each()[0]).split("; ", 1)[1].startswith(hint)
