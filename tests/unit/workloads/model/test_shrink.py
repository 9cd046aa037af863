"""A model that is a part of its base: which part, what it computes, and what cannot be taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.load import load
from workloads.model.importance import gradient, magnitude, units_of
from workloads.model.shrink import (
    Kept,
    KeptPart,
    Shrunk,
    base_of_size,
    chosen_layers,
    kept_layers,
    kept_units,
)
from workloads.transformer_workload import TransformerWorkload, shapes_of
from workloads.workload import Vocabulary

VOCABULARY = Vocabulary(160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))
SIZES = {"hidden": 32, "heads": 4, "head_dim": 8, "intermediate": 24, "layers": 3, "initial_std": 0.2}
MODELS = {
    "gpt-tiny": "causal_lm",
    "qwen3-tiny": "causal_lm",
    "bert-tiny": "masked_lm",
    "t5-tiny": "span_corruption",
}
LENGTH = 16


def workload_of(model: str, **sizes: Any) -> TransformerWorkload:
    grouped = {"kv_heads": 2} if model.startswith("qwen") else {}
    changes = SIZES | grouped | sizes
    found = load(
        model, MODELS.get(model, "causal_lm"), VOCABULARY, changes=changes, sequence_length=LENGTH, seed=1
    )
    assert isinstance(found, TransformerWorkload)
    return found


def batch_of(workload: TransformerWorkload, count: int = 3, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(6, 50, (count, LENGTH), generator=draw)
    if workload.config.architecture == "encoder-decoder":
        return {"tokens": tokens, "decoder_tokens": tokens.flip(1), "labels": tokens}
    return {"tokens": tokens, "labels": tokens.flip(1)}


class Weights:
    """The weights of a model, as those of a checkpoint."""

    notes = ()

    def __init__(self, model: nn.Module) -> None:
        self._tensors = model.state_dict()

    def find(self, name: str) -> Tensor | None:
        return self._tensors.get(name)


def filled(workload: TransformerWorkload, seed: int = 1) -> nn.Module:
    model = workload.build().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(workload.initial(name, seed))
    return model


def part_of(model: nn.Module, base: TransformerWorkload, small: TransformerWorkload, scores: Mapping[str, Tensor],
            layers: Any = "uniform") -> nn.Module:  # fmt: skip
    large = base_of_size(small.config, base.config)
    numbers = kept_layers(small.config, large, layers)
    shrunk = Shrunk(Weights(model), small.config, large, shapes_of(small.config), numbers)
    kept = kept_units(small.config, large, numbers, scores)
    from dataclasses import replace

    return filled(replace(small, pretrained=shrunk.keeping(Kept.of_json(kept.to_json()))))


def zero_units(model: nn.Module, config: Any, layer_seed: int = 0) -> None:
    """Make half of the columns, and half of the groups of heads, add exactly nothing; other ones in each layer."""
    with torch.no_grad():
        for number, (_, module, count) in enumerate(units_of(model, config)):
            gone = torch.randperm(count, generator=torch.Generator().manual_seed(layer_seed + number))[
                : count // 2
            ]
            module.weight.unflatten(1, (count, -1))[:, gone] = 0.0


@pytest.mark.parametrize("model", ["gpt-tiny", "qwen3-tiny", "bert-tiny"])
def test_without_units_that_add_nothing_the_outputs_are_the_same(model: str) -> None:
    base = workload_of(model)
    large = filled(base)
    zero_units(large, base.config)
    scores = gradient(large, base.config, base.loss, [batch_of(base), batch_of(base, seed=1)])
    assert all(int((each == 0).sum()) == len(each) // 2 for each in scores.values())
    config = base.config
    small = workload_of(
        model, intermediate=config.intermediate // 2, heads=config.heads // 2, kv_heads=config.kv_heads // 2
    )
    part = part_of(large, base, small, scores)
    batch = batch_of(base, seed=2)
    with torch.no_grad():
        wanted, found = large(batch), part(batch)
    torch.testing.assert_close(found.hidden, wanted.hidden, rtol=1e-5, atol=1e-5)
    sizes = [sum(each.numel() for each in model.parameters()) for model in (part, large)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("mixtral-tiny", {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 24}}),
        ("gpt-oss-20b", {"kv_heads": 2, "moe": {"experts": 4, "top_k": 2, "intermediate": 24}, "window": 6}),
    ],
)
def test_heads_of_models_with_experts_and_sinks(model: str, more: dict[str, Any]) -> None:
    base = workload_of(model, **more)
    large = filled(base)
    zero_units(large, base.config)
    scores = gradient(large, base.config, base.loss, [batch_of(base)])
    assert all(name.endswith("attention") for name in scores)
    part = part_of(large, base, workload_of(model, **more | {"heads": 2, "kv_heads": 1}), scores)
    batch = batch_of(base, seed=2)
    with torch.no_grad():
        torch.testing.assert_close(part(batch).hidden, large(batch).hidden, rtol=1e-5, atol=1e-5)
    fewer = {**more, "intermediate": 12}
    with pytest.raises(WorkloadError, match="shrink cannot choose columns of experts"):
        base_of_size(workload_of(model, **fewer).config, base.config)


def test_columns_of_an_encoder_decoder_too() -> None:
    base = workload_of("t5-tiny")
    large = filled(base)
    with torch.no_grad():
        for name, module, count in units_of(large, base.config):
            if name.endswith("feedforward"):
                module.weight[:, torch.arange(0, count, 3)] = 0.0
    scores = gradient(large, base.config, base.loss, [batch_of(base)])
    part = part_of(large, base, workload_of("t5-tiny", intermediate=16), scores)
    batch = batch_of(base, seed=2)
    with torch.no_grad():
        torch.testing.assert_close(part(batch).hidden, large(batch).hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_that_of_a_factor_of_the_weights_sample_by_sample(model: str) -> None:
    """A factor of a unit's output is one of the weights that read it: dL/dm = sum of dL/dW * W over its columns."""
    base = workload_of(model)
    large = filled(base)
    batches = [batch_of(base, seed=0), batch_of(base, count=2, seed=1)]
    found = gradient(large, base.config, base.loss, batches)
    wanted = {
        name: torch.zeros(count, dtype=torch.float64) for name, _, count in units_of(large, base.config)
    }
    for batch in batches:
        for row in range(len(batch["tokens"])):
            large.zero_grad()
            base.loss(large, {name: tensor[row : row + 1] for name, tensor in batch.items()}).total.backward()
            for name, module, count in units_of(large, base.config):
                each = (module.weight.grad * module.weight).double().sum(0)
                wanted[name] += each.reshape(count, -1).sum(1).abs() / 5
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-5 * float(each.detach().max()))


