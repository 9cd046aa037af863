"""Objectives over preferences: the data says which of two answers is better, or whether one answer is good.

A sample is two answers to one prompt, each after the prompt: the first in the first half of the row, the second in
the second half. Each sees only itself (attention, bool [length, length]), and its positions begin at 0. So one
forward pass gives the log-probabilities of both, and rows are split as any others.

Batch entries: compared, bool, is False if an answer was cut off completely, or if both are equal after cutting; such
a sample is not trained on. answer_tokens, int64 [2]. reference, fp32 [2], from the data: the log-probabilities of
both answers under the reference, the run's initial model.
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
from workloads.model.heads import ANSWER_ENDS
from workloads.model.masks import SEGMENTS
from workloads.objectives.causal_lm import positions_in
from workloads.objectives.options import at_least, choice, fraction_or_zero
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.spans import padded
from workloads.record_format import MARK, from_end, unpack
from workloads.workload import Batch, Loss, Objective

REFERENCE, BASELINE = "reference", "baseline"
"""Batch entries with the reference's log-probabilities, and with the baseline of rewards."""
CERTAIN = -1e-6
"""The largest mean log-probability of a token for which odds are computed. Odds of a certain answer overflow fp32."""
DIVERGENCE = "divergence"
"""The sum whose mean over the global batch, at least 0, is the baseline."""


def truncated(words: np.ndarray, objective: Objective) -> np.ndarray:
    """Return what fits half a row of an answer with its prompt. `truncate` says which end is cut.

    Args:
        words: a prompt with its answer, as prepared data has them.
        objective: says how long half a row is, and which end is cut.
    """
    half = objective.window(objective.sequence_length)  # type: ignore[attr-defined]
    if objective.truncate == "start":  # type: ignore[attr-defined]
        words = from_end(words, half, objective.vocabulary.before)  # type: ignore[attr-defined]
    return np.asarray(words[:half], dtype=np.int64)


def predicted(words: np.ndarray) -> bool:
    """Return whether a cut answer still has predicted tokens."""
    return bool((words[1:] & MARK).any())


def comparable(answers: list[np.ndarray]) -> bool:
    """Return whether two cut answers differ and both have predicted tokens."""
    return not np.array_equal(answers[0], answers[1]) and all(map(predicted, answers))


def two_answers(
    objective: SampledObjective, answers: list[np.ndarray], compared: bool
) -> dict[str, np.ndarray]:
    """Return a row of two cut answers, see this module.

    Args:
        objective: has the length of a row.
        answers: the two cut answers, each after its prompt.
        compared: whether the sample is trained on.
    """
    half = objective.sequence_length // 2
    tokens = []
    labels = []
    parts = []
    for number, words in enumerate(answers):
        ids = words & ~MARK
        # A label stands at the token before the one it names: position i predicts token i + 1.
        follows = np.append((words[1:] & MARK) > 0, False)
        tokens.append(padded(ids, half, objective.vocabulary.padding))
        labels.append(padded(np.where(follows, np.roll(ids, -1), IGNORE), half, IGNORE))
        # Segments 0 and 2 are the answers, 1 and 3 their padding, so that no attention crosses from one to another.
        parts.append(2 * number + (np.arange(half) >= len(ids)))
    part = np.concatenate(parts)
    targets = np.concatenate(labels)
    return {
        "tokens": np.concatenate(tokens),
        "labels": targets if compared else np.full_like(targets, IGNORE),
        "padding": part % 2 == 0,
        SEGMENTS: part,
        "positions": positions_in(part),
        "answer_tokens": np.array([(answer_labels != IGNORE).sum() for answer_labels in labels]),
        "compared": np.array(compared),
    }


