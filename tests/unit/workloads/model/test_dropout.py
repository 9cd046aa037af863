"""Masks of dropout: their share, that they have nothing to do with each other, and that no cut changes them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from workloads.errors import WorkloadError
from workloads.load import load
from workloads.model.attention import AttentionCore
from workloads.model.dropout import (
    KEYS,
    PLACES,
    SELF_SCORES,
    SKIPS,
    drop,
    keyed,
    row_keys,
    sample_keys,
    skip,
)
from workloads.model.masks import Mask
from workloads.model.presets import preset
from workloads.objectives.samples import Samples
from workloads.transformer_workload import TransformerWorkload, build_model
from workloads.workload import Batch, Vocabulary

RATE, ROWS, LENGTH, FEATURES = 0.1, 6, 16, 50
VOCABULARY = Vocabulary(160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))
SMALL = {"hidden": 32, "heads": 4, "intermediate": 48, "max_positions": 64}
MODELS = {
    "gpt-tiny": "causal_lm",
    "llama-tiny": "causal_lm",
    "mixtral-tiny": "causal_lm",
    "bert-tiny": "masked_lm",
    "albert-tiny": "masked_lm",
    "t5-tiny": "span_corruption",
    "electra-tiny": "replaced_token_detection",
}


def kept(seed: int = 1, position: int = 0, layer: int = 0, site: int = 0, rows: int = ROWS) -> Tensor:
    """The mask of [rows, LENGTH, FEATURES], True where nothing is zeroed."""
    keys = keyed(keyed(row_keys(seed, position, rows).unsqueeze(1), torch.arange(LENGTH)), layer)
    return drop(torch.ones(rows, LENGTH, FEATURES), RATE, keys, site) != 0


def splitmix64(seed: int, number: int) -> int:
    """Figure 13 of the paper, in whole numbers."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_keys_are_those_of_the_published_generator() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        seed, number = drawn.getrandbits(64), drawn.getrandbits(40)
        signed = seed - 2**64 if seed >= 2**63 else seed
        assert int(keyed(torch.tensor([signed]), number)) % 2**64 == splitmix64(seed, number)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_the_rate_and_the_mean_stays(rate: float) -> None:
    x = torch.ones(64, 64, 256)
    keys = keyed(row_keys(3, 0, 64).unsqueeze(1), torch.arange(64))
    y = drop(x, rate, keys, 0)
    error = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(float((y == 0).double().mean()) - rate) < 5 * error + 2**-16
    assert abs(float(y.double().mean()) - 1) < 5 * error / (1 - rate)
    assert len(y.unique()) == 2


def test_masks_of_seeds_samples_positions_layers_sites_and_features_are_independent() -> None:
    """Two masks agree as often as two that know nothing of each other: correlation within 5 standard errors."""
    base = kept(rows=64)
    others = {
        "seed": kept(seed=2, rows=64),
        "sample": kept(position=1, rows=64),
        "step": kept(position=64, rows=64),
        "layer": kept(layer=1, rows=64),
        "site": kept(site=1, rows=64),
        "position": base.roll(1, 1),
        "feature": base.roll(1, 2),
        "lane": base.roll(4, 2),
    }
    for name, other in others.items():
        both = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]).double())[0, 1]
        assert abs(float(both)) < 5 / base.numel() ** 0.5, name


def test_no_two_of_a_million_keys_are_the_same() -> None:
    keys = [keyed(row_keys(7, 0, 500).unsqueeze(1), torch.arange(500)), row_keys(8, 0, 500_000)]
    assert len(torch.cat([k.flatten() for k in keys]).unique()) == 750_000


def test_any_cut_has_the_part_of_the_whole() -> None:
    whole = kept()
    for first, count in [(0, 2), (2, 3), (5, 1)]:
        assert torch.equal(kept(position=first, rows=count), whole[first : first + count])


def test_nothing_is_dropped_without_keys_or_at_rate_zero() -> None:
    x = torch.randn(2, 3, 5)
    assert drop(x, 0.5, None, 0) is x
    assert drop(x, 0.0, row_keys(0, 0, 2).unsqueeze(1), 0) is x


def test_gradients_are_zero_where_the_output_is() -> None:
    x = torch.randn(2, 8, 33, dtype=torch.float64, requires_grad=True)
    keys = keyed(row_keys(0, 0, 2).unsqueeze(1), torch.arange(8))
    y = drop(x, 0.3, keys, 1)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.autograd.gradcheck(lambda x: drop(x, 0.3, keys, 1), (x,))


def made(model: str, dropout: float) -> tuple[TransformerWorkload, torch.nn.Module]:
    changes = SMALL | ({"generator": 16} if "electra" in model else {})
    changes |= {"kv_heads": 2} if "mixtral" in model else {}
    workload = load(
        model,
        MODELS[model],
        VOCABULARY,
        changes=changes,
        dropout=dropout,
        attention_dropout=dropout,
        sequence_length=LENGTH,
    )
    assert isinstance(workload, TransformerWorkload)
    network = workload.build()
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            tensor.copy_(workload.initial(name, 1))
    return workload, network.train()


