"""A student beside its teacher under every kind of layout: the losses and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Results, check_equal
from lasting_gang import LastingGang

TEACHER = {"model": "gpt-tiny", "changes": {"hidden": 48, "layers": 4, "initial_std": 0.2}}
LOGITS = {"teacher": "none", "labels": 0.3, "logits": {"weight": 0.7, "temperature": 2.0}}
GPT: dict[str, Any] = {"model": "gpt-tiny", "changes": {"initial_std": 0.1}, "teacher": TEACHER}
BERT: dict[str, Any] = {
    "model": "bert-tiny",
    "objective": "masked_lm",
    "changes": {"initial_std": 0.1},
    "teacher": {"model": "bert-tiny", "changes": {"hidden": 48, "layers": 4, "initial_std": 0.2}},
}
INNER = {
    **LOGITS,
    "hidden": {"weight": 0.5, "layers": [[0, 0], [1, 2], [2, 4]]},
    "relations": {"weight": 2.0, "of": ["attention", "scores", "queries", "values"]},
}


def case(name: str, layout: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """A case of three steps."""
    shown = "-".join(f"{key}{value}" for key, value in layout.items())
    return {"id": f"{name}-{shown}", "name": name, "layout": layout, "steps": 3, **rest}


def divergences(kind: str) -> dict[str, Any]:
    return {**LOGITS, "logits": {**LOGITS["logits"], "divergence": kind}}


MOE = {"moe": {"experts": 4, "intermediate": 32}, "kv_heads": 2, "initial_std": 0.1}
MIXTRAL = {"model": "mixtral-tiny", "changes": MOE, "teacher": {"model": "mixtral-tiny", "changes": MOE}}
SHORT = [
    case("gpt", {"dp": 2, "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt", {"dp": 2, "zero": 3, "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt-divided", {"dp": 2, "micro_batch": 1}, **GPT, distill={**LOGITS, "shard": True}),
    case("gpt", {"tp": 2, "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt", {"pp": 2, "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt", {"cp": 2, "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt-reverse", {"tp": 2, "micro_batch": 2}, **GPT, distill=divergences("reverse")),
    case("gpt-js", {"tp": 2, "micro_batch": 2}, **GPT, distill=divergences("jensen_shannon")),
    case("bert-inner", {"tp": 2, "micro_batch": 2}, **BERT, distill=INNER),
    case("bert-inner", {"dp": 2, "zero": 3, "micro_batch": 2}, **BERT, distill=INNER),
]

MINILM = {
    "teacher": "none",
    "labels": 0.0,
    "logits": None,
    "relations": {"heads": 8, "of": ["queries", "keys", "values"]},
}
SIX = {"global_batch": 6}
LONG = [
    case("gpt-zero2", {"dp": 2, "zero": 2, "micro_batch": 1}, **GPT, distill=LOGITS),
    # Three micro-batches on two ranks: the second rank gets one without labels, and gathers with the first.
    case("gpt-uneven", {"dp": 2, "micro_batch": 2}, **GPT, train=SIX, distill={**LOGITS, "shard": True}),
    case("gpt-divided", {"cp": 2, "micro_batch": 2}, **GPT, distill={**LOGITS, "shard": True}),
    case("gpt-divided", {"dp": 2, "zero": 3, "micro_batch": 2}, **GPT, distill={**LOGITS, "shard": True}),
    case("bert-divided", {"dp": 2, "zero": 1, "micro_batch": 2}, **BERT, distill={**INNER, "shard": True}),
    case("moe-divided", {"dp": 2, "ep": 2, "micro_batch": 2}, **MIXTRAL, distill={**LOGITS, "shard": True}),
    case("gpt-drop", {"tp": 2, "micro_batch": 1}, **GPT, dropout=0.2, distill=LOGITS),
    case("gpt-recompute", {"tp": 2, "recompute": "full", "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt-sequence", {"tp": 2, "sequence": True, "micro_batch": 2}, **GPT, distill=LOGITS),
    case("gpt-interleaved", {"pp": 2, "schedule": "interleaved", "micro_batch": 1}, **GPT, distill=LOGITS),
    case("gpt-inner", {"dp": 2, "zero": 1, "micro_batch": 2, "recompute": "full"}, **GPT, distill=INNER),
    case("moe", {"dp": 2, "ep": 2, "micro_batch": 2}, **MIXTRAL, distill=LOGITS),
    case("minilm", {"dp": 2, "zero": 3, "micro_batch": 2}, **BERT, distill=MINILM),
    case("minilm", {"tp": 2, "micro_batch": 2}, **BERT, distill=MINILM),
    case(
        "classes",
        {"tp": 2, "micro_batch": 2},
        **{**BERT, "objective": "sequence_classification"},
        labels=["a", "b", "c"],
        distill=LOGITS,
    ),
    case(
        "words",
        {"dp": 2, "zero": 3, "micro_batch": 2},
        **{**BERT, "objective": "token_classification"},
        labels=["a", "b", "c", "d"],
        distill=divergences("reverse"),
    ),
    case(
        "pair",
        {"tp": 2, "micro_batch": 2},
        model="t5-tiny",
        objective="seq2seq",
        changes={"initial_std": 0.1},
        teacher={"model": "t5-tiny", "changes": {"hidden": 48}},
        distill=LOGITS,
    ),
    case(
        "talk",
        {"dp": 2, "zero": 3, "micro_batch": 2},
        **GPT,
        objective="conversation",
        distill=divergences("jensen_shannon"),
    ),
]
"""Every kind of objective and of student, under layouts that treat them differently."""


@pytest.mark.slow
def test_every_kind_of_student_trains_as_one_process(tmp_path: Path, gang: LastingGang) -> None:
    results = Results(tmp_path, gang)
    alone = results.run_beside_one_process(2, LONG)
    for each in LONG:
        check_equal(results.of(each), results.of(alone[each["id"]]))


def test_every_layout_trains_as_one_process(tmp_path: Path, gang: LastingGang) -> None:
    results = Results(tmp_path, gang)
    alone = results.run_beside_one_process(2, SHORT)
    for each in SHORT:
        found, wanted = results.of(each), results.of(alone[each["id"]])
        check_equal(found, wanted)
        if each["name"] == "gpt-divided":
            # Each rank has half of every parameter, rounded up.
            assert 0.5 <= found["held"] / wanted["held"] < 0.51
            # The ranks wait for each other's part of the teacher, so no rank knows how long it computed alone.
            assert found["busy"] == 0 < wanted["busy"]
        parts = {"label_loss", "logit_loss"}
        parts |= {"hidden_loss", "relation_loss"} if each["name"] == "bert-inner" else set()
        assert parts <= found["extras"][0].keys()
        assert all(found["extras"][0][name] > 1e-3 for name in parts)
        for mine, theirs in zip(found["extras"], wanted["extras"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