def log_probabilities(logits: Tensor, labels: Tensor, of_tokens: Callable[[Tensor, Tensor], Loss]) -> Tensor:
    """Return the summed log-probabilities of both answers of each row, fp32 [B, 2]. `of_tokens` is as in
    `Workload.criterion`.

    Args:
        logits: [B, L, vocabulary].
        labels: int64 [B, L].
        of_tokens: the loss of tokens.
    """
    rows = [
        [
            -of_tokens(part, part_labels).total
            for part, part_labels in zip(row.chunk(2, 1), of_row.chunk(2, 1), strict=True)
        ]
        for row, of_row in zip(logits.split(1), labels.split(1), strict=True)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def preference_loss(
    objective: Objective, output: Any, batch: Batch, of_tokens: Callable[[Tensor, Tensor], Loss]
) -> Loss | None:
    """Return the loss of an `Output` for an objective that compares answers; None for another objective.

    Args:
        objective: the objective.
        output: what the model returned.
        batch: the rows' entries, see this module.
        of_tokens: the loss of tokens.
    """
    if not isinstance(objective, Dpo | Ipo | Orpo | Kto | Reward):
        return None
    if isinstance(objective, Reward):
        scores = output.sentence.squeeze(-1)
    else:
        scores = log_probabilities(output.logits, batch["labels"], of_tokens)
    loss = objective.compare(scores, batch)
    if output.extra is None:
        return loss
    return replace(loss, extra=output.extra, metrics={"router_loss": output.extra.detach()})


def judged(each: Tensor, rewards: Tensor, batch: Batch, log_p: Tensor | None = None) -> Loss:
    """Return the loss of pairs, with the metrics of their rewards.

    Args:
        each: the loss of each pair, [B].
        rewards: of both answers, [B, 2].
        batch: has `compared`.
        log_p: log-probabilities of both answers, [B, 2]; None for a reward model.
    """
    compared = batch["compared"]
    count = compared.sum().float()
    rewards = rewards.detach()
    values = {"reward": rewards} | ({} if log_p is None else {"log_probability": log_p.detach()})
    sums = {
        f"{side}_{name}": (value[:, number].where(compared, 0.0).sum(), count)
        for name, value in values.items()
        for number, side in enumerate(("chosen", "rejected"))
    }
    correct = ((rewards[:, 0] > rewards[:, 1]) & compared).sum().float()
    sums["accuracy"] = (correct, count)
    return Loss(each.where(compared, 0.0).sum(), count, correct=correct, sums=sums)


def _pair(objective: SampledObjective, record: np.ndarray) -> list[np.ndarray]:
    return [truncated(words, objective) for words in unpack(record)]


def _sample_pair(self: SampledObjective, read: Read, sample: int, rng: np.random.Generator) -> Sample:
    """`SampledObjective.sample` of objectives over pairs of answers; the next two functions likewise."""
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

    The loss of a pair is -log sigmoid(beta x margin). The margin is the rise of the chosen answer's log-probability
    over the reference's, minus that of the rejected answer. `loss` "hinge": max(0, 1 - beta x margin) (Zhao et al.
    2023). `label_smoothing` is the assumed share of swapped pairs: the loss is "sigmoid" of both orders (cDPO,
    Mitchell 2023), or its unbiased form, "robust" (Chowdhury et al. 2024). `sft` weighs an additional mean negative
    log-probability of the chosen answer's tokens, which keeps that answer likely (Pang et al. 2024, equation 1).
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
                "the loss hinge has no label_smoothing; set it to 0, or loss to sigmoid or robust"
            )

    def compare(self, log_p: Tensor, batch: Batch) -> Loss:
        """Return the loss for log-probabilities [B, 2].

        Args:
            log_p: of both answers, summed over tokens.
            batch: the rows' entries, see this module.
        """
        # Rewards up to a term of the prompt alone, which cancels in the margin (Rafailov et al., 2023, equation 5).
        rewards = self.beta * (log_p - batch[REFERENCE])
        margin = rewards[:, 0] - rewards[:, 1]
        smooth = self.label_smoothing
        # logsigmoid and not log(sigmoid): for margins below -90 sigmoid is 0 in fp32.
        right = -F.logsigmoid(margin)
        wrong = -F.logsigmoid(-margin)
        each = (1 - smooth) * right + smooth * wrong
        if self.loss == "hinge":
            each = torch.relu(1 - margin)
        elif self.loss == "robust":
            each = ((1 - smooth) * right - smooth * wrong) / (1 - 2 * smooth)
        if self.sft:
            # Per token: a sum would weigh long answers more, and outgrow the pair's loss, which is of order one.
            each = each - self.sft * log_p[:, 0] / batch["answer_tokens"][:, 0].clamp(min=1)
        return judged(each, rewards, batch, log_p)


@dataclass(frozen=True, kw_only=True)
class Ipo(SampledObjective):
    """Identity preference optimisation (Azar et al. 2023, equation 17, where beta is tau).

    The loss is the squared distance of the margin, in log-probabilities per token, from 1 / (2 beta).
    """

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

    def compare(self, log_p: Tensor, batch: Batch) -> Loss:
        """Return the loss for log-probabilities [B, 2].

        Args:
            log_p: of both answers, summed over tokens.
            batch: the rows' entries, see this module.
        """
        ratios = log_p - batch[REFERENCE]
        # Per token, unlike the paper's sums, as TRL does: the target 1 / (2 beta) then does not depend on the answers'
        # length.
        mean = ratios / batch["answer_tokens"].clamp(min=1)
        each = (mean[:, 0] - mean[:, 1] - 1 / (2 * self.beta)).square()
        return judged(each, self.beta * ratios, batch, log_p)


