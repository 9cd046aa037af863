"""Supervised objectives under every kind of layout, and both engines: as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from base_run import save_class
from harness import Results, check_equal, reference_of
from rank_cases import job, micro_batches, workload_of
from rendezvous import recorded

from cluster.workers.process_gang import ProcessGang
from orchestrator.config.records import PREFERENCES, REWARDED
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import _labels_in

LABELS = ["bad", "fair", "good"]
TASKS: dict[str, dict[str, Any]] = {
    "classes": {"model": "bert-tiny", "objective": "sequence_classification", "labels": LABELS},
    "weighed": {
        "model": "bert-tiny",
        "objective": "sequence_classification",
        "labels": LABELS,
        "options": {"class_weights": {"bad": 0.1, "good": 3.0}},
    },
    "several": {
        "model": "bert-tiny",
        "objective": "multi_label_classification",
        "labels": LABELS,
        "options": {"class_weights": {"bad": 0.1, "good": 3.0}},
    },
    "alike": {"model": "bert-tiny", "objective": "sentence_embeddings"},
    "last": {"model": "gpt-tiny", "objective": "sequence_classification", "labels": LABELS},
    "number": {"model": "roberta-tiny", "objective": "regression"},
    "words": {"model": "bert-tiny", "objective": "token_classification", "labels": LABELS},
    "span": {"model": "bert-tiny", "objective": "span_extraction"},
    "pair": {"model": "t5-tiny", "objective": "seq2seq"},
    "dpo": {"model": "qwen3-tiny", "changes": {"kv_heads": 2}, "objective": "dpo"},
    "ipo": {"model": "gpt-tiny", "objective": "ipo"},
    "kto": {"model": "gpt-tiny", "objective": "kto"},
    "orpo": {"model": "gpt-tiny", "objective": "orpo"},
    "reward": {"model": "gpt-tiny", "objective": "reward"},
    "dpo of experts": {
        "model": "mixtral-tiny",
        "changes": {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}, "initial_std": 0.1},
        "objective": "dpo",
    },
    "talk": {"model": "qwen3-tiny", "changes": {"kv_heads": 2}, "objective": "conversation"},
    "grpo": {
        "model": "qwen3-tiny",
        "changes": {"kv_heads": 2},
        "objective": "grpo",
        "options": {"beta": 0.1},
    },
    "grpo by sequence": {
        "model": "gpt-tiny",
        "objective": "grpo",
        "options": {"importance_sampling_level": "sequence", "epsilon": 0.05, "loss_type": "dapo"},
    },
    "reinforce": {
        "model": "gpt-tiny",
        "objective": "reinforce",
        "options": {"loss_type": "dr_grpo", "beta": 0.1, "kl": "k2"},
    },
    "grpo of experts": {
        "model": "mixtral-tiny",
        "changes": {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}, "initial_std": 0.1},
        "objective": "grpo",
    },
    "experts": {
        "model": "mixtral-tiny",
        "changes": {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}, "initial_std": 0.1},
        "objective": "conversation",
    },
}
QUICK: list[tuple[str, dict[str, Any]]] = [
    ("classes", {"tp": 2, "sequence": True}),
    ("weighed", {"dp": 2, "zero": 1}),
    ("several", {"pp": 2}),
    ("alike", {"dp": 2, "zero": 3}),
    ("span", {"pp": 2}),
    ("words", {"dp": 2, "zero": 3}),
    ("talk", {"cp": 2}),
    ("dpo", {"cp": 2}),
    ("dpo", {"pp": 2}),
    ("reward", {"dp": 2, "zero": 3}),
    ("kto", {"dp": 2, "zero": 2}),
    ("grpo", {"tp": 2, "sequence": True}),
    ("grpo", {"dp": 2, "zero": 3}),
    ("grpo by sequence", {"cp": 2}),
    ("reinforce", {"pp": 2}),
]
REST: list[tuple[str, dict[str, Any]]] = [
    *((task, {"tp": 2}) for task in TASKS),
    *((task, {"pp": 2}) for task in TASKS if task != "alike"),
    *((task, {"dp": 2, "zero": zero}) for task in TASKS for zero in (0, 1, 2, 3)),
    *(
        (task, {"dp": 2, "zero": zero, "engine": "deepspeed"})
        for task in TASKS
        if task != "alike"
        for zero in (1, 3)
    ),
    *((task, {"tp": 2, "sequence": True}) for task in ("last", "number", "words", "span", "talk", "dpo")),
    *((task, {"cp": 2}) for task in ("ipo", "kto", "orpo", "dpo of experts")),
    *((task, {"cp": 2}) for task in ("grpo", "reinforce", "grpo of experts")),
    ("grpo of experts", {"dp": 2, "ep": 2}),
    ("grpo", {"pp": 2, "schedule": "zbv", "micro_batch": 2}),
    ("reward", {"tp": 2, "sequence": True}),
    ("dpo", {"pp": 2, "schedule": "zbv", "micro_batch": 2}),
    ("dpo of experts", {"dp": 2, "ep": 2}),
    ("experts", {"dp": 2, "ep": 2}),
    ("experts", {"cp": 2}),
    ("words", {"cp": 2}),
]


def case_of(task: str, layout: dict[str, Any]) -> dict[str, Any]:
    found = Layout(**{"micro_batch": 2, **layout})
    return {"name": task, **TASKS[task], "steps": 3, "layout": found.to_json(), "id": f"{task} {found}"}


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "all"])
def test_fine_tuning_is_the_same_under_every_layout(
    layouts: list[tuple[str, dict[str, Any]]], gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Asked for in prime-rl#1957, for conversations (talk)."""
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    cases = [case_of(*each) for each in layouts]
    alone = results.run_beside_one_process(2, cases)
    for case in cases:
        try:
            check_equal(results.of(case), results.of(alone[case["id"]]))
        except AssertionError as error:
            raise AssertionError(f"{case['id']}: {error}") from None