def batch_of(workload: TransformerWorkload) -> Batch:
    window = workload.objective.window(LENGTH)
    tokens = torch.randint(6, 50, (ROWS, window), generator=torch.Generator().manual_seed(0)).numpy()
    return workload.objective.collate(Samples(lambda i: tokens[i % ROWS], ROWS), range(ROWS), 0)


@pytest.mark.parametrize("model", MODELS)
def test_a_row_is_trained_alike_in_any_batch_and_otherwise_than_without(model: str) -> None:
    workload, network = made(model, RATE)
    batch = batch_of(workload)
    whole = workload.loss(network, batch | {KEYS: row_keys(5, 0, ROWS)}).total
    parts = [
        workload.loss(network, {k: v[i : i + 1] for k, v in batch.items()} | {KEYS: row_keys(5, i, 1)}).total
        for i in range(ROWS)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-5, atol=0)
    other = workload.loss(network, batch | {KEYS: row_keys(6, 0, ROWS)}).total
    plain = workload.loss(network.eval(), batch).total
    assert len({loss.item() for loss in (whole, other, plain)}) == 3
    assert torch.equal(plain, workload.loss(made(model, 0.0)[1], batch).total)


@pytest.mark.parametrize("model", MODELS)
def test_training_with_dropout_needs_the_keys(model: str) -> None:
    workload, network = made(model, RATE)
    with pytest.raises(KeyError, match=KEYS):
        workload.loss(network, batch_of(workload))


def test_layers_that_are_shared_draw_anew_at_every_turn() -> None:
    seen: list[Tensor] = []
    workload, network = made("albert-tiny", RATE)
    for layer in network.layers.values():  # type: ignore[operator, union-attr]
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[1].keys))
    workload.loss(network, batch_of(workload) | {KEYS: row_keys(5, 0, ROWS)})
    assert len(seen) == workload.config.layers > 1
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(seen, 2))


def test_a_part_of_the_sequence_draws_for_the_places_that_it_holds() -> None:
    from workloads.model.dropout import token_keys

    _, network = made("gpt-tiny", RATE)
    rows, places = row_keys(5, 0, ROWS), torch.tensor([3, 4, 11, 12])
    whole = token_keys(network, {KEYS: rows}, LENGTH)
    part = token_keys(network, {KEYS: rows, PLACES: places.expand(ROWS, -1)}, 4)
    assert whole is not None
    assert part is not None
    assert torch.equal(part, whole[:, places])


# -- attention


def test_shares_of_attention_are_dropped_by_head_query_and_key() -> None:
    """The published generator in whole numbers, one share after the other."""
    rate, (rows, heads, queries, keys) = 0.25, (2, 3, 4, 6)
    core = AttentionCore(1.0, dropout=rate)
    q, k = (torch.randn(rows, heads, length, 8, dtype=torch.float64) for length in (queries, keys))
    tokens = keyed(row_keys(5, 0, rows).unsqueeze(1), torch.arange(queries))
    found = core(q, k, torch.eye(keys, dtype=torch.float64).expand(rows, heads, -1, -1), Mask(), None, tokens)
    shares = (q @ k.transpose(-2, -1)).softmax(-1)
    zeroed = round(rate * 2**16)
    for row, head, query, key in itertools.product(*map(range, (rows, heads, queries, keys))):
        drawn = int(tokens[row, query])
        for number in (head, SELF_SCORES, key // 4):
            drawn = splitmix64(drawn % 2**64, number)
        number = drawn >> 16 * (key % 4) & 0xFFFF
        kept = (number - 2**16 if number >= 2**15 else number) >= zeroed - 2**15
        wanted = shares[row, head, query, key] / (1 - rate) if kept else 0.0
        assert abs(float(found[row, head, query, key] - wanted)) < 1e-12
    core.part = 1  # the second of two ranks has heads 3 to 5
    other = core(q, k, torch.eye(keys, dtype=torch.float64).expand(rows, heads, -1, -1), Mask(), None, tokens)
    assert not torch.equal(found == 0, other == 0)


@pytest.mark.parametrize(
    ("model", "changes"),
    [("gpt-tiny", {}), ("gpt-tiny", {"sinks": True}), ("t5-tiny", {}), ("deepseek-v3-tiny", {})],
)
def test_only_training_with_a_rate_leaves_the_fused_kernel(model: str, changes: dict[str, Any]) -> None:
    """A rate that is rounded to nothing computes what the fused kernel does."""
    config = preset(model).changed(changes)
    rare = build_model(replace(config, attention_dropout=2.0**-18)).double().train()
    plain = build_model(config).double()
    for tensor in itertools.chain(rare.state_dict().values(), plain.state_dict().values()):
        torch.nn.init.normal_(tensor, std=0.1, generator=torch.Generator().manual_seed(tensor.numel()))
    tokens = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "decoder_tokens": tokens, KEYS: row_keys(3, 40, 2)}
    torch.testing.assert_close(rare(batch).logits, plain(batch).logits, rtol=0, atol=1e-8)
    assert torch.equal(rare.eval()(batch).logits, plain(batch).logits)


