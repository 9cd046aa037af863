"""Answers with the bits that training computes: their probabilities are training's, whatever the draft was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.config.workload import AdapterSpec, WorkloadSpec
from orchestrator.parallel.layout import Layout
from orchestrator.train.config import TrainSpec
from orchestrator.train.rollouts.advantages import advantages
from orchestrator.train.rollouts.config import RolloutSpec, trains_as_it_reads
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.rollout_data import Rollout, Scored
from orchestrator.train.rollouts.rollouts import Rollouts
from orchestrator.train.rollouts.rows import Rows
from orchestrator.train.rollouts.training_pass import TrainingPass
from workloads.adapters.adapter import Adapter
from workloads.errors import LogitsNotFinite
from workloads.hf.check.parity_table import VOCABULARY, random_state
from workloads.model.answers import Drawn, draw_answers
from workloads.model.exact_answers import Draft, exact_answers
from workloads.model.presets import PRESETS
from workloads.objectives import build
from workloads.objectives.rewarded import SAMPLED, Grpo, log_probabilities, tempered
from workloads.objectives.sampled import IGNORE
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch, Loss, Sampling

SMALL = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 96, "vocab_size": 40, "max_positions": 24}
EXPERTS = {"moe": {"experts": 4, "intermediate": 48}, "kv_heads": 2}
PROMPTS = [[5, 9, 3], [7, 8], [11, 4, 30, 8, 21], [6, 6]]
GROUP, LENGTH, MOST, ROWS = 4, 24, 12, 16
NUMBERS = [[prompt * GROUP + k for k in range(GROUP)] for prompt in range(len(PROMPTS))]
ENDS = (2, 9)


class Place:
    """A model, and how its answers are drawn and trained on, in micro-batches of 4 rows."""

    def __init__(
        self,
        name: str = "qwen3-tiny",
        temperature: float = 1.0,
        adapter: Adapter | None = None,
        **changes: Any,
    ) -> None:
        config = PRESETS[name].changed({**SMALL, **changes})
        objective = build("grpo", vocabulary=VOCABULARY, sequence_length=LENGTH, seed=7)
        assert isinstance(objective, Grpo)
        self.workload = TransformerWorkload(name, config, objective, VOCABULARY)
        if adapter is not None:
            self.workload = self.workload.with_adapter(adapter)
        self.model: nn.Module = self.workload.build()
        self.model.load_state_dict({key: 2.0 * value for key, value in random_state(self.workload).items()})
        self.model.eval()
        spec = RolloutSpec(group=GROUP, max_tokens=MOST, temperature=temperature)
        self.rows = Rows(objective, spec, LENGTH, has_experts=bool(config.moe), dropout_seed=None)
        self.training_pass = TrainingPass(self.rows, 4, torch.device("cpu"))
        self.sampling: dict[str, Any] = {
            "sampling": Sampling(temperature=temperature, seed=3, is_race=True),
            "ends": ENDS,
            "ended": None,
        }

    @property
    def draft(self) -> Draft:
        return partial(draw_answers, self.model, self.workload.config, **self.sampling)

    def exact(self, draft: Draft | None = None, together: int = len(PROMPTS)) -> list[list[Drawn]]:
        """Return the answers to all prompts, made in units of so many prompts."""
        found = []
        for first in range(0, len(PROMPTS), together):
            numbers = NUMBERS[first : first + together]
            row = first * GROUP
            found += exact_answers(
                draft or self.draft,
                partial(self.training_pass.read, self.model, row),
                self.training_pass.passes(row, len(numbers) * GROUP),
                PROMPTS[first : first + together],
                numbers,
                MOST,
                **self.sampling,
            )
        return found

    def cached(self) -> list[list[Drawn]]:
        return self.draft(prompts=PROMPTS, numbers=NUMBERS, max_tokens=MOST)

    def batches(self, answers: Sequence[Sequence[Drawn]]) -> list[Batch]:
        """Return the micro-batches that train on these answers."""
        prompts = [Prompt(number, tokens, {}, 0) for number, tokens in enumerate(PROMPTS)]
        scored = [[Scored(drawn, "", {}, len(drawn.tokens)) for drawn in each] for each in answers]
        step = advantages(torch.tensor([[each.reward for each in one] for one in scored]).numpy(), "group")
        return [
            self.rows.batch(prompts, scored, step, rows=range(first, first + 4), is_stale=False)
            for first in range(0, ROWS, 4)
        ]

    def trained(self, answers: Sequence[Sequence[Drawn]]) -> list[Loss]:
        """Return the losses of the micro-batches that train on these answers."""
        self.model.train()
        losses = [self.workload.loss(self.model, batch) for batch in self.batches(answers)]
        self.model.eval()
        return losses

    def differences(self, answers: Sequence[Sequence[Drawn]]) -> list[float]:
        """Return the sums of the differences between training's log-probabilities and those of the answers."""
        return [loss.sums["sampler_difference"][0].item() for loss in self.trained(answers)]


@pytest.mark.parametrize(
    "kind", ["lora", "rslora", "dora", "prefix", "prompt", "p_tuning", "houlsby", "bitfit"]
)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_have_the_bits_of_training_too(precision: torch.dtype, kind: str) -> None:
    """So their later updates compare with what generation has computed, without a pass of their own."""
    linear = kind in ("lora", "rslora", "dora")
    adapter = Adapter(kind, rank=2, alpha=8.0, targets=("*.attention.*", "*.feedforward.*") if linear else ())
    place = Place("gpt-tiny" if kind == "bitfit" else "qwen3-tiny", adapter=adapter, max_positions=28)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        answers = place.exact()
        assert place.differences(answers) == [0.0] * 4


