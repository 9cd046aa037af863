"""The losses of all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.model.electra import ElectraOutput
from workloads.model.transformer import LABEL_WEIGHTS, Output
from workloads.workload import IGNORED, Batch, Loss


class Headed(Protocol):
    """The fields of a model's configuration that its loss depends on."""

    @property
    def head(self) -> str:
        """Return the name of the head on the last hidden states."""
        ...

    @property
    def classes(self) -> int:
        """Return the number of outputs of that head."""
        ...

    @property
    def sentence_head(self) -> bool:
        """Return whether there is also a head for the full sequence."""
        ...


DISCRIMINATOR_WEIGHT = 50.0
"""The weight of replaced-token detection relative to masked language modelling (ELECTRA, section 2)."""


TokenLoss = Callable[[Tensor, Tensor], Loss]
"""A function of logits and labels like `token_loss`."""


def token_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Return the cross-entropy summed over the labels that are not -100, int64 [B, L].

    logits are [B, L, classes], or [predicted, classes] if the model computed only the predicted positions.

    Args:
        logits: [B, L, classes] or [predicted, classes].
        labels: int64 [B, L].
    """
    predicted = labels != IGNORED
    labels = labels[predicted] if logits.dim() == 2 else labels.flatten()
    # In fp32: the logarithm of a sum over a vocabulary needs more than the 8 bits of bf16. A sum, because the mean is
    # over the tokens of the global batch, which only the caller can count.
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=IGNORED, reduction="sum")
    return Loss(total, predicted.sum().float())


def loss(
    config: Headed,
    output: Output | ElectraOutput,
    batch: Batch,
    of_tokens: TokenLoss = token_loss,
) -> Loss:
    """Return the loss of a model's output. `of_tokens` replaces `token_loss` if the logits are vocabulary-parallel.

    language, masked, token: cross-entropy of `labels` [B, L] (-100 ignored), summed over tokens.

    span: mean of the cross-entropies of the first and the last token, `labels` [B, 2], summed over sequences.

    sequence: cross-entropy of `sequence_labels` [B] (-100 ignored), summed over sequences; with one class, the squared
    error to fp32 `sequence_labels` (NaN ignored); with fp32 `sequence_labels` [B, classes], their binary cross-entropy,
    a mean over classes.

    `label_weights` of the labels' shape weigh the cross-entropies. The count is then the sum of weights.

    With a sentence head (BERT, ALBERT): plus the mean cross-entropy of `sequence_labels` [B].

    ELECTRA: cross-entropy of the generator plus 50 times the mean binary cross-entropy over real tokens.

    Args:
        config: the head and its classes.
        output: what the model returned.
        batch: has the labels.
        of_tokens: the loss of vocabulary logits.
    """
    if isinstance(output, ElectraOutput):
        return _electra(output, batch, of_tokens)
    if config.head == "sequence":
        assert output.sentence is not None
        labels = batch["sequence_labels"]
        if labels.dim() == 2:
            summed = _several(output.sentence, labels, batch.get(LABEL_WEIGHTS))
        elif config.classes == 1:
            summed = _regression(output.sentence, labels)
        else:
            summed = _sequence(output.sentence, labels, batch.get(LABEL_WEIGHTS))
        return _with_routers(summed, output)
    if config.head in ("token", "span"):
        assert output.logits is not None
        labels = batch["labels"]
        summed = (
            _span(output.logits, labels)
            if config.head == "span"
            else _by_token(output.logits, labels, batch.get(LABEL_WEIGHTS))
        )
        return _with_routers(summed, output)
    result = of_output(output, batch, of_tokens)
    metrics = dict(result.metrics)
    extra = output.extra
    if extra is not None:
        metrics["router_loss"] = extra.detach()
    if config.sentence_head:
        assert output.sentence is not None
        # A mean over the micro-batch, so layouts of such models give all ranks equally many (`ModelShape.even_shares`).
        sentence = F.cross_entropy(output.sentence.float(), batch["sequence_labels"])
        metrics["sentence_loss"] = sentence.detach()
        metrics["sentence_accuracy"] = _accuracy(output.sentence, batch["sequence_labels"])
        extra = sentence if extra is None else extra + sentence
    return replace(result, extra=extra, metrics=metrics)


def of_output(output: Output, batch: Batch, of_tokens: TokenLoss) -> Loss:
    """Return the token loss of vocabulary logits, or of the sums that were computed instead of them.

    Args:
        output: what the model returned.
        batch: has `labels`.
        of_tokens: the loss of vocabulary logits.
    """
    if output.sums is not None:
        total, count, *correct = output.sums
        return Loss(total, count, correct=correct[0] if correct else None)
    assert output.logits is not None
    return of_tokens(output.logits, batch["labels"])


def _sequence(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Loss:
    predicted = labels != IGNORED
    total, weight = _weighed(logits, labels, weights)
    likeliest = logits.detach().argmax(-1)
    correct = ((likeliest == labels) & predicted).sum().float()
    count = predicted.sum().float()
    each = torch.stack([likeliest, labels], 1)
    return Loss(total, weight, sums={"accuracy": (correct, count)}, correct=correct, each=each)


def _weighed(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross-entropies of labels [..] times their weights, and the sum of the weights."""
    logits = logits.flatten(0, -2).float()
    if weights is None:
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum().float()
    each = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
    # The sum of the weights divides the loss later, as torch.nn.CrossEntropyLoss(weight=...) does.
    weights = weights.flatten() * (labels.flatten() != IGNORED)
    return (each * weights).sum(), weights.sum()