def test_the_magnitude_is_the_norm_of_all_that_would_be_removed() -> None:
    base = workload_of("qwen3-tiny")
    large = filled(base)
    scores = magnitude(large, base.config)
    layer = large.get_submodule("layers.1")
    columns = [
        torch.cat(
            [
                layer.feedforward.up.weight[n],
                layer.feedforward.gate.weight[n],
                layer.feedforward.down.weight[:, n],
            ]
        )
        for n in range(24)
    ]
    torch.testing.assert_close(
        scores["layers.1.feedforward"].float(),
        torch.stack([each.norm() for each in columns]),
        rtol=1e-5,
        atol=0,
    )
    two = slice(16, 32)  # the query heads of the second group, and its key and value
    parts = [
        layer.attention.query.weight[two],
        layer.attention.key.weight[8:],
        layer.attention.value.weight[8:],
        layer.attention.output.weight[:, two],
    ]
    norm = torch.cat([part.flatten() for part in parts]).norm()
    torch.testing.assert_close(scores["layers.1.attention"][1].float(), norm, rtol=1e-5, atol=0)


def test_layers_are_those_of_the_base_in_order() -> None:
    assert chosen_layers("uniform", 12, 6) == [0, 2, 4, 6, 8, 10]
    assert chosen_layers("uniform", 12, 5) == [0, 2, 4, 7, 9]
    assert chosen_layers("first", 5, 2) == [0, 1]
    assert chosen_layers("last", 5, 2) == [3, 4]
    assert chosen_layers([0, 4], 5, 2) == [0, 4]
    base = workload_of("gpt-tiny")
    large = filled(base)
    part = part_of(large, base, workload_of("gpt-tiny", layers=2), {}, [0, 2])
    for name, tensor in part.state_dict().items():
        assert tensor.equal(large.state_dict()[name.replace("layers.1.", "layers.2.")]), name


@pytest.mark.parametrize("numbers", [[0, 0], [2, 1], [0, 5], [-1, 2], [0], [0, 1, 2]])
def test_other_numbers_of_layers_are_refused(numbers: list[int]) -> None:
    with pytest.raises(WorkloadError, match="ascending numbers below 5"):
        chosen_layers(numbers, 5, 2)


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        ("gpt-tiny", {}, "as large as its base"),
        ("gpt-tiny", {"layers": 4}, "layers is 4, but the base has 3"),
        ("gpt-tiny", {"heads": 2, "head_dim": 16}, "set workload.changes.head_dim to 8"),
        ("qwen3-tiny", {"heads": 2}, "2 of them in the base"),
        ("t5-tiny", {"heads": 2}, "a bias by distance for each head"),
    ],
)
def test_what_cannot_be_a_part_is_refused(model: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        base_of_size(workload_of(model, **sizes).config, workload_of(model).config)


def test_a_layer_does_not_become_one_of_another_kind() -> None:
    window = {"window": 4, "full_every": 2, "layers": 6}
    base = workload_of("qwen3-tiny", **window).config
    small = workload_of("qwen3-tiny", **window | {"layers": 4}).config
    with pytest.raises(WorkloadError, match="only one of them has a window"):
        kept_layers(small, base, [0, 1, 3, 4])
    assert kept_layers(small, base, [0, 1, 4, 5]) == {"": [0, 1, 4, 5]}


def test_a_part_of_a_part_reads_what_it_needs() -> None:
    whole = torch.arange(60.0).view(6, 10)
    kept = KeptPart(KeptPart(whole, 0, [1, 4, 5]), 1, [0, 3, 9])
    assert kept.shape == (3, 3)
    index = whole[[1, 4, 5]][:, [0, 3, 9]]
    for rows in (slice(0, 3), slice(1, 2), slice(2, 3), slice(1, 1)):
        for columns in (slice(0, 3), slice(1, 3)):
            assert kept[rows, columns].equal(index[rows, columns])
