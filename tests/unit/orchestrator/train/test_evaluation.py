"""Which rank evaluates what, and what sums mean; that layouts give the same numbers is tested with real ranks."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import changed, job

from orchestrator.evaluate.config import EvaluateSpec, StopWhen
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.train.eval_sharding import shares
from orchestrator.train.evaluation import Evaluator
from orchestrator.train.evaluation_metrics import measures


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_micro_batch_is_one_rank_s_once(samples: int, size: int, ranks: int, most: int) -> None:
    """Whatever is left over: all ranks compute equally many in a pass, as collectives need it."""
    batch = size * ranks * most
    found = [shares(samples, size, batch, ranks, rank) for rank in range(ranks)]
    assert len({len(passes) for passes in found}) == 1
    for parts in zip(*found, strict=True):
        assert len({len(part) for part in parts}) == 1
        assert 0 < len(parts[0]) <= most
    numbers = sorted(n for passes in found for part in passes for n in part)
    there = -(-samples // size)
    assert numbers[:there] == list(range(there))
    assert len(numbers) == len(set(numbers)) < there + ranks


def test_sums_give_the_metrics_that_were_asked_for() -> None:
    sums = EvaluationSums(loss=200.0, tokens=100.0, correct=25.0)
    found = measures(sums, 0.25, ("loss", "perplexity", "bits_per_byte", "accuracy"))
    assert found == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2.0)),
        "bits_per_byte": pytest.approx(2.0 / math.log(2) / 4),
        "accuracy": 0.25,
        "tokens": 100.0,
    }
    assert measures(sums, 0.25, ("accuracy",)) == {"accuracy": 0.25, "tokens": 100.0}
    assert measures(EvaluationSums(loss=1e6, tokens=1.0), 1.0, ("perplexity",))["perplexity"] == math.inf


def test_an_evaluation_of_the_trainer_weighs_rows_and_not_tokens(tmp_path: Path) -> None:
    """transformers takes the mean of a batch's tokens for each row of it; here the sum is over all tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": torch.randint(3, 40, (length,))} for length in (3, 9, 5, 20, 4)]

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = [row["input_ids"] for row in batch]
        labels = torch.nn.utils.rnn.pad_sequence(tokens, True, -100)
        ids = torch.nn.utils.rnn.pad_sequence(tokens, True)
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, per_device_eval_batch_size=2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    theirs = trainer.evaluate()["eval_loss"]
    counts = [len(row["input_ids"]) - 1 for row in rows]
    with torch.no_grad():
        sums = [
            float(model(input_ids=row["input_ids"][None], labels=row["input_ids"][None]).loss) * count
            for row, count in zip(rows, counts, strict=True)
        ]
    batches = [slice(0, 2), slice(2, 4), slice(4, 5)]
    by_rows = sum(len(sums[each]) * sum(sums[each]) / sum(counts[each]) for each in batches) / len(rows)
    assert theirs == pytest.approx(by_rows, rel=1e-5)
    ours = measures(EvaluationSums(loss=sum(sums), tokens=sum(counts)), 1.0, ("loss",))["loss"]
    assert ours == pytest.approx(sum(sums) / sum(counts))
    assert abs(theirs - ours) > 0.1
    # The rest of an epoch is a step of its own in training, in which a row weighs twice as much.
    assert [len(batch["input_ids"]) for batch in trainer.get_train_dataloader()] == [2, 2, 1]


def test_torch_s_sampler_repeats_samples_where_ranks_do_not_divide_them() -> None:
    theirs = [list(torch.utils.data.DistributedSampler(range(5), 2, rank, shuffle=False)) for rank in (0, 1)]
    assert sorted(theirs[0] + theirs[1]) == [0, 0, 1, 2, 3, 4]
    ours = [shares(5, 1, 2, 2, rank) for rank in (0, 1)]
    numbers = sorted(number for passes in ours for part in passes for number in part)
    assert numbers == [0, 1, 2, 3, 4, 5], "the last one is of no sample and counts nothing"


def test_there_is_no_mean_of_nothing() -> None:
    """Zeros that stand for what is not there would be averaged, drawn and compared."""
    sums = EvaluationSums(sums={"chosen_reward": (0.0, 0.0), "rejected_reward": (-3.0, 2.0)})
    wanted = ("loss", "perplexity", "accuracy", "f1", "chosen_reward", "rejected_reward", "reward_margin")
    assert measures(sums, 0.25, wanted) == {"rejected_reward": -1.5, "tokens": 0.0}


