"""Of what each objective's loss is a mean."""

from __future__ import annotations

from orchestrator.config.loss_unit import counted, loss_unit, predicts_text
from orchestrator.config.records import COLUMNS
from workloads import objectives


def test_every_objective_counts_what_its_loss_is_divided_by() -> None:
    found: dict[str, set[str]] = {}
    for name in (*objectives.NAMES, "samples"):
        found.setdefault(counted(name), set()).add(name)
    assert found.pop("token") == {*objectives.OF_TEXT, "seq2seq", "conversation", "token_classification"}
    assert found == {
        "record": {
            *("sequence_classification", "multi_label_classification", "regression", "span_extraction"),
            *("sentence_embeddings", "kto"),
        },
        "pair": {"dpo", "ipo", "orpo", "reward"},
        "answer": {"grpo", "reinforce"},
        "sample": {"samples"},
    }


def test_only_text_has_the_entropy_of_its_tokens() -> None:
    assert all(map(predicts_text, objectives.OF_TEXT))
    assert not any(map(predicts_text, [*COLUMNS, "samples"]))


def test_what_is_no_logarithm_has_no_nats() -> None:
    told = {name for name in (*objectives.NAMES, "samples") if not loss_unit(name).startswith("nats ")}
    assert told == {"regression", "ipo", "kto", "grpo", "reinforce", "samples"}