def _several(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Loss:
    """Return the binary cross-entropy of labels [B, classes], with precision, recall and F1 over all labels."""
    has_label = ~labels.isnan().any(-1)
    targets = labels.where(has_label[:, None], 0.0)
    each = F.binary_cross_entropy_with_logits(logits.float(), targets, weights, reduction="none").mean(-1)
    count = has_label.sum().float()
    predicted = (logits.detach() > 0) & has_label[:, None]
    is_positive = targets > 0
    # Counts, not ratios: they add up over micro-batches and ranks, and F1 = 2 TP / (2 TP + FP + FN) is exact for all
    # texts.
    both, all_predicted, all_positive = (
        (x.sum().float()) for x in (predicted & is_positive, predicted, is_positive)
    )
    correct = ((predicted == is_positive).all(-1) & has_label).sum().float()
    sums = {
        "accuracy": (correct, count),
        "precision": (both, all_predicted),
        "recall": (both, all_positive),
        "f1": (2 * both, all_predicted + all_positive),
    }
    return Loss((each * has_label).sum(), count, sums=sums, correct=correct)


def _regression(logits: Tensor, labels: Tensor) -> Loss:
    predicted = ~labels.isnan()
    apart = logits[:, 0].float() - labels.where(predicted, 0.0)
    each = torch.stack([logits.detach()[:, 0].float(), labels], 1)
    return Loss((apart.square() * predicted).sum(), predicted.sum().float(), each=each)


def _by_token(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Loss:
    predicted = labels != IGNORED
    correct = ((logits.detach().argmax(-1) == labels) & predicted).sum().float()
    total, weight = _weighed(logits, labels, weights)
    # Of weighted labels, the accuracy is not the correct ones over the sum of weights.
    sums = {} if weights is None else {"accuracy": (correct, predicted.sum().float())}
    return Loss(total, weight, correct=correct, sums=sums)


def _span(logits: Tensor, labels: Tensor) -> Loss:
    """Return the loss of logits [B, L, 2] for the first and the last token of a span."""
    both = logits.float().transpose(1, 2)
    predicted = (labels != IGNORED).all(-1)
    # [B x 2, L]: a softmax over the positions of a text, once for its first and once for its last token.
    total = F.cross_entropy(both.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / 2
    right = (both.detach().argmax(-1) == labels).all(-1) & predicted
    return Loss(total, predicted.sum().float(), correct=right.sum().float())


def _with_routers(summed: Loss, output: Output) -> Loss:
    if output.extra is None:
        return summed
    return replace(
        summed, extra=output.extra, metrics={**summed.metrics, "router_loss": output.extra.detach()}
    )


def _electra(output: ElectraOutput, batch: Batch, of_tokens: TokenLoss) -> Loss:
    generator = of_tokens(output.generator, batch["labels"])
    real = batch.get("padding", torch.ones_like(output.replaced))
    logits = output.discriminator.float()[real]
    replaced = output.replaced[real]
    # Also a mean over the micro-batch: every real token has a target here, not only the masked ones (ELECTRA, section
    # 2).
    discriminator = F.binary_cross_entropy_with_logits(logits, replaced.float())
    metrics = {
        "discriminator_loss": discriminator.detach(),
        "discriminator_accuracy": ((logits > 0) == replaced).float().mean(),
        "replaced": replaced.float().mean(),
    }
    return replace(generator, extra=DISCRIMINATOR_WEIGHT * discriminator, metrics=metrics)


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.detach().argmax(-1) == labels).float().mean()
