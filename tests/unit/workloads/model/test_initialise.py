"""First weights: as published, and the same bits wherever they are made."""

import hashlib
import math
from collections.abc import Sequence

import pytest
import torch

from workloads.model import initialise
from workloads.model.initialise import drawn, initial, normal
from workloads.model.presets import preset
from workloads.model.stored import whole
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary


def value(name: str, tensor: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return initial(preset(name), tensor, torch.Size(shape), seed)


def test_a_tensor_is_a_function_of_seed_and_name() -> None:
    first = value("gpt2", "layers.3.attention.query.weight", (64, 64))
    torch.manual_seed(99)
    assert torch.equal(first, value("gpt2", "layers.3.attention.query.weight", (64, 64)))
    assert not torch.equal(first, value("gpt2", "layers.4.attention.query.weight", (64, 64)))
    assert not torch.equal(first, value("gpt2", "layers.3.attention.query.weight", (64, 64), seed=1))


def test_the_bits_are_fixed() -> None:
    """A change here makes old runs start elsewhere: it must be meant."""
    made = value("gpt2", "tokens.weight", (32, 16))
    assert hashlib.sha256(made.numpy().tobytes()).hexdigest()[:16] == "cfd71e96fae7eb4b"
    tiles = value("gpt2", "tokens.weight", (100, 1030))
    assert hashlib.sha256(tiles.numpy().tobytes()).hexdigest()[:16] == "69eb4d21a91f301e"


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "std"),
    [
        ("gpt2", "tokens.weight", (512, 256), 0.02),
        ("gpt2", "embeddings.positions.weight", (512, 256), 0.01),
        ("gpt2", "layers.0.attention.output.weight", (256, 256), 0.02 / 24**0.5),
        ("gpt2", "layers.0.feedforward.down.weight", (256, 256), 0.02 / 24**0.5),
        ("gpt2", "layers.0.feedforward.up.weight", (256, 256), 0.02),
        ("llama-3-8b", "layers.0.attention.output.weight", (256, 256), 0.02),
        ("deepseek-v3", "layers.5.feedforward.experts.down", (4, 256, 128), 0.006),
        ("bart-base", "encoder.layers.0.attention.query.weight", (256, 256), 0.02),
        ("t5-base", "tokens.weight", (256, 256), 1.0),
        ("t5-base", "encoder.layers.0.attention.query.weight", (256, 768), (768 * 64) ** -0.5),
        ("t5-base", "encoder.layers.0.attention.key.weight", (256, 768), 768**-0.5),
        ("t5-base", "decoder.layers.0.feedforward.down.weight", (256, 3072), 3072**-0.5),
        ("t5-base", "encoder.relative_bias.weight", (512, 256), 768**-0.5),
        ("switch-base-8", "encoder.layers.1.feedforward.experts.up", (8, 256, 768), (0.1 / 768) ** 0.5),
    ],
)
def test_the_spread_is_the_published_one(name: str, tensor: str, shape: tuple[int, ...], std: float) -> None:
    made = value(name, tensor, shape)
    assert made.dtype == torch.float32
    assert made.std().item() == pytest.approx(std, rel=0.02)
    assert abs(made.mean().item()) < 0.02 * std


def test_bert_draws_nothing_beyond_two_deviations() -> None:
    made = value("bert-base", "layers.0.attention.query.weight", (512, 512))
    assert made.abs().max() <= 0.04
    assert made.abs().max() > 0.039
    assert value("roberta-base", "layers.0.attention.query.weight", (512, 512)).abs().max() > 0.06


def test_norms_begin_at_one_and_biases_at_zero() -> None:
    for tensor in ("layers.0.attention_norm.weight", "embeddings.norm.weight", "norm.weight"):
        assert torch.equal(value("gpt2", tensor, (8,)), torch.ones(8))
    for tensor in ("layers.0.attention_norm.bias", "layers.0.feedforward.router.bias", "head.output.bias"):
        assert torch.equal(value("gpt2", tensor, (8,)), torch.zeros(8))


def test_a_fresh_language_model_guesses_evenly() -> None:
    for name in ("gpt-tiny", "llama-tiny", "mixtral-tiny", "bert-tiny"):
        workload = TransformerWorkload(name, preset(name), None, Vocabulary(4096, 0))
        model = workload.build()
        model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
        tokens = torch.randint(4096, (2, 32), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": tokens, "labels": tokens.roll(-3, 1), "sequence_labels": torch.tensor([0, 1])}
        result = workload.loss(model, batch)
        assert (result.total / result.count).item() == pytest.approx(8.32, abs=0.15)


@pytest.mark.parametrize("shape", [(150, 2100), (3, 80, 1500), (70_000,), (40, 30)])
def test_a_part_is_drawn_as_of_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that it does not touch."""
    found = drawn(preset("bert-base"), "layers.0.feedforward.up.weight", torch.Size(shape), 5)
    assert found is not None
    made = found[whole(shape)]
    assert len(made.unique()) > 0.98 * made.numel()
    drawn_values = 0

    def counted(seed: int, name: str, shape: Sequence[int], beyond: float) -> torch.Tensor:
        nonlocal drawn_values
        drawn_values += math.prod(shape)
        return normal(seed, name, shape, beyond)

    monkeypatch.setattr(initialise, "normal", counted)
    for part in (
        tuple(slice(n // 3, n // 2) for n in shape),
        tuple(slice(n - 2, n) for n in shape),
        tuple(slice(0, 1) for n in shape),
        tuple(slice(n, n) for n in shape),
    ):
        assert torch.equal(found[part], made[part])
    if made.numel() > 65_536:
        drawn_values = 0
        assert found[tuple(slice(0, 1) for _ in shape)].numel() == 1
        assert drawn_values <= 65_536
