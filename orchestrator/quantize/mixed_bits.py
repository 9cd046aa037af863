"""Mixed bits: choose the weights that get int8 instead of int4, by how rounding each alone changes the loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.inference import with_weights
from workloads.model.fake_quantise import fake_quantised, quantised_layers
from workloads.model.scheme import Scheme
from workloads.workload import Batch, Workload

LOW, HIGH = 4, 8
"""Bits of a weight in int4 and in int8."""


@dataclass(frozen=True)
class Sensitivity:
    """How much the mean loss changes when only these weights are rounded.

    Attributes:
        weights: their names. They are more than one where transformers joins them in one matrix.
        numbers: how many numbers they have.
        low: the change of the loss by int4.
        high: the change of the loss by int8.
    """

    weights: tuple[str, ...]
    numbers: int
    low: float
    high: float

    @property
    def gain(self) -> float:
        """Return how much loss int8 saves for each number."""
        return (self.low - self.high) / self.numbers


@torch.no_grad()
def measure(
    workload: Workload,
    read: Callable[[str], Tensor],
    scheme: Scheme,
    together: Iterable[Sequence[str]],
    batches: Collection[Batch],
) -> tuple[float, list[Sensitivity]]:
    """Return the mean loss in full precision, and how much rounding each element of `together` alone changes it.

    Computes 2 n + 1 passes over the batches for n elements of `together`.

    Args:
        workload: the model and its objective.
        read: returns a weight in full precision by its name.
        scheme: the groups that share a scale.
        together: names of weights that are rounded together.
        batches: the samples on which the loss is measured.

    Raises WorkloadError if the samples have no token to predict.
    """
    model = with_weights(workload, read)
    layers = quantised_layers(model, workload.blocks(model), scheme)
    exact = _mean_loss(workload, model, batches)
    result = []
    for names in map(tuple, together):
        weights = [layers[name].get_parameter("weight") for name in names]
        full = [weight.clone() for weight in weights]
        changes = []
        for kind in ("int4", "int8"):
            rounds = replace(scheme, weights=kind, int8=())
            # From full precision for both formats: int8 of what int4 has rounded would keep the loss of int4.
            for weight, before in zip(weights, full, strict=True):
                weight.copy_(fake_quantised(before, rounds))
            changes.append(_mean_loss(workload, model, batches) - exact)
        for weight, before in zip(weights, full, strict=True):
            weight.copy_(before)
        result.append(Sensitivity(names, sum(each.numel() for each in full), changes[0], changes[1]))
    return exact, result


def _mean_loss(workload: Workload, model: nn.Module, batches: Iterable[Batch]) -> float:
    total = count = 0.0
    for batch in batches:
        loss = workload.loss(model, batch)
        total += float(loss.total)
        count += float(loss.count)
    if not count:
        raise WorkloadError(
            "the samples have no token to predict, so no loss can be measured; hold out more text"
        )
    # Per token, not per batch: batches have different numbers of tokens to predict.
    return total / count


def room_by_mean(measured: Collection[Sensitivity], mean_bits: float) -> float:
    """Return how many of the measured numbers may have int8, so that the mean of bits is at most `mean_bits`.

    Args:
        measured: the weights that may have either.
        mean_bits: between 4 and 8.
    """
    return (mean_bits - LOW) / (HIGH - LOW) * sum(each.numbers for each in measured)


def room_by_bytes(spare: int) -> float:
    """Return how many numbers may have int8, if an export with all in int4 leaves `spare` bytes."""
    return spare * 8 / (HIGH - LOW)


def chosen_for_int8(measured: Collection[Sensitivity], room: float) -> list[str]:
    """Return the names of the weights that get int8, which have at most `room` numbers.

    Greedy for the knapsack problem: the largest gain for each number first, what no longer fits is left out. Weights
    that lose nothing in int4 keep it, whatever room is left.

    Args:
        measured: the weights that may have either.
        room: numbers that may have int8.
    """
    result: list[str] = []
    for each in sorted(measured, key=lambda each: (-each.gain, each.weights)):
        if each.gain > 0 and each.numbers <= room:
            room -= each.numbers
            result += each.weights
    return sorted(result)


def mean_bits_of(measured: Collection[Sensitivity], int8: Collection[str]) -> float:
    """Return the mean bits of the measured weights if those named `int8` have 8, without scales.

    Args:
        measured: the weights that may have either.
        int8: names of those with int8.
    """
    in_8 = sum(each.numbers for each in measured if each.weights[0] in int8)
    return LOW + (HIGH - LOW) * in_8 / sum(each.numbers for each in measured)


def table(exact: float, measured: Collection[Sensitivity], int8: Collection[str], samples: str) -> str:
    """Return the plan as a table in Markdown, the most sensitive weights first.

    Args:
        exact: the mean loss of the samples in full precision.
        measured: what was measured.
        int8: the names of the weights with 8 bits.
        samples: by which samples, in words.
    """
    rows = [
        f"| {', '.join(each.weights)} | {each.numbers:,} | {each.low:+.2e} | {each.high:+.2e} "
        f"| {HIGH if each.weights[0] in int8 else LOW} |"
        for each in sorted(measured, key=lambda each: (-each.gain, each.weights))
    ]
    return "\n".join(
        [
            f"# Bits of each weight: {mean_bits_of(measured, int8):.2f} on average, without scales",
            "",
            f"The loss of {samples} is {exact:.6f} in full precision. A row has what rounding these weights alone "
            "adds to it. Weights are in the order in which they get int8.",
            "",
            "| weights | numbers | int4 adds | int8 adds | bits |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
