"""Class weights and several labels: the losses of torch, by number, however a batch is cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, precision_score, recall_score
from sklearn.utils.class_weight import compute_class_weight

from orchestrator.config.errors import InputError
from orchestrator.resolve.training_inputs import _weighed
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.objectives.samples import Samples
from workloads.objectives.supervised import balanced
from workloads.record_format import pack
from workloads.workload import Vocabulary

KNOWN = Vocabulary(60, eos=2, pad=3, cls=1, sep=2)
LABELS = ("a", "b", "c")
WEIGHTS = (0.2, 1.5, 3.0)
NAMED = dict(zip(LABELS, WEIGHTS, strict=True))
TEXTS = [np.random.default_rng(n).integers(5, 60, 6) for n in range(12)]
RECORDS: dict[str, Any] = {
    "sequence_classification": lambda n: pack([TEXTS[n], [], [(n * n) % 3]]),
    "token_classification": lambda n: pack([TEXTS[n], [1 + (n + place) % 3 for place in range(5)] + [0]]),
    "multi_label_classification": lambda n: pack([TEXTS[n], [], [i for i in range(3) if (n >> i) % 2]]),
}


def made(objective: str, weights: Any) -> tuple[Any, Any]:
    workload = load(
        "bert-tiny",
        objective,
        KNOWN,
        changes={"hidden": 32, "layers": 1, "heads": 2, "intermediate": 32},
        options={"class_weights": weights},
        sequence_length=16,
        labels=LABELS,
    )
    model = workload.build()
    model.load_state_dict({name: 20 * workload.initial(name, 0) for name in workload.shapes})
    return workload, model


def weighed(workload: Any, model: Any, parts: Iterable[list[int]], objective: str) -> float:
    read = Samples(RECORDS[objective], 12)
    losses = [workload.loss(model, workload.objective.collate(read, part, 0)) for part in parts]
    return float(sum(loss.total for loss in losses) / sum(loss.count for loss in losses))


@pytest.mark.parametrize("objective", RECORDS)
def test_the_weighted_mean_is_torchs_and_does_not_depend_on_micro_batches(objective: str) -> None:
    workload, model = made(objective, NAMED)
    batch = workload.objective.collate(Samples(RECORDS[objective], 12), list(range(12)), 0)
    output = model(batch)
    weight = torch.tensor(WEIGHTS)
    if objective == "multi_label_classification":
        wanted = F.binary_cross_entropy_with_logits(
            output.sentence, batch["sequence_labels"], pos_weight=weight
        )
    elif objective == "sequence_classification":
        wanted = F.cross_entropy(output.sentence, batch["sequence_labels"], weight=weight)
    else:
        wanted = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), weight=weight)
    for parts in ([list(range(12))], [[0], [1, 2, 3], list(range(4, 12))]):
        assert weighed(workload, model, parts, objective) == pytest.approx(wanted.item(), rel=1e-6)
    plain, _ = made(objective, ())
    assert weighed(plain, model, [list(range(12))], objective) != pytest.approx(wanted.item(), rel=1e-3)


def test_balanced_weights_are_those_of_scikit_learn_and_of_pos_weight() -> None:
    workload, _ = made("sequence_classification", "balanced")
    numbers = [(n * n) % 3 for n in range(12)] + [2, 2, 1]
    found = balanced(workload.objective, [pack([[5], [], [n]]) for n in numbers]).class_weights
    assert found == pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=numbers))
    workload, _ = made("multi_label_classification", "balanced")
    found = balanced(
        workload.objective, [RECORDS["multi_label_classification"](n) for n in range(8)]
    ).class_weights
    assert found == pytest.approx((1.0, 1.0, 1.0))
    with pytest.raises(WorkloadError, match="no record is 'c'"):
        balanced(workload.objective, [pack([[5], [], [0, 1]])])


def test_precision_recall_and_f1_of_several_labels_are_scikit_learns() -> None:
    objective = "multi_label_classification"
    workload, model = made(objective, ())
    batch = workload.objective.collate(Samples(RECORDS[objective], 12), list(range(12)), 0)
    said = (model(batch).sentence > 0).numpy()
    wanted = batch["sequence_labels"].numpy() > 0
    assert 0 < said.sum() < said.size
    loss = workload.loss(model, batch)
    found = {name: float(total / count) for name, (total, count) in loss.sums.items()}
    measures = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
    assert {n: found[n] for n in measures} == pytest.approx(
        {n: of(wanted, said, average="micro") for n, of in measures.items()}
    )
    assert found["accuracy"] == pytest.approx((said == wanted).all(1).mean())


@pytest.mark.parametrize(
    ("weights", "says"),
    [({"d": 1.0}, "names 'd'"), ([1.0], "1 weights for 3"), ("even", "make it \"balanced\""), ([0, 1, 1], "above 0")],
)  # fmt: skip
def test_weights_that_fit_no_label_are_refused(weights: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        made("sequence_classification", weights)


def test_balanced_weights_need_all_records() -> None:
    workload, _ = made("sequence_classification", "balanced")
    with pytest.raises(InputError, match=r"leave data\.streaming out"):
        _weighed(workload, cast(Any, None), streams=True)