def test_sums_add_what_routers_did() -> None:
    one = EvaluationSums(1.0, 2.0, 1.0, {"router": torch.tensor([0.0, 3.0, 1.0, 4.0, 4.0])})
    both = EvaluationSums() + one + one
    assert (both.loss, both.tokens, both.correct) == (2.0, 4.0, 2.0)
    assert measures(both, 1.0, ()) == {
        "router_load": 1.5,
        "router_dropped": 0.0,
        "router_entropy": 1.0,
        "tokens": 4.0,
    }


def test_metrics_of_all_predictions_do_not_depend_on_how_they_were_divided() -> None:
    from sklearn.metrics import matthews_corrcoef

    pairs = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]).double()
    whole = EvaluationSums(predictions=pairs)
    parts = EvaluationSums(predictions=pairs[[3, 5]]) + EvaluationSums(predictions=pairs[[0, 4, 2, 1]])
    for sums in (whole, parts):
        found = measures(sums, 1.0, ("f1", "matthews"))
        assert found["f1"] == pytest.approx((0.5 + 2 / 3 + 1) / 3)
        assert found["matthews"] == matthews_corrcoef(pairs[:, 1].int(), pairs[:, 0].int())
    few = EvaluationSums(predictions=pairs[:5])  # of three classes two are seen
    assert measures(few, 1.0, ("f1",), 3)["f1"] == pytest.approx((0.5 + 2 / 3) / 2)
    assert measures(few, 1.0, ("f1",), 2)["f1"] == pytest.approx(2 / 3)
    numbers = torch.tensor([[0.1, 1.0], [0.9, 2.5], [0.5, 2.0], [0.7, 3.0]]).double()
    assert measures(EvaluationSums(predictions=numbers), 1.0, ("spearman",))["spearman"] == pytest.approx(0.8)


class Watched:
    """A context that notes what a rank says about its progress."""

    def __init__(self) -> None:
        self.waiting = False
        self.is_working = False

    def set_waiting(self, now: bool) -> None:
        self.waiting = now

    def end_work(self) -> None:
        self.is_working = False


def test_only_a_batch_has_the_time_limit_of_a_step() -> None:
    """The first use of a metric may import its library from cold storage, and many predictions take long to sort."""
    found, context = object.__new__(Evaluator), Watched()
    computed = []

    def metrics(step: int, heeds_stop: bool) -> dict[str, dict[str, float]]:
        computed.append(context.waiting)
        return {"validation": {"f1": 0.5}}

    found._context, found._metrics_of_sets = context, metrics  # type: ignore[assignment, method-assign]
    found._has_average, found._sampler, found._measured = False, None, ""
    row = found.evaluate(step=4, attempt=1)
    assert row is not None
    assert row["sets"] == {"validation": {"f1": 0.5}}
    assert computed == [True]
    assert not context.waiting


def test_the_libraries_of_metrics_are_loaded_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation beside the run has a process of its own, so the ranks load nothing for it."""
    for where in ("beside", "gang"):
        monkeypatch.delitem(sys.modules, "sklearn.metrics", raising=False)
        spec = changed(
            job("a.jsonl"),
            workload={"model": "gpt-tiny", "objective": "sequence_classification"},
            data={"labels": ["a", "b"], "validation": {"share": 0.1}},
            evaluate={"every": 2, "metrics": ["f1", "matthews"], "where": where},
        )
        network = SimpleNamespace(moe=None)
        objective = SimpleNamespace(name=spec.workload.objective)
        workload = SimpleNamespace(config=network, objective=objective, has_own_values=False)
        inputs: Any = SimpleNamespace(sets={}, prompts=None, workload=workload)
        nobody: Any = None
        Evaluator(
            Layout(),
            context=nobody,
            engine=nobody,
            inputs=inputs,
            evaluate=spec.evaluate,
            stop_when=spec.stop_when,
            train=spec.train,
            sequence_length=spec.data.sequence_length,
            classes=len(spec.data.labels),
            cut=lambda batch: batch,
            measured={},
            has_average=False,
        )
        assert ("sklearn.metrics" in sys.modules) == (where == "gang")


def test_further_evaluations_end_no_run() -> None:
    """A search asks for them where it decides; the patience of its job is in those that the job asks for."""
    found = object.__new__(Evaluator)
    found._spec, found._stop_when, found._steps = EvaluateSpec(every=10, at=[4]), StopWhen(), 12
    assert [found.stop_when(step) is not None for step in (4, 10, 12)] == [False, True, True]
