"""Which matrices are pruned, and what a model must have."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import changed, job, write_text

from orchestrator.config.errors import InputError
from orchestrator.launch.job_checks import check_job
from orchestrator.prune.config import PruneSpec
from orchestrator.prune.names import pruned_names
from workloads.load import load
from workloads.workload import Vocabulary

HALF = {"sparsity": 0.5, "steps": [2, 10]}
SIZES = {"hidden": 32, "heads": 4, "layers": 2}


def names_of(model: str, objective: str, changes: dict[str, Any], **prune: Any) -> list[str]:
    vocabulary = Vocabulary(160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))
    workload = load(model, objective, vocabulary, changes=SIZES | changes, sequence_length=16)
    return pruned_names(PruneSpec(**HALF, **prune), workload)


@pytest.mark.parametrize(
    ("model", "objective", "changes", "last"),
    [
        ("gpt-tiny", "causal_lm", {}, {"query", "key", "value", "output", "up", "down"}),
        ("bert-tiny", "masked_lm", {}, {"query", "key", "value", "output", "up", "down"}),
        ("t5-tiny", "span_corruption", {}, {"query", "key", "value", "output", "up", "down"}),
        (
            "mixtral-tiny",
            "causal_lm",
            {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}},
            {"query", "key", "value", "output", "gate", "up", "down"},
        ),
        (
            "qwen1.5-moe-a2.7b",
            "causal_lm",
            {"moe": {"experts": 4, "top_k": 2, "intermediate": 32, "shared": 2}},
            {"query", "key", "value", "output", "gate", "up", "down"},
        ),
        (
            "xlnet-base",
            "permuted_lm",
            {"kv_heads": 4, "head_dim": 8},
            {"query", "key", "value", "output", "distance", "up", "down"},
        ),
    ],
)
def test_they_are_the_matrices_of_the_layers(
    model: str, objective: str, changes: dict[str, Any], last: set[str]
) -> None:
    names = names_of(model, objective, changes)
    assert names == sorted(names)
    assert {name.removesuffix(".weight").rpartition(".")[2].removesuffix("_weight") for name in names} == last
    assert all(".layers." in f".{name}" for name in names)


def test_patterns_choose_others() -> None:
    assert names_of("gpt-tiny", "causal_lm", {}, match=["tokens.*", "*.0.*.up.*"]) == [
        "layers.0.feedforward.up.weight",
        "tokens.weight",
    ]


@pytest.mark.parametrize(
    ("prune", "parts", "words"),
    [
        ({**HALF, "match": ["*.norm.*"]}, {}, r"prune\.match.*matches no trained matrix"),
        (HALF, {"train": {"freeze": ["*layers*"]}}, "no layer of .* has a trainable weight matrix"),
        ({"pattern": "3:7", "steps": [2, 2]}, {}, r"prune\.pattern.*no rows of whole groups of 7"),
        (HALF, {"parallel": {"engine": "deepspeed", "zero": 1}}, "set parallel.engine to torch"),
    ],
)
def test_what_cannot_be_pruned_is_refused_before_the_run(
    tmp_path: Any, prune: dict[str, Any], parts: dict[str, Any], words: str
) -> None:
    spec = changed(job(write_text(tmp_path, 2000)), prune=prune, **parts)
    with pytest.raises(InputError, match=words):
        check_job(spec)
