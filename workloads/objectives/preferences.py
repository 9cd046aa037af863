"""Objectives over answers that people prefer: the data says which of two is better, or whether one is good.

A sample is two answers to one prompt, each after it: the first in the first half of the row, the second in the second.
Each sees itself alone (attention, bool [length, length]), and its positions begin at 0, so that one forward pass has
the log-probabilities of both, and a row is split as any other. compared, bool: False where one of them has lost its
answer, or both are alike since they were cut; such a sample is not trained on. answer_tokens, int64 [2]. reference,
fp32 [2], which the data gives: the log-probabilities of both answers under the reference, which is the model that the
run began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.model.masks import SEGMENTS
from workloads.objectives.causal_lm import positions_in
from workloads.objectives.options import at_least, choice, fraction_or_zero
from workloads.objectives.records import MARK, from_end, unpack
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.spans import padded
from workloads.workload import Batch, Loss, Objective

REFERENCE, BASELINE = "reference", "baseline"
"""The batch's entries with the log-probabilities under the reference, and with what rewards are counted from."""
CERTAIN = -1e-6
"""The largest mean log-probability of a token whose odds are taken: of a certain answer fp32 has no odds."""
DIVERGENCE = "divergence"
"""The sum whose mean over the global batch, at least 0, is the baseline."""


def kept(words: np.ndarray, objective: Objective) -> np.ndarray:
    """What half a row has of an answer with its prompt; `truncate` says which end of it is lost."""
    half = objective.window(objective.sequence_length)  # type: ignore[attr-defined]
    if objective.truncate == "start":  # type: ignore[attr-defined]
        words = from_end(words, half, objective.vocabulary.before)  # type: ignore[attr-defined]
    return np.asarray(words[:half], dtype=np.int64)


def predicted(words: np.ndarray) -> bool:
    """Whether something of an answer, as it was kept, is predicted."""
    return bool((words[1:] & MARK).any())


def comparable(answers: list[np.ndarray]) -> bool:
    """Whether two answers, as they were kept, differ and are predicted."""
    return not np.array_equal(answers[0], answers[1]) and all(map(predicted, answers))


def two_answers(
    objective: SampledObjective, answers: list[np.ndarray], compared: bool
) -> dict[str, np.ndarray]:
    """A row of two answers as they were kept, see this module."""
    half = objective.sequence_length // 2
    tokens = []
    labels = []
    parts = []
    for number, words in enumerate(answers):
        ids = words & ~MARK
        follows = np.append((words[1:] & MARK) > 0, False)
        tokens.append(padded(ids, half, objective.vocabulary.padding))
        labels.append(padded(np.where(follows, np.roll(ids, -1), IGNORE), half, IGNORE))
        parts.append(2 * number + (np.arange(half) >= len(ids)))
    part = np.concatenate(parts)
    targets = np.concatenate(labels)
    return {
        "tokens": np.concatenate(tokens),
        "labels": targets if compared else np.full_like(targets, IGNORE),
        "padding": part % 2 == 0,
        SEGMENTS: part,
        "positions": positions_in(part),
        "answer_tokens": np.array([(found != IGNORE).sum() for found in labels]),
        "compared": np.array(compared),
    }


