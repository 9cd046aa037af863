"""Objectives that learn from rewards for answers that the model itself generated.

A sample of prepared data is a prompt. While training, the rollouts of a step (`orchestrator.train.rollouts`) turn each
prompt into `group` rows, one for each generated answer. A row is the prompt with its answer:

tokens, labels: as for other decoders; labels are the answer's tokens, where they are predicted. Padding follows the
    answer, where a causal model does not see it.
advantage, fp32 [B, L]: the answer's advantage, repeated at each of its tokens.
weight, fp32 [B, L]: the weight of each token in the loss; 0 where nothing is predicted.
counted, fp32 [B, L]: sums to the number that the loss is divided by, over the global batch.
sampled, fp32 [B, L]: log-probabilities under the weights that generated the answer; absent in the first update after
    a rollout, where they are those of the forward pass itself.
drawn, fp32 [B, L]: log-probabilities as whoever generated the answer computed them. They are only compared.
temperature, fp32 [B]: that of the rollouts, if it is not 1. The loss is about the distribution from which answers are
    drawn, so that logits are divided by it.
reference_tokens, fp32 [B, L]: log-probabilities under the reference, the run's initial model; only if `beta` is not 0.

All of them are per token, so that a layout may cut rows anywhere, and sums over tokens are the same in each layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.objectives.options import at_least, choice, zero_or_above
from workloads.objectives.preferences import preference_loss
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.spans import padded
from workloads.record_format import from_end, unpack
from workloads.workload import Batch, Loss, Objective

ADVANTAGE = "advantage"
WEIGHT = "weight"
COUNTED = "counted"
SAMPLED = "sampled"
DRAWN = "drawn"
TEMPERATURE = "temperature"
REFERENCE_TOKENS = "reference_tokens"
PER_TOKEN = (ADVANTAGE, WEIGHT, COUNTED, SAMPLED, DRAWN, REFERENCE_TOKENS)
"""Batch entries with one fp32 number for each token of a row, see this module."""

RowSum = Callable[[Tensor], Tensor]
"""Sums [B, L] over the tokens of whole rows to [B], also if ranks hold parts of the rows."""


def sum_of_row(values: Tensor) -> Tensor:
    """Return the sums of [B, L] over L, for rows that are whole on this rank."""
    return values.sum(-1)


def _sample_prompt(self: SampledObjective, read: Read, sample: int, rng: np.random.Generator) -> Sample:
    """`SampledObjective.sample` of objectives over rewards: the row of a prompt without an answer."""
    prompt = unpack(read(sample))[0][: self.sequence_length]
    length = self.sequence_length
    nothing = np.zeros(length, dtype=np.float32)
    names = (ADVANTAGE, WEIGHT, COUNTED, *((REFERENCE_TOKENS,) if self.beta else ()))  # type: ignore[attr-defined]
    return {
        "tokens": padded(prompt, length, self.vocabulary.padding),
        "labels": np.full(length, IGNORE, dtype=np.int64),
        "padding": np.arange(length) < len(prompt),
        **dict.fromkeys(names, nothing),
    }


@dataclass(frozen=True, kw_only=True)
class Grpo(SampledObjective):
    """Group relative policy optimisation (Shao et al. 2024, equations 3 and 4).

    The advantage of an answer is its reward minus the mean of its group. `scale_rewards` divides it: "group" by the
    group's standard deviation, "batch" by that of the global batch, "none" by nothing (Liu et al. 2025).

    The loss of a token is -min(ratio x advantage, clip(ratio, 1 - epsilon, 1 + epsilon_high) x advantage), where the
    ratio is that of the token's probability to what it was when the answer was generated. `epsilon_high` 0 means
    `epsilon` (others: Yu et al. 2025). `delta` bounds the ratio where the advantage is negative, which the clip does
    not: there the loss is at most -delta x advantage (dual-clip PPO; Ye et al. 2020, equation 4). 0 means no bound.
    With `importance_sampling_level` "sequence", the ratio is the same for all
    tokens of an answer: the exponential of the mean of the log-ratios (GSPO; Zheng et al. 2025, equation 7).

    `loss_type` says how tokens are weighted: "grpo" takes the mean over each answer's tokens, then over answers (Shao
    et al. 2024, equation 3); "dapo" the mean over all tokens of the global batch (Yu et al. 2025, equation 8);
    "dr_grpo" divides the sum over tokens by answers x rollout.max_tokens (Liu et al. 2025).

    `beta` weighs the divergence from the reference in the loss. `kl` is its estimate from the log-ratio r of the
    reference to the model, for each token (Schulman 2020): k1 is -r, k2 is r^2 / 2, k3 is exp(r) - 1 - r.
    `use_bias_correction_kl` multiplies the estimate by the ratio of the token's probability to what it was when it was
    drawn (DeepSeek-V3.2, DeepSeek-AI 2025, equation 7). The mean gradient of a token is then that of

               with the correction, at any weights    without it, at the weights that drew the answers
        k1     KL(model || reference)                 nothing, so that it measures and does not hold back
        k2     the mean of r^2 / 2                    KL(model || reference)
        k3     KL(model || reference)                 KL(reference || model)

    With `importance_sampling_level` "sequence", the correction multiplies each token's estimate by the ratio of its
    answer, as TRL does. Its gradient is then that of no divergence; DeepSeek-V3.2 has ratios of tokens alone.
    """

    name = "grpo"
    architectures = frozenset({"decoder"})
    unit = "record"
    framed = True
    baseline: ClassVar[str] = "group"
    """What an answer's reward is compared with, see `orchestrator.train.rollouts.advantages`."""
    scale_rewards: str = choice("group", "batch", "none")
    epsilon: float = at_least(0.0, 0.2)
    epsilon_high: float = at_least(0.0, 0.0)
    delta: float = zero_or_above(1.0)
    importance_sampling_level: str = choice("token", "sequence")
    loss_type: str = choice("grpo", "dapo", "dr_grpo")
    beta: float = at_least(0.0, 0.0)
    kl: str = choice("k3", "k1", "k2")
    use_bias_correction_kl: bool = True
    sample = _sample_prompt

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        if self.delta and self.delta <= self._bounds[1]:
            raise WorkloadError(
                f"grpo: delta is {self.delta}; make it above {self._bounds[1]:g}, the upper bound of the clipped ratio"
            )

    @property
    def _bounds(self) -> tuple[float, float]:
        """The bounds of the clipped ratio."""
        return 1.0 - self.epsilon, 1.0 + (self.epsilon_high or self.epsilon)

    def surrogate(self, log_p: Tensor, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token without the divergence, and whether it was clipped; all are [B, L].

        Args:
            log_p: log-probabilities of the labels.
            ratio: of each token's probability to what it was, or of its answer's under "sequence".
            advantage: of each token's answer.
        """
        low, high = self._bounds
        # Only where the clipped branch is the minimum: a clip in the other direction changes neither loss nor
        # gradient.
        clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
        bounded = ratio
        if self.delta:
            clipped |= (ratio > self.delta) & (advantage < 0)
            bounded = ratio.clamp(max=self.delta)
        return -torch.min(bounded * advantage, ratio.clamp(low, high) * advantage), clipped


@dataclass(frozen=True, kw_only=True)
class Reinforce(SampledObjective):
    """REINFORCE with a leave-one-out baseline (Williams 1992; Kool et al. 2019; Ahmadian et al. 2024, equation 8).

    The advantage of an answer is its reward minus the mean reward of the other answers of its group. The loss of a
    token is minus its log-probability times the advantage. The other options are those of `Grpo`.
    """

    name = "reinforce"
    architectures = frozenset({"decoder"})
    unit = "record"
    framed = True
    baseline: ClassVar[str] = "leave_one_out"
    scale_rewards: str = choice("none", "group", "batch")
    loss_type: str = choice("grpo", "dapo", "dr_grpo")
    beta: float = at_least(0.0, 0.0)
    kl: str = choice("k3", "k1", "k2")
    use_bias_correction_kl: bool = True
    sample = _sample_prompt

    def surrogate(self, log_p: Tensor, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """See `Grpo.surrogate`. Nothing is clipped.

        Args:
            log_p: log-probabilities of the labels.
            ratio: not read.
            advantage: of each token's answer.
        """
        return -log_p * advantage, torch.zeros_like(log_p, dtype=torch.bool)


Rewarded: TypeAlias = Grpo | Reinforce


def kept_prompt(objective: Rewarded, tokens: np.ndarray, room: int) -> np.ndarray:
    """Return the last `room` tokens of a longer prompt, which still begins with what a text begins with.

    Args:
        objective: has the tokens with which a text begins.
        tokens: the prompt, int64 [tokens].
        room: number of tokens to keep.
    """
    return from_end(tokens, room, objective.vocabulary.before)


def loss_of(
    objective: Rewarded, log_p: Tensor, batch: Batch, predicted: Tensor, row_sum: RowSum = sum_of_row
) -> Loss:
    """Return the loss of rows.

    Args:
        objective: the objective.
        log_p: log-probabilities of the labels, fp32 [B, L].
        batch: the rows' entries, see this module.
        predicted: where a token is predicted, bool [B, L].
        row_sum: sums over the tokens of whole rows.
    """
    # Padding's log-probabilities may be -inf, and -inf x 0 is NaN; zeros before any product are safe, in the gradient
    # too.
    log_p = log_p.where(predicted, 0.0)
    ratio = _log_ratio(objective, log_p, batch, predicted, row_sum).exp()
    each, clipped = objective.surrogate(log_p, ratio, batch[ADVANTAGE])
    tokens = predicted.sum().float()
    sums = {"clip_share": (clipped.where(predicted, False).sum().float(), tokens)}
    if objective.beta:
        divergence = _divergence(objective.kl, batch[REFERENCE_TOKENS] - log_p)
        sums["kl"] = (divergence.detach().where(predicted, 0.0).sum(), tokens)
        each = each + objective.beta * (
            # Under "sequence" this is the ratio of the whole answer, as in TRL.
            divergence * ratio if objective.use_bias_correction_kl else divergence
        )
    if DRAWN in batch:
        # Only in the first update after a rollout do both belong to the same weights, so that the difference measures
        # the sampler's arithmetic. Other updates count no token: the names of metrics are those of the first step.
        apart = (log_p.detach() - batch[DRAWN]).abs().where(predicted, 0.0)
        nothing = torch.zeros_like(tokens)
        sums["sampler_difference"] = (nothing, nothing) if SAMPLED in batch else (apart.sum(), tokens)
    # Weights and counts are data of each token, so any cut of rows over ranks or micro-batches gives the same
    # quotient.
    return Loss((each * batch[WEIGHT]).where(predicted, 0.0).sum(), batch[COUNTED].sum(), sums=sums)


def _log_ratio(
    objective: Rewarded, log_p: Tensor, batch: Batch, predicted: Tensor, row_sum: RowSum
) -> Tensor:
    """Return the log-ratio of each token's probability to what it was when the answer was generated, [B, L]."""
    # In the first update the ratio is 1, but its gradient is that of log_p: hence log_p minus its detached copy and no
    # constant.
    of_tokens = (log_p - batch.get(SAMPLED, log_p.detach())).where(predicted, 0.0)
    if isinstance(objective, Reinforce) or objective.importance_sampling_level == "token":
        return of_tokens
    tokens = row_sum(predicted.float()).clamp(min=1.0)
    # [B] to [B, L]: exp of this mean is the geometric mean of the tokens' ratios (GSPO, equation 7).
    return (row_sum(of_tokens) / tokens).unsqueeze(-1).expand_as(of_tokens)


def _divergence(estimate: str, log_ratio: Tensor) -> Tensor:
    if estimate == "k1":
        return -log_ratio
    if estimate == "k2":
        return log_ratio.square() / 2
    # expm1: exp(r) - 1 loses all digits for small r, and training begins at r = 0.
    return log_ratio.expm1() - log_ratio


def token_log_probabilities(output: Any, batch: Batch, of_tokens: Callable[[Tensor, Tensor], Loss]) -> Tensor:
    """Return the log-probabilities of the labels, fp32 [B, L]; 0 where none is predicted.

    `of_tokens` is as in `Workload.criterion`. Logits are divided by the temperature of the rollouts.

    Args:
        output: what the model returned; its logits are [B, L, vocabulary].
        batch: has `labels`, and `temperature` if it is not 1.
        of_tokens: the loss of tokens.
    """
    logits = tempered(output.logits, batch)
    each = of_tokens(logits, batch["labels"]).each_token
    return log_probabilities(logits, batch["labels"]) if each is None else -each.view_as(batch["labels"])


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels, fp32 [B, L], from logits [B, L, vocabulary] at the temperature.

    Args:
        logits: [B, L, vocabulary].
        labels: int64 [B, L].
    """
    each = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return -each.view_as(labels)


def tempered(logits: Tensor, batch: Batch) -> Tensor:
    """Return logits [B, L, vocabulary] divided by the temperature of the rollouts.

    Answers were drawn from the tempered distribution; the ratio of untempered probabilities would not be 1 before the
    first update.

    Args:
        logits: [B, L, vocabulary].
        batch: has `temperature`, fp32 [B], if it is not 1.
    """
    return logits / batch[TEMPERATURE].view(-1, 1, 1) if TEMPERATURE in batch else logits


def rewarded_loss(
    objective: Objective,
    output: Any,
    batch: Batch,
    of_tokens: Callable[[Tensor, Tensor], Loss],
    row_sum: RowSum = sum_of_row,
) -> Loss | None:
    """Return the loss of an `Output` for an objective over rewards; None for another objective.

    Args:
        objective: the objective.
        output: what the model returned.
        batch: the rows' entries, see this module.
        of_tokens: the loss of tokens.
        row_sum: sums over the tokens of whole rows.
    """
    if not isinstance(objective, Rewarded):
        return None
    log_p = token_log_probabilities(output, batch, of_tokens)
    loss = loss_of(objective, log_p, batch, batch["labels"] != IGNORE, row_sum)
    if output.extra is None:
        return loss
    return replace(loss, extra=output.extra, metrics={"router_loss": output.extra.detach()})


def answer_loss(
    objective: Objective, output: Any, batch: Batch, of_tokens: Callable[[Tensor, Tensor], Loss]
) -> Loss | None:
    """Return the loss of an `Output` for an objective over answers, given or generated; None for another objective.

    Args:
        objective: the objective.
        output: what the model returned.
        batch: the rows' entries.
        of_tokens: the loss of tokens.
    """
    compared = preference_loss(objective, output, batch, of_tokens)
    return rewarded_loss(objective, output, batch, of_tokens) if compared is None else compared