@pytest.mark.parametrize(
    "task",
    [
        name
        for name in TASKS
        if TASKS[name]["objective"] not in (*PREFERENCES, *REWARDED, "sentence_embeddings")
    ],
)
def test_what_is_predicted_is_counted_before_as_by_the_loss(task: str) -> None:
    """Else a mean beside the sum, as of routers, has another weight."""
    case = {"changes": {}, **TASKS[task]}
    spec = job(case)
    workload: Any = workload_of(spec)
    model = workload.build()
    model.load_state_dict({name: workload.initial(name, 3) for name in workload.shapes})
    of_spans = getattr(workload.config, "head", "") == "span"
    with recorded(0, 1):
        batches = micro_batches(workload, spec, Layout(micro_batch=4), 0)
    counted = [_labels_in(batch, of_spans) for batch in batches]
    with torch.no_grad():
        assert counted == pytest.approx([float(workload.loss(model, batch).count) for batch in batches])
    assert sum(counted) > 0


@pytest.mark.slow
def test_heads_and_preferences_of_a_class_run_as_it_is(
    gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    folder = save_class(tmp_path_factory.mktemp("class"), 160)
    tasks = {
        "sequence_classification": LABELS,
        "token_classification": LABELS,
        "span_extraction": [],
        "dpo": [],
    }
    cases = []
    for objective, labels in tasks.items():
        for layout in ({"zero": 0}, {"zero": 3}, {"zero": 2, "engine": "deepspeed"}):
            found = Layout(dp=2, micro_batch=2, **layout)
            fields = {"name": objective, "model": f"hf:{folder}", "changes": {}, "objective": objective}
            cases.append(
                {
                    **fields,
                    "labels": labels,
                    "steps": 3,
                    "layout": found.to_json(),
                    "id": f"{objective} {found}",
                }
            )
    alone = results.run_beside_one_process(2, cases)
    for case in cases:
        check_equal(results.of(case), results.of(alone[case["id"]]))


@pytest.mark.slow
def test_an_evaluation_between_steps_changes_no_gradient(
    gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Under ZeRO 2 it leaves the gathered weights behind, with which a step may not begin."""
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    layouts = [Layout(dp=2, zero=zero, micro_batch=micro) for zero in range(4) for micro in (2, 4)]
    cases = [
        {
            "name": "plain",
            "model": "gpt-tiny",
            "steps": 4,
            "evaluated": True,
            "layout": each.to_json(),
            "id": f"{each}",
        }
        for each in layouts
    ]
    alone = reference_of({**cases[0], "evaluated": False})
    results.run(1, [alone])
    results.run(2, cases)
    for case in cases:
        check_equal(results.of(case), results.of(alone))