@dataclass(frozen=True, kw_only=True)
class Orpo(SampledObjective):
    """Odds ratio preference optimisation, which needs no reference (Hong et al. 2024, equations 6 and 7, where beta
    is lambda).

    The loss is the mean negative log-probability of the chosen answer's tokens, plus beta x -log sigmoid of the log
    ratio of both answers' odds, each from its tokens' mean log-probability.
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

    def compare(self, log_p: Tensor, batch: Batch) -> Loss:
        """Return the loss for log-probabilities [B, 2].

        Args:
            log_p: of both answers, summed over tokens.
            batch: the rows' entries, see this module.
        """
        mean = log_p / batch["answer_tokens"].clamp(min=1)
        mean = mean.where(batch["compared"][:, None], -1.0)  # samples that are left out may have no token
        # A mean of 0 is probability 1, whose odds are infinite.
        mean = mean.clamp(max=CERTAIN)
        # log(p / (1 - p)) from log p; 1 - exp(log p) would cancel where p is near 1, hence expm1.
        odds = mean - torch.log(-torch.expm1(mean))
        each = -mean[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
        return judged(each, self.beta * mean, batch, log_p)


@dataclass(frozen=True, kw_only=True)
class Kto(SampledObjective):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, equations 7 and 8) of answers that are each good or bad.

    The second answer in a row is that of a later record with another prompt. Such mismatched pairs measure the
    divergence from the reference (section 4.1). baseline, a scalar from the engine, is its mean over the global
    batch, at least 0, without a gradient. desirable, bool: whether the answer is good. mismatched, bool: False if no
    other prompt was found, so that the pair does not count. Under a rule before 6, the second answer is that of the
    next record, whatever its prompt. `desirable_weight` and `undesirable_weight` are lambda of both kinds.
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
        answers = [truncated(each, self) for each in (words, np.concatenate([prompt, answer]))]
        row = two_answers(self, answers, all(map(predicted, answers)))
        return {**row, "desirable": np.array(bool(label)), "mismatched": np.array(mismatched)}

    def _answer_of_another(self, read: Read, sample: int, prompt: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the answer of a later record with another prompt, and whether one was found; else the next record's
        answer.

        Rows of one prompt are adjacent, so the search distance doubles: few records are read, however many share the
        prompt.
        """
        near = read.companions(sample)
        index = (sample - near.start) // near.step
        fallback = None
        distance = 1
        while fallback is None or distance < len(near):
            other, _ = unpack(read(near[(index + distance) % len(near)]))
            begin = _begin(other)
            if self.rule < 6 or not np.array_equal(other[:begin], prompt):
                return other[begin:], True
            fallback = other[begin:] if fallback is None else fallback
            distance *= 2
        return fallback, False

    def is_cut(self, record: np.ndarray) -> bool:
        return len(unpack(record)[0]) > self.sequence_length // 2

    def is_lost(self, record: np.ndarray) -> bool:
        return not predicted(truncated(unpack(record)[0], self))

    def compare(self, log_p: Tensor, batch: Batch) -> Loss:
        """Return the loss for log-probabilities [B, 2].

        Args:
            log_p: of the answer and of the mismatched one, summed over tokens.
            batch: the rows' entries, see this module.
        """
        # [B] each: the log-ratio of the answer, and that of the mismatched one, whose mean estimates the divergence.
        ratio, apart = (log_p - batch[REFERENCE]).unbind(1)
        good = batch["desirable"]
        compared = batch["compared"]
        # A bad answer should lie below the baseline, so its distance counts with the other sign (equation 8).
        above = (ratio - batch[BASELINE]) * torch.where(good, 1.0, -1.0)
        weight = torch.where(good, self.desirable_weight, self.undesirable_weight)
        each = weight * (1 - torch.sigmoid(self.beta * above))
        values = {"reward": self.beta * ratio.detach(), "log_probability": log_p[:, 0].detach()}
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
    """Return where the answer begins in a prompt with its answer."""
    return int(np.argmax((words & MARK) > 0))


@dataclass(frozen=True, kw_only=True)
class Reward(SampledObjective):
    """A reward model (InstructGPT, Ouyang et al. 2022, equation 1; Bradley and Terry 1952): a number for an answer.

    The number is that of the last token. The loss of a pair is -log sigmoid of the chosen answer's number minus the
    rejected one's. `center` weighs the square of the sum of both, which keeps rewards around zero (Eisenstein et al.
    2023). places, int64 [2]: the last token of each answer.
    """

    name = "reward"
    architectures = frozenset({"decoder"})
    needs: ClassVar[tuple[str, ...]] = ("pad",)  # transformers finds the last token by it
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
        answer_ends = np.array([len(answers[0]) - 1, half + len(answers[1]) - 1])
        row = two_answers(self, answers, comparable(answers))
        return {**{name: value for name, value in row.items() if name != "labels"}, ANSWER_ENDS: answer_ends}

    def compare(self, rewards: Tensor, batch: Batch) -> Loss:
        """Return the loss for rewards [B, 2].

        Args:
            rewards: of both answers.
            batch: the rows' entries, see this module.
        """
        rewards = rewards.float()
        each = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]) + self.center * rewards.sum(1).square()
        return judged(each, rewards, batch)


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the means of the sums beside the loss, without empty ones, and the margin of the rewards."""
    mean_by_name = {name: total / count for name, (total, count) in sums.items() if count}
    if mean_by_name.keys() >= {"chosen_reward", "rejected_reward"}:
        mean_by_name["reward_margin"] = mean_by_name["chosen_reward"] - mean_by_name["rejected_reward"]
    return mean_by_name
