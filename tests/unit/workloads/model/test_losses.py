"""Which labels meet which logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.model.electra import ElectraOutput
from workloads.model.losses import DISCRIMINATOR_WEIGHT, loss, token_loss
from workloads.model.presets import preset
from workloads.model.transformer import Output


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_token_loss_sums_over_what_is_predicted() -> None:
    logits, labels = random(2, 3, 5), torch.tensor([[1, -100, 4], [-100, -100, 0]])
    result = token_loss(logits, labels)
    by_hand = -sum(logits[b, i].log_softmax(-1)[labels[b, i]] for b, i in ((0, 0), (0, 2), (1, 2)))
    assert result.total == pytest.approx(by_hand.item())
    assert result.count == 3
    assert result.total.dtype == result.count.dtype == torch.float32


def test_nothing_to_predict_is_no_nan() -> None:
    result = token_loss(random(1, 2, 5).requires_grad_(), torch.full((1, 2), -100))
    result.total.backward()
    assert (result.total, result.count) == (0, 0)


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits = random(4, 64, 97).bfloat16()
    labels = torch.zeros(4, 64, dtype=torch.int64)
    assert token_loss(logits, labels).total.dtype == torch.float32


def test_bert_adds_the_sentence_loss() -> None:
    config, labels = preset("bert-tiny"), torch.zeros(3, 4, dtype=torch.int64)
    output = Output(random(3, 4, 8), None, random(3, 4, 9), random(3, 2))
    batch = {"labels": labels, "sequence_labels": torch.tensor([0, 1, 1])}
    result = loss(config, output, batch)
    assert torch.equal(result.total, token_loss(output.logits, labels).total)
    assert torch.equal(result.extra, F.cross_entropy(output.sentence, batch["sequence_labels"]))
    hits = (output.sentence.argmax(-1) == batch["sequence_labels"]).float().mean()
    assert result.metrics["sentence_accuracy"] == hits


def test_router_losses_are_passed_on() -> None:
    output = Output(random(1, 2, 8), torch.tensor(0.25), random(1, 2, 9))
    result = loss(preset("mixtral-tiny"), output, {"labels": torch.zeros(1, 2, dtype=torch.int64)})
    assert result.extra == 0.25
    assert result.metrics["router_loss"] == 0.25


def test_classes_of_a_sequence_count_sequences() -> None:
    config = preset("bert-tiny").changed({"head": "sequence", "classes": 3, "sentence_head": False})
    labels = torch.tensor([2, 0])
    result = loss(config, Output(random(2, 4, 8), sentence=random(2, 3)), {"sequence_labels": labels})
    assert result.total == pytest.approx(F.cross_entropy(random(2, 3), labels, reduction="sum").item())
    assert result.count == 2
    right = int((random(2, 3).argmax(-1) == labels).sum())
    assert [each.item() for each in result.sums["accuracy"]] == [
        right,
        2,
    ]  # their mean is of all micro-batches


def test_electra_weighs_the_discriminator() -> None:
    found, replaced = random(2, 4), torch.tensor([[True, False, False, True], [False] * 4])
    batch = {
        "labels": torch.full((2, 4), -100),
        "padding": torch.tensor([[True] * 4, [True, True, False, False]]),
    }
    batch["labels"][0, 0] = 3
    output = ElectraOutput(random(2, 4, 9), found, replaced)
    result = loss(preset("electra-tiny"), output, batch)
    real = batch["padding"]
    expected = F.binary_cross_entropy_with_logits(found[real], replaced[real].float())
    assert DISCRIMINATOR_WEIGHT == 50
    assert torch.allclose(result.extra, 50 * expected)
    assert result.count == 1
    assert result.metrics["replaced"] == pytest.approx(2 / 6)
