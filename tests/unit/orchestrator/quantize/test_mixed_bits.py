"""The measure of mixed bits is that of a plain loop with compressed-tensors' rounding, and the choice is that of all
choices where sizes are equal."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from traced_cases import vocabulary_of

from orchestrator.quantize.mixed_bits import (
    Sensitivity,
    chosen_for_int8,
    mean_bits_of,
    measure,
    room_by_bytes,
    room_by_mean,
    table,
)
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.scheme import Scheme


def test_the_loss_is_that_of_a_plain_loop() -> None:
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate": 64}
    workload = load("llama-tiny", "causal_lm", vocabulary_of(64), changes=sizes, sequence_length=16)
    read = {name: workload.initial(name, 3) * 4 for name in workload.shapes}
    torch.manual_seed(0)
    tokens = torch.randint(6, 60, (4, 17))
    batches = [{"tokens": part[:, :-1], "labels": part[:, 1:]} for part in (tokens[:3], tokens[3:])]
    names = ["layers.0.attention.query.weight", "layers.0.feedforward.down.weight"]
    exact, found = measure(
        workload, read.__getitem__, Scheme("int4", 32), [[names[0]], [names[1]], names], batches
    )

    def loss(bits: int, *rounded: str) -> float:
        model = with_weights(workload, read.__getitem__)
        args = QuantizationArgs(num_bits=bits, symmetric=True, strategy="group", group_size=32)
        for name in rounded:
            weight = model.get_parameter(name)
            groups = weight.detach().unflatten(-1, (-1, 32))
            most = 2 ** (bits - 1)
            scale = torch.maximum(groups.amax(-1) / (most - 1), groups.amin(-1) / -most)
            weight.data = fake_quantize(weight.detach(), scale, None, args)
        logits = torch.cat([model(batch).logits for batch in batches])
        labels = torch.cat([batch["labels"] for batch in batches])
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).detach())

    assert exact == pytest.approx(loss(4), abs=1e-5)
    for each, rounded in zip(found, ([names[0]], [names[1]], names), strict=True):
        assert each.low == pytest.approx(loss(4, *rounded) - loss(4), abs=1e-5)
        assert each.high == pytest.approx(loss(8, *rounded) - loss(4), abs=1e-5)
        assert abs(each.low) > 1e-3
    assert [each.numbers for each in found] == [32 * 32, 32 * 64, 32 * 32 + 32 * 64]


def test_of_equal_sizes_the_choice_saves_most_loss_of_all_choices() -> None:
    torch.manual_seed(0)
    lows = torch.randn(8).tolist()
    measured = [Sensitivity((f"w{i}",), 64, low, 0.0) for i, low in enumerate(lows)]
    for mean_bits in (4.4, 5.0, 5.5, 7.9):
        room = int((mean_bits - 4) / 4 * 8)
        best = max(
            (each for count in range(room + 1) for each in combinations(range(8), count)),
            key=lambda each: sum(lows[i] for i in each),
        )
        int8 = chosen_for_int8(measured, room_by_mean(measured, mean_bits))
        assert int8 == [f"w{i}" for i in best]
        assert mean_bits_of(measured, int8) <= mean_bits


def test_a_large_weight_must_gain_more_and_what_does_not_fit_is_left_out() -> None:
    measured = [
        Sensitivity(("large",), 100, 1.0, 0.0),
        Sensitivity(("key", "query"), 40, 0.8, 0.1),
        Sensitivity(("small",), 20, 0.1, 0.0),
        Sensitivity(("harmless",), 40, -0.1, 0.0),
    ]
    assert chosen_for_int8(measured, room_by_mean(measured, 5.5)) == ["key", "query", "small"]  # 75 of 200
    assert chosen_for_int8(measured, room_by_mean(measured, 7.9)) == ["key", "large", "query", "small"]
    assert chosen_for_int8(measured, room_by_bytes(30)) == ["key", "query", "small"], "each adds half a byte"
    assert chosen_for_int8(measured, room_by_bytes(29)) == ["key", "query"]
    assert mean_bits_of(measured, ["key", "query", "small"]) == pytest.approx(5.2)
    rows = table(2.0, measured, ["key", "query", "small"], "held-out samples").splitlines()
    assert rows[0] == "# Bits of each weight: 5.20 on average, without scales"
    assert rows[-4:] == [
        "| key, query | 40 | +8.00e-01 | +1.00e-01 | 8 |",
        "| large | 100 | +1.00e+00 | +0.00e+00 | 4 |",
        "| small | 20 | +1.00e-01 | +0.00e+00 | 8 |",
        "| harmless | 40 | -1.00e-01 | +0.00e+00 | 4 |",
    ]