@pytest.mark.parametrize("together", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "temperature"), [("qwen3-tiny", 1.0), ("gpt-tiny", 0.7)], ids=["rotary", "learned, colder"]
)
def test_probabilities_are_those_of_training_to_the_bit(name: str, temperature: float, together: int) -> None:
    """Asked for in miles#1031."""
    place = Place(name, temperature)
    answers = place.exact(together=together)
    assert place.differences(answers) == [0.0] * 4
    assert max(place.differences(place.cached())) > 0.0, (
        "the cache adds in the same order, so this proves nothing"
    )
    # The tokens equal those of the cache; only the last bits of their probabilities differ.
    assert [[each.tokens for each in one] for one in answers] == [
        [each.tokens for each in one] for one in place.cached()
    ]
    for one, other in zip(*map(itertools.chain.from_iterable, (answers, place.cached())), strict=True):
        assert one.entropy == pytest.approx(other.entropy, abs=1e-4)
        assert one.ended == other.ended
    assert {each.ended for one in answers for each in one} == {True, False}


def test_they_are_so_in_bfloat16_whose_cache_differs_more() -> None:
    place = Place()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers = place.exact()
        assert place.differences(answers) == [0.0] * 4
        assert max(place.differences(place.cached())) > 1e-3


def test_experts_too_if_a_unit_has_whole_micro_batches() -> None:
    place = Place("mixtral-tiny", **EXPERTS)
    assert place.differences(place.exact(together=2)) == [0.0] * 4


@pytest.mark.parametrize("flaw", ["another model", "nothing right"])
def test_no_answer_depends_on_its_draft(flaw: str) -> None:
    place = Place()
    other = Place()
    other.model.load_state_dict({name: 1.2 * value for name, value in place.model.state_dict().items()})
    calls = []

    def draft(**asked: Any) -> list[list[Drawn]]:
        calls.append(asked)
        if flaw == "another model":
            return other.draft(**asked)
        begun = asked.get("begun", [()] * sum(map(len, asked["numbers"])))
        more = [1] * asked["max_tokens"]
        drawn = iter([Drawn([*tokens, *more], [], 0.0, False) for tokens in begun])
        return [[next(drawn) for _ in numbers] for numbers in asked["numbers"]]

    assert place.exact(draft) == place.exact()
    assert len(calls) > 1


@pytest.mark.parametrize("trains_as_it_reads", [True, False])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_later_updates_compare_with_what_the_passes_have_computed(
    precision: torch.dtype, trains_as_it_reads: bool
) -> None:
    """So the forward pass that computes it again is left out where training runs the same program."""
    place = Place(temperature=0.7)
    passes = []

    def computed(batch: Batch) -> torch.Tensor:
        labels = batch["labels"]
        return log_probabilities(tempered(place.model(batch).logits, batch), labels).where(
            labels != IGNORE, 0.0
        )

    def token_log_probabilities(batches: Sequence[Batch]) -> list[torch.Tensor]:
        passes.append(len(batches))
        return list(map(computed, batches))

    with torch.no_grad(), torch.autocast("cpu", precision, enabled=precision != torch.float32):
        batches = place.batches(place.exact())
        rollout = Rollout(batches, 0, {}, [], [], 0)
        context: Any = SimpleNamespace(rank_info=SimpleNamespace(rank=0))
        engine: Any = SimpleNamespace(token_log_probabilities=token_log_probabilities)
        others: Any = None
        rollouts = Rollouts(
            spec=place.rows.spec.model_copy(update={"epochs": 2}),
            sequence_length=LENGTH,
            dropout_seed=None,
            workload=place.workload,
            layout=Layout(),
            context=context,
            sampler=others,
            judge=others,
            prompts_ahead=0,
            is_bitwise=True,
            trains_as_it_reads=trains_as_it_reads,
        )
        rollouts.begin(has_read_answers=True)
        first, second = rollouts._updates(engine, [rollout], is_stale=False)
        assert passes == ([] if trains_as_it_reads else [4])
        assert not any(SAMPLED in batch for batch in first.batches)
        for batch, made in zip(second.batches, batches, strict=True):
            assert torch.equal(batch[SAMPLED], computed(made))


@pytest.mark.parametrize(
    ("part", "changes", "same"),
    [
        ("train", {}, True),
        ("train", {"precision": "bf16"}, True),
        ("train", {"determinism": "rerun"}, False),
        ("train", {"compile": True}, False),
        ("train", {"precision": "fp8"}, False),
        ("workload", {"dropout": 0.1}, False),
        ("workload", {"embedding_noise": 1.0}, False),
        ("workload", {"adapter": AdapterSpec(kind="lora", rank=4)}, True),
    ],
    ids=str,
)
def test_which_jobs_train_by_the_program_that_reads(part: str, changes: dict[str, Any], same: bool) -> None:
    specs: dict[str, Any] = {
        "train": TrainSpec(
            steps=1, global_batch=16, precision="fp32", determinism="bitwise", virtual_shards=4
        ),
        "workload": WorkloadSpec(model="qwen3-tiny", objective="grpo"),
    }
    specs[part] = specs[part].model_copy(update=changes)
    asked = specs["workload"], specs["train"]
    assert trains_as_it_reads(*asked, has_experts=False, on_gpu=False) == same
    assert not trains_as_it_reads(*asked, has_experts=True, on_gpu=False)
    assert not trains_as_it_reads(*asked, has_experts=False, on_gpu=True)


def test_logits_that_are_not_finite_are_refused() -> None:
    place = Place()
    good = place.cached()
    with torch.no_grad():
        next(place.model.parameters()).fill_(torch.nan)
    with pytest.raises(LogitsNotFinite):
        place.exact(lambda **asked: good)