def log_probabilities(logits: Tensor, labels: Tensor, of_tokens: Callable[[Tensor, Tensor], Loss]) -> Tensor:
    """Of both answers of each row, summed over their tokens: fp32 [B, 2]. `of_tokens` as in `Workload.criterion`."""
    rows = [
        [
            -of_tokens(part, found).total
            for part, found in zip(row.chunk(2, 1), of_row.chunk(2, 1), strict=True)
        ]
        for row, of_row in zip(logits.split(1), labels.split(1), strict=True)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def preference_loss(
    objective: Objective, output: Any, batch: Batch, of_tokens: Callable[[Tensor, Tensor], Loss]
) -> Loss | None:
    """The loss of an `Output` for an objective that compares answers; None for another objective."""
    if not isinstance(objective, Dpo | Ipo | Orpo | Kto | Reward):
        return None
    if isinstance(objective, Reward):
        said = output.sentence.squeeze(-1)
    else:
        said = log_probabilities(output.logits, batch["labels"], of_tokens)
    found = objective.compare(said, batch)
    if output.extra is None:
        return found
    return replace(found, extra=output.extra, metrics={"router_loss": output.extra.detach()})


def judged(each: Tensor, rewards: Tensor, batch: Batch, said: Tensor | None = None) -> Loss:
    """The loss of pairs: `each` [B] is that of a pair, `rewards` [B, 2] of its answers, `said` [B, 2] their
    log-probabilities."""
    compared = batch["compared"]
    count = compared.sum().float()
    rewards = rewards.detach()
    values = {"reward": rewards} | ({} if said is None else {"log_probability": said.detach()})
    sums = {
        f"{side}_{name}": (value[:, number].where(compared, 0.0).sum(), count)
        for name, value in values.items()
        for number, side in enumerate(("chosen", "rejected"))
    }
    correct = ((rewards[:, 0] > rewards[:, 1]) & compared).sum().float()
    sums["accuracy"] = (correct, count)
    return Loss(each.where(compared, 0.0).sum(), count, correct=correct, sums=sums)


def _pair(objective: SampledObjective, record: np.ndarray) -> list[np.ndarray]:
    return [kept(words, objective) for words in unpack(record)]


def _sample_pair(self: SampledObjective, read: Read, sample: int, rng: np.random.Generator) -> Sample:
    """`SampledObjective.sample` of the objectives over pairs of answers, and so the next two."""
    answers = _pair(self, read(sample))
    return two_answers(self, answers, comparable(answers))


def _is_pair_cut(self: SampledObjective, record: np.ndarray) -> bool:
    half = self.window(self.sequence_length)
    return any(len(words) > half for words in unpack(record))


def _is_pair_lost(self: SampledObjective, record: np.ndarray) -> bool:
    return not comparable(_pair(self, record))


@dataclass(frozen=True, kw_only=True)
class Dpo(SampledObjective):
    """Direct preference optimisation (Rafailov et al. 2023, equation 7).

    The loss of a pair is -log sigmoid(beta x margin), where the margin is how much more the log-probability of the
    chosen answer has risen above the reference's than that of the rejected one. `loss` "hinge": max(0, 1 - beta x
    margin) (Zhao et al. 2023). `label_smoothing` is the share of pairs that are taken to be the wrong way round: the
    loss is "sigmoid" of both ways (cDPO, Mitchell 2023), or its unbiased form, "robust" (Chowdhury et al. 2024).
    `sft` weighs the mean negative log-probability of a token of the chosen answer beside it, which keeps that answer
    likely (Pang et al. 2024, equation 1).
    """

    name = "dpo"
    architectures = frozenset({"decoder"})
    unit = "record"
    framed = True
    compares: ClassVar[bool] = True
    truncate: str = choice("end", "start")
    beta: float = at_least(1e-6, 0.1)
    label_smoothing: float = fraction_or_zero(0.5)
    loss: str = choice("sigmoid", "hinge", "robust")
    sft: float = at_least(0.0, 0.0)
    sample = _sample_pair
    is_cut = _is_pair_cut
    is_lost = _is_pair_lost

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        if self.loss == "hinge" and self.label_smoothing:
            raise WorkloadError(
                "label_smoothing is not of the loss hinge; set it to 0, or loss to sigmoid or robust"
            )

    def compare(self, said: Tensor, batch: Batch) -> Loss:
        """The loss of log-probabilities [B, 2]."""
        rewards = self.beta * (said - batch[REFERENCE])
        margin = rewards[:, 0] - rewards[:, 1]
        smooth = self.label_smoothing
        right = -F.logsigmoid(margin)
        wrong = -F.logsigmoid(-margin)
        each = (1 - smooth) * right + smooth * wrong
        if self.loss == "hinge":
            each = torch.relu(1 - margin)
        elif self.loss == "robust":
            each = ((1 - smooth) * right - smooth * wrong) / (1 - 2 * smooth)
        if self.sft:
            each = each - self.sft * said[:, 0] / batch["answer_tokens"][:, 0].clamp(min=1)
        return judged(each, rewards, batch, said)


@dataclass(frozen=True, kw_only=True)
class Ipo(SampledObjective):
    """Identity preference optimisation (Azar et al. 2023, equation 17, where beta is tau): the squared distance of the
    margin of the log-probabilities of a token from 1 / (2 beta)."""

    name = "ipo"
    architectures = frozenset({"decoder"})
    unit = "record"
    framed = True
    compares: ClassVar[bool] = True
    truncate: str = choice("end", "start")
    beta: float = at_least(1e-6, 0.1)
    sample = _sample_pair
    is_cut = _is_pair_cut
    is_lost = _is_pair_lost

    def compare(self, said: Tensor, batch: Batch) -> Loss:
        """The loss of log-probabilities [B, 2]."""
        ratios = said - batch[REFERENCE]
        mean = ratios / batch["answer_tokens"].clamp(min=1)
        each = (mean[:, 0] - mean[:, 1] - 1 / (2 * self.beta)).square()
        return judged(each, self.beta * ratios, batch, said)


@dataclass(frozen=True, kw_only=True)
class Orpo(SampledObjective):
    """Odds ratio preference optimisation, which needs no reference (Hong et al. 2024, equations 6 and 7, where beta is
    lambda).

    The mean negative log-probability of a token of the chosen answer, and beta x -log sigmoid of the logarithm of the
    ratio of both answers' odds, each by the mean log-probability of its tokens.
    """

    name = "orpo"
    architectures = frozenset({"decoder"})
    unit = "record"
    framed = True
    compares: ClassVar[bool] = True
    truncate: str = choice("end", "start")
    beta: float = at_least(1e-6, 0.1)
    sample = _sample_pair
    is_cut = _is_pair_cut
    is_lost = _is_pair_lost

    def compare(self, said: Tensor, batch: Batch) -> Loss:
        """The loss of log-probabilities [B, 2]."""
        mean = said / batch["answer_tokens"].clamp(min=1)
        mean = mean.where(batch["compared"][:, None], -1.0)  # of what is left out there may be no token
        mean = mean.clamp(max=CERTAIN)
        odds = mean - torch.log(-torch.expm1(mean))
        each = -mean[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
        return judged(each, self.beta * mean, batch, said)


@dataclass(frozen=True, kw_only=True)
class Kto(SampledObjective):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, equations 7 and 8) of answers that are each good or not.

    The second answer in a row is that of a record after this one that has another prompt: over such pairs that do not
    belong together the divergence from the reference is measured (section 4.1). baseline, a scalar that the engine
    gives, is its mean over the global batch, at least 0, without a gradient. desirable bool: whether the answer is
    good. mismatched bool: False where no other prompt was found, so that the pair does not count. Under a rule before 6
    the second answer is that of the next record, whatever its prompt. `desirable_weight` and `undesirable_weight` are
    lambda of both kinds.
    """

    name = "kto"
    architectures = frozenset({"decoder"})
    unit = "record"
    framed = True
    least_documents: ClassVar[int] = 2
    compares: ClassVar[bool] = True
    truncate: str = choice("end", "start")
    beta: float = at_least(1e-6, 0.1)
    desirable_weight: float = at_least(0.0, 1.0)
    undesirable_weight: float = at_least(0.0, 1.0)

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        words, (label,) = unpack(read(sample))
        prompt = words[: _begin(words)]
        answer, mismatched = self._answer_of_another(read, sample, prompt)
        answers = [kept(each, self) for each in (words, np.concatenate([prompt, answer]))]
        row = two_answers(self, answers, all(map(predicted, answers)))
        return {**row, "desirable": np.array(bool(label)), "mismatched": np.array(mismatched)}

    def _answer_of_another(self, read: Read, sample: int, prompt: np.ndarray) -> tuple[np.ndarray, bool]:
        """The answer of a later record to another prompt, and whether one was found; else the answer of the next one.

        Rows of one prompt stand together, so that the distance doubles: few records are read, however many those are.
        """
        near = read.companions(sample)
        place = (sample - near.start) // near.step
        found = None
        distance = 1
        while found is None or distance < len(near):
            other, _ = unpack(read(near[(place + distance) % len(near)]))
            begin = _begin(other)
            if self.rule < 6 or not np.array_equal(other[:begin], prompt):
                return other[begin:], True
            found = other[begin:] if found is None else found
            distance *= 2
        return found, False

    def is_cut(self, record: np.ndarray) -> bool:
        return len(unpack(record)[0]) > self.sequence_length // 2

    def is_lost(self, record: np.ndarray) -> bool:
        return not predicted(kept(unpack(record)[0], self))

    def compare(self, said: Tensor, batch: Batch) -> Loss:
        """The loss of log-probabilities [B, 2]."""
        ratio, apart = (said - batch[REFERENCE]).unbind(1)
        good = batch["desirable"]
        compared = batch["compared"]
        above = (ratio - batch[BASELINE]) * torch.where(good, 1.0, -1.0)
        weight = torch.where(good, self.desirable_weight, self.undesirable_weight)
        each = weight * (1 - torch.sigmoid(self.beta * above))
        values = {"reward": self.beta * ratio.detach(), "log_probability": said[:, 0].detach()}
        count = compared.sum().float()
        kinds = {"chosen": good & compared, "rejected": ~good & compared}
        sums = {
            f"{kind}_{name}": (value.where(chosen, 0.0).sum(), chosen.sum().float())
            for name, value in values.items()
            for kind, chosen in kinds.items()
        }
        counted = compared & batch["mismatched"]
        sums[DIVERGENCE] = (apart.detach().where(counted, 0.0).sum(), counted.sum().float())
        correct = ((above > 0) & compared).sum().float()
        sums["accuracy"] = (correct, count)
        return Loss(each.where(compared, 0.0).sum(), count, correct=correct, sums=sums)


def _begin(words: np.ndarray) -> int:
    """Where in a prompt with its answer the answer begins."""
    return int(np.argmax((words & MARK) > 0))


@dataclass(frozen=True, kw_only=True)
class Reward(SampledObjective):
    """A reward model (InstructGPT, Ouyang et al. 2022, equation 1; Bradley and Terry 1952): a number for an answer.

    It is that of the last token; the loss of a pair is -log sigmoid of how much the number of the chosen one is larger.
    `center` weighs the square of the sum of both, which keeps rewards around zero (Eisenstein et al. 2023). places,
    int64 [2]: the last token of each answer.
    """

    name = "reward"
    architectures = frozenset({"decoder"})
    needs: ClassVar[tuple[str, ...]] = ("pad",)  # by which transformers finds the last token
    unit = "record"
    framed = True
    compares: ClassVar[bool] = True
    truncate: str = choice("end", "start")
    center: float = at_least(0.0, 0.0)
    is_cut = _is_pair_cut
    is_lost = _is_pair_lost

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        answers = _pair(self, read(sample))
        half = self.sequence_length // 2
        places = np.array([len(answers[0]) - 1, half + len(answers[1]) - 1])
        row = two_answers(self, answers, comparable(answers))
        return {**{name: value for name, value in row.items() if name != "labels"}, "places": places}

    def compare(self, said: Tensor, batch: Batch) -> Loss:
        """The loss of rewards [B, 2]."""
        said = said.float()
        each = -F.logsigmoid(said[:, 0] - said[:, 1]) + self.center * said.sum(1).square()
        return judged(each, said, batch)


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The means of what was summed beside the loss, none of nothing, with the margin of the rewards."""
    found = {name: total / count for name, (total, count) in sums.items() if count}
    if found.keys() >= {"chosen_reward", "rejected_reward"}:
        found["reward_margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found