@pytest.mark.parametrize(
    ("kind", "objective", "fields"),
    [
        ("BertForMaskedLM", "masked_lm", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                                          "intermediate_size": 48, "max_position_embeddings": 32}),
        ("GPT2LMHeadModel", "causal_lm", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    ],
)  # fmt: skip
def test_dropout_is_where_the_published_class_has_it(
    kind: str, objective: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' class in training, its dropout replaced by ours in the order in which it calls it."""
    import transformers

    made_by = getattr(transformers, kind)
    theirs = made_by(made_by.config_class(vocab_size=160, **fields, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path)
    workload = load(
        f"hf:{tmp_path}", objective, VOCABULARY, dropout=0.1, attention_dropout=0.2, sequence_length=LENGTH
    )
    ours = workload.build()
    ours.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    tokens = torch.randint(6, 50, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = row_keys(5, 0, 3)
    found = ours.train()({"tokens": tokens, KEYS: rows}).logits
    keys = keyed(keyed(rows.unsqueeze(1), 0), torch.arange(LENGTH))
    places = iter([(0, 0), *((layer, site) for layer in (1, 2) for site in (SELF_SCORES, 0, 2))])

    def counted(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        layer, site = next(places)
        of = keyed(keys, layer) if layer else keys
        if site != SELF_SCORES:
            return drop(x, 0.1, of, site)
        return drop(x, 0.2, keyed(of.unsqueeze(1), torch.arange(4).unsqueeze(-1)), site)

    monkeypatch.setattr(torch.nn.functional, "dropout", counted)
    wanted = theirs.train()(tokens).logits
    assert next(places, None) is None
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


# -- skipped layers


def skipping(model: str, rate: float) -> tuple[Any, Batch]:
    config = replace(preset(model).changed({"layers": 4}), layer_drop=rate)
    network = build_model(config).train()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.randint(0, 100, (6, 5), generator=torch.Generator().manual_seed(0))
    return network, {"tokens": tokens, KEYS: row_keys(3, 40, 6)}


@pytest.mark.parametrize("model", ["gpt-tiny", "bert-tiny"])
def test_a_sample_is_what_the_model_without_the_layers_that_it_skips_computes(model: str) -> None:
    """A plain loop: for each sample alone a model of the layers that are left."""
    network, batch = skipping(model, 0.5)
    found, all_skipped = network(batch).logits, set()
    layers = dict(network.layers.items())
    keys = sample_keys(network, batch)
    for row in range(6):
        ones, zeros = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
        left = [n for n in layers if bool(skip(ones, zeros, 0.5, keyed(keys[row : row + 1], 1 + int(n))))]
        all_skipped |= layers.keys() - set(left)
        network.layers = torch.nn.ModuleDict({n: layers[n] for n in left})
        alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        with torch.no_grad():
            wanted = network.eval()(alone).logits
        torch.testing.assert_close(found[row : row + 1], wanted, rtol=0, atol=1e-5)
        network.layers = torch.nn.ModuleDict(layers)
        network.train()
    assert all_skipped == layers.keys()


def test_layers_are_skipped_at_their_rate_and_in_training_alone() -> None:
    keys = keyed(keyed(row_keys(1, 0, 40_000), 0), SKIPS)
    ones = torch.ones(40_000, 1, 1)
    for rate in (0.1, 0.5):
        share = 1 - float(skip(ones, torch.zeros_like(ones), rate, keys).mean())
        assert abs(share - rate) < 0.01
    network, batch = skipping("gpt-tiny", 0.5)
    plain, _ = skipping("gpt-tiny", 0.0)
    assert not torch.equal(network(batch).logits, plain(batch).logits)
    assert torch.equal(network.eval()(batch).logits, plain(batch).logits)


@pytest.mark.parametrize(("model", "word"), [("mixtral-tiny", "routers"), ("deepseek-v3-tiny", "routers")])
def test_layers_with_experts_are_not_skipped(model: str, word: str) -> None:
    with pytest.raises(WorkloadError, match=word):
        load(model, "causal_lm", Vocabulary(64, eos=2), sequence_length=8, layer_drop=0.1)


@pytest.mark.parametrize("model", ["gpt-tiny", "bert-tiny"])
def test_stages_of_a_pipeline_and_recomputed_layers_skip_the_same(model: str) -> None:
    whole, batch = skipping(model, 0.5)
    wanted = whole(batch).logits
    wanted.square().sum().backward()
    again, _ = skipping(model, 0.5)
    for layer in again.layers.values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    found = again(batch).logits
    found.square().sum().backward()
    assert torch.equal(found, wanted)
    for one, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)
    (first, _), (second, _) = skipping(model, 0.5), skipping(model, 0.5)
    first.keep(0, 2, first=True, last=False)
    second.keep(2, 4, first=False, last=True)
    assert torch.equal(second(batch, first(batch).hidden).logits, wanted)
