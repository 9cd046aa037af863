"""The loss of every combination of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.model.config import TransformerConfig
from workloads.model.electra import ElectraOutput
from workloads.model.transformer import IGNORED, Output
from workloads.workload import Batch, Loss

DISCRIMINATOR_WEIGHT = 50.0
"""Weight of replaced-token detection beside masked language modelling (ELECTRA, section 2)."""


TokenLoss = Callable[[Tensor, Tensor], Loss]
"""A function of logits and labels like `token_loss`."""


def token_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Cross-entropy summed over the labels that are not -100, int64 [B, L].

    logits are [B, L, classes], or [predicted, classes] where the model has left the others out.
    """
    predicted = labels != IGNORED
    labels = labels[predicted] if logits.dim() == 2 else labels.flatten()
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=IGNORED, reduction="sum")
    return Loss(total, predicted.sum().float())


def loss(
    config: TransformerConfig,
    output: Output | ElectraOutput,
    batch: Batch,
    of_tokens: TokenLoss = token_loss,
) -> Loss:
    """The loss of a model's output; `of_tokens` replaces `token_loss` if the logits are of a part of the vocabulary.

    language, masked, token: cross-entropy of `labels` [B, L] (-100 ignored), summed over tokens.
    With a sentence head (BERT, ALBERT): plus the mean cross-entropy of `sequence_labels` [B].
    sequence: cross-entropy of `sequence_labels`, summed over sequences.
    ELECTRA: cross-entropy of the generator plus 50 times the mean binary cross-entropy over real tokens.
    """
    if isinstance(output, ElectraOutput):
        return _electra(output, batch, of_tokens)
    if config.head == "sequence":
        assert output.sentence is not None
        return _sequence(output.sentence, batch["sequence_labels"])
    assert output.logits is not None
    result = of_tokens(output.logits, batch["labels"])
    metrics = dict(result.metrics)
    extra = output.extra
    if extra is not None:
        metrics["router_loss"] = extra.detach()
    if config.sentence_head:
        assert output.sentence is not None
        sentence = F.cross_entropy(output.sentence.float(), batch["sequence_labels"])
        metrics["sentence_loss"] = sentence.detach()
        metrics["sentence_accuracy"] = _accuracy(output.sentence, batch["sequence_labels"])
        extra = sentence if extra is None else extra + sentence
    return replace(result, extra=extra, metrics=metrics)


def _sequence(logits: Tensor, labels: Tensor) -> Loss:
    total = F.cross_entropy(logits.float(), labels, reduction="sum")
    count = torch.tensor(float(len(labels)), device=labels.device)
    return Loss(total, count, metrics={"accuracy": _accuracy(logits, labels)})


def _electra(output: ElectraOutput, batch: Batch, of_tokens: TokenLoss) -> Loss:
    generator = of_tokens(output.generator, batch["labels"])
    real = batch.get("padding", torch.ones_like(output.replaced))
    logits, replaced = output.discriminator.float()[real], output.replaced[real]
    found = F.binary_cross_entropy_with_logits(logits, replaced.float())
    metrics = {
        "discriminator_loss": found.detach(),
        "discriminator_accuracy": ((logits > 0) == replaced).float().mean(),
        "replaced": replaced.float().mean(),
    }
    return replace(generator, extra=DISCRIMINATOR_WEIGHT * found, metrics=metrics)


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.detach().argmax(-1) == labels).float().mean()
