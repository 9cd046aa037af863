"""Pairs of answers in a row: what is read of them, what is cut and lost, and what their losses are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from workloads import objectives
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.model.losses import token_loss
from workloads.model.masks import attends
from workloads.objectives.preferences import comparable, log_probabilities, means, truncated
from workloads.objectives.samples import Samples
from workloads.record_format import MARK, pack
from workloads.workload import Vocabulary

KNOWN = Vocabulary(60, eos=2, pad=1, bos=0)
LENGTH, HALF = 16, 8
SMALL = {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "max_positions": HALF}


def made(name: str, **options: Any) -> Any:
    return objectives.build(name, vocabulary=KNOWN, sequence_length=LENGTH, seed=0, **options)


def record(prompt: list[int], *answers: list[int]) -> np.ndarray:
    return pack([[*prompt, *(token | MARK for token in answer)] for answer in answers])


def test_each_answer_has_half_a_row_and_sees_itself_alone() -> None:
    batch = made("dpo").collate(Samples(lambda n: record([5, 6], [7, 8, 9], [10]), 1), [0], 0)
    assert batch["tokens"][0].tolist() == [5, 6, 7, 8, 9, 1, 1, 1, 5, 6, 10, 1, 1, 1, 1, 1]
    assert batch["labels"][0, :6].tolist() == [-100, 7, 8, 9, -100, -100]
    assert batch["labels"][0, 8:11].tolist() == [-100, 10, -100]
    assert batch["positions"][0, :5].tolist() == [*batch["positions"][0, 8:13].tolist()[:3], 3, 4]
    assert batch["answer_tokens"].tolist() == [[3, 1]]
    assert batch["compared"].tolist() == [True]
    seen = attends(batch)[0]
    assert seen[4, :5].all()
    assert not seen[8:11, :8].any()
    assert not seen[3, 4:].any()


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "reward"])
def test_what_is_cut_what_is_lost_and_what_is_alike_afterwards(name: str) -> None:
    long = list(range(20, 30))
    end, start = made(name), made(name, truncate="start")
    fits = record([5] * 6, [7, 8], [9])
    assert not end.is_cut(fits)
    assert not end.is_lost(fits)
    lost = record([5] * 8, [7, 8], [9])
    assert end.is_cut(lost)
    assert end.is_lost(lost)
    assert not start.is_lost(lost)
    alike = record([5, 6], [*long, 7], [*long, 8])
    assert end.is_lost(alike)
    assert not start.is_lost(alike)
    assert truncated(np.arange(20), start).tolist() == list(range(12, 20))
    assert not comparable([np.array([5, 7 | MARK]), np.array([5, 7 | MARK])])
    batch = end.collate(Samples(lambda n: (fits, lost, alike)[n], 3), [0, 1, 2], 0)
    assert batch["compared"].tolist() == [True, False, False]


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "reward"])
def test_a_pair_that_is_lost_changes_neither_loss_nor_gradient(name: str) -> None:
    workload = load("gpt-tiny", name, KNOWN, changes=SMALL, sequence_length=LENGTH)
    model = workload.build()
    model.load_state_dict({tensor: workload.initial(tensor, 0) for tensor in workload.shapes})
    records = [record([5, 6], [7, 8, 9], [10]), record([5] * 9, [7, 8], [9]), record([4], [9, 3], [8, 7, 6])]
    read = Samples(lambda n: records[n], 3)
    found = []
    for ids in ([0, 2], [0, 1, 2]):
        batch = workload.objective.collate(read, ids, 0) | {"reference": torch.full((len(ids), 2), -9.0)}
        loss = workload.loss(model, batch)
        model.zero_grad()
        loss.total.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert float(loss.count) == 2
        assert all(float(count) == 2 for _, count in loss.sums.values())
        found.append((loss.total.detach(), *(total for total, _ in loss.sums.values()), *gradients))
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(one, other)


def test_an_answer_that_is_certain_has_a_gradient() -> None:
    orpo, batch = made("orpo"), {"answer_tokens": torch.tensor([[3, 3]]), "compared": torch.tensor([True])}
    for other in (-4.0, 0.0):
        said = torch.tensor([[0.0, other]], requires_grad=True)
        loss = orpo.compare(said, batch).total  # type: ignore[attr-defined]
        loss.backward()
        assert torch.isfinite(loss)
        assert said.grad is not None
        assert torch.isfinite(said.grad).all()


def test_smoothing_is_not_of_the_hinge_loss() -> None:
    with pytest.raises(WorkloadError, match="the loss hinge has no label_smoothing"):
        made("dpo", loss="hinge", label_smoothing=0.3)
    assert made("dpo", loss="hinge")


def test_label_smoothing_is_the_loss_of_pairs_of_which_some_are_the_wrong_way_round() -> None:
    said, batch = torch.tensor([[-3.0, -4.0], [-9.0, -2.0]]), {
        "reference": torch.tensor([[-3.5, -3.5], [-5.0, -5.0]]), "compared": torch.ones(2, dtype=torch.bool)
    }  # fmt: skip
    turned = {**batch, "reference": batch["reference"].flip(1)}
    plain, wrong = made("dpo").compare(said, batch).total, made("dpo").compare(said.flip(1), turned).total
    smooth = made("dpo", label_smoothing=0.1).compare(said, batch)
    torch.testing.assert_close(smooth.total, 0.9 * plain + 0.1 * wrong)
    found = means({name: (float(total), float(count)) for name, (total, count) in smooth.sums.items()})
    assert found["chosen_log_probability"] == -6.0
    assert found["reward_margin"] == pytest.approx(0.1 * (1.0 - 7.0) / 2)
    assert found["accuracy"] == 0.5


def test_log_probabilities_are_sums_over_the_tokens_of_each_answer() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, LENGTH, 60), torch.randint(0, 60, (2, LENGTH))
    labels[0, 3:9] = -100
    found = log_probabilities(logits, labels, token_loss)
    scores = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    wanted = (scores * (labels != -100)).unflatten(1, (2, HALF)).sum(-1)
    torch.testing.assert_close(found, wanted)


def test_rows_are_of_even_length_and_positions_those_of_half_of_them() -> None:
    load("gpt-tiny", "dpo", KNOWN, changes=SMALL, sequence_length=LENGTH)
    with pytest.raises(WorkloadError, match="sequence_length 9 exceeds the 8 positions"):
        load("gpt-tiny", "dpo", KNOWN, changes=SMALL, sequence_length=18)
    with pytest.raises(
        WorkloadError, match="sequence_length is 15, of which each answer has half; make it even"
    ):
        objectives.build("dpo", vocabulary=KNOWN, sequence_length=15, seed=0)
    with pytest.raises(WorkloadError, match=r"label_smoothing is 0.5; make it at least 0 and below 0.5"):
        made("dpo", label_smoothing=0.5)


class Sectioned(Samples):
    """Samples of two sources of unequal size, whose ids are index x 2 + source."""

    def companions(self, sample: int) -> range:
        return range(sample % 2, 2 * (10 if sample % 2 else 100), 2)


def test_an_unpaired_answer_is_compared_with_one_that_may_be_read_along() -> None:
    """Where more text may come later these are of the same section and source, whatever is there by chance."""
    asked: list[int] = []

    def read(number: int) -> np.ndarray:
        assert number % 2 == 0 or number < 20, "there is no such sample"
        asked.append(number)
        return pack([[5, 6 + number, *(token | MARK for token in [7, 8])], [1]])

    text = Sectioned(read, 110)
    for sample, other in ((120, 122), (198, 0), (3, 5), (19, 1)):
        asked.clear()
        made("kto").collate(text, [sample], 0)
        assert asked == [sample, other]


def unpaired(prompts: list[int]) -> Samples:
    """Records whose answers are the number of the record, counted from 20."""
    return Samples(lambda n: pack([[5, prompts[n], 20 + n | MARK], [1]]), len(prompts))


@pytest.mark.parametrize("repeats", [1, 2, 4, 7])
def test_mismatched_pairs_do_not_share_a_prompt_where_its_rows_stand_together(repeats: int) -> None:
    prompts = [prompt for prompt in (7, 8, 9, 10, 11) for _ in range(repeats)]
    batch = made("kto").collate(unpaired(prompts), range(len(prompts)), 0)
    assert bool(batch["mismatched"].all())
    for number, row in enumerate(batch["tokens"][:, HALF:].tolist()):
        assert row[:2] == [5, prompts[number]]
        assert prompts[row[2] - 20] != prompts[number]


def test_few_records_are_read_to_find_another_prompt() -> None:
    prompts = [7] * 1000 + [8]
    asked: list[int] = []
    text = unpaired(prompts)
    made("kto").collate(Samples(lambda n: asked.append(n) or text(n), len(prompts)), [0], 0)  # type: ignore[func-returns-value]
    assert len(asked) <= 1 + 10


def test_of_a_single_prompt_no_pair_counts_as_mismatched() -> None:
    workload = load("gpt-tiny", "kto", KNOWN, changes=SMALL, sequence_length=LENGTH)
    batch = workload.objective.collate(unpaired([7, 7, 7]), [0, 1, 2], 0)
    assert not bool(batch["mismatched"].any())
    said = torch.tensor([[-3.0, -4.0]] * 3)
    loss = workload.objective.compare(said, {**batch, "reference": said - 1, "baseline": torch.tensor(0.0)})  # type: ignore[attr-defined]
    assert [float(value) for value in loss.sums["divergence"]] == [0.0, 0.0]
    assert float(loss.count) == 3


def test_a_run_of_an_earlier_version_keeps_the_next_record() -> None:
    for rule in (4, 5):
        kto = objectives.build("kto", vocabulary=KNOWN, sequence_length=LENGTH, seed=0, rule=rule)
        batch = kto.collate(unpaired([7, 7, 8, 8]), range(4), 0)
        assert batch["tokens"][:, HALF + 2].tolist() == [21, 22, 23, 20]
        assert bool(batch["mismatched"].all())


def test_a_reward_model_whose_padding_ends_answers_cannot_be_exported() -> None:
    """transformers would read the token before the last one."""
    for pad, is_refused in ((KNOWN.eos, True), (KNOWN.pad, False)):
        known = Vocabulary(60, eos=2, pad=pad, bos=0)
        workload = load("gpt-tiny", "reward", known, changes=SMALL, sequence_length=LENGTH)
        with pytest.raises(WorkloadError, match="a separate pad token") if is_refused else nullcontext():
            workload.check_hf()
