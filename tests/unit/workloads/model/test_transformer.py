"""The transformer itself: who sees whom, stages, and what may be cut."""

from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.hf.check.parity_table import VOCABULARY, Case, random_state
from workloads.model.config import TransformerConfig
from workloads.model.losses import loss
from workloads.model.presets import PRESETS, preset
from workloads.model.transformer import Transformer
from workloads.transformer_workload import TransformerWorkload, build_model

TINY = [name for name in PRESETS if name.endswith("tiny")]
LENGTH = 24


def workload_of(config: TransformerConfig) -> TransformerWorkload:
    return TransformerWorkload("model", config, None, VOCABULARY)


def model_of(model: str, **changes: object) -> nn.Module:
    workload = workload_of(Case(model, model, dict(changes)).config)
    built = workload.build().eval()
    built.load_state_dict(random_state(workload))
    return built


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def seen(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """bool [L, L]: whether the logits at a position depend on the token at another."""
    reached = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        before = model(batch).logits[0]
        for key in range(LENGTH):
            other = batch["tokens"].clone()
            other[0, key] = (other[0, key] - 2) % 94 + 3
            after = model({**batch, "tokens": other}).logits[0]
            reached[:, key] = (after - before).abs().amax(-1) > 0
    return reached


def lower() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def test_a_decoder_sees_what_is_before_it() -> None:
    for name in ("gpt-tiny", "llama-tiny", "deepseek-v3-tiny"):
        assert torch.equal(seen(model_of(name, layers=1), {"tokens": tokens()}), lower())


def test_an_encoder_sees_all_but_padding() -> None:
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, 20:] = False
    near = {"disentangled": 6, "relative_distance": 16}
    for name, more in (("bert-tiny", {}), ("mpnet-base", {}), ("deberta-v3-base", near)):
        model = model_of(name, layers=1, **more)
        reached = seen(model, {"tokens": tokens(), "padding": padding})
        assert reached[:20, :20].all()
        assert not reached[:20, 20:].any()


def test_distances_tell_texts_apart_that_are_alike_but_for_their_order() -> None:
    model = model_of("mpnet-base", layers=1)
    with torch.no_grad():
        model.embeddings.positions.weight.zero_()
        found = model({"tokens": tokens()}).logits
        turned = model({"tokens": tokens().flip(1)}).logits.flip(1)
        assert not torch.allclose(found, turned)
        model.relative_bias.weight.zero_()
        found, turned = model({"tokens": tokens()}).logits, model({"tokens": tokens().flip(1)}).logits.flip(1)
        assert torch.allclose(found, turned, atol=1e-5)


@pytest.mark.parametrize("name", ["mpnet-base", "deberta-v3-base"])
def test_distances_are_those_of_the_positions_that_a_batch_gives(name: str) -> None:
    """Permuted rows, whose tokens say where they stand, come out as rows in order do."""
    near = {"disentangled": 6, "relative_distance": 16} if "deberta" in name else {}
    model, text = model_of(name, layers=2, **near), tokens()
    order = torch.stack([torch.randperm(LENGTH, generator=torch.Generator().manual_seed(i)) for i in (3, 4)])
    with torch.no_grad():
        plain = model({"tokens": text}).logits
        permuted = model({"tokens": text.gather(1, order), "positions": order}).logits
    wanted = plain.gather(1, order.unsqueeze(-1).expand_as(plain))
    torch.testing.assert_close(permuted, wanted, atol=1e-5, rtol=1e-5)


def test_disentangled_attention_knows_the_order_without_positions() -> None:
    model = model_of("deberta-v3-base", layers=1, disentangled=6, relative_distance=16)
    with torch.no_grad():
        found, turned = model({"tokens": tokens()}).logits, model({"tokens": tokens().flip(1)}).logits.flip(1)
        assert not torch.allclose(found, turned)
        for weight in (model.distances.norm.weight, model.distances.norm.bias):
            weight.zero_()
        for projection in (model.layers["0"].attention.query, model.layers["0"].attention.key):
            projection.bias.zero_()
        found, turned = model({"tokens": tokens()}).logits, model({"tokens": tokens().flip(1)}).logits.flip(1)
        assert torch.allclose(found, turned, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt-tiny", {"disentangled": 8}),
        ("bert-tiny", {"disentangled": 8, "positions": "rotary"}),
        ("bert-tiny", {"disentangled": 8, "relative_bias": True}),
        ("bert-tiny", {"disentangled": 200}),
        ("t5-tiny", {"relative_bias": True}),
        ("electra-tiny", {"relative_bias": True}),
        ("electra-tiny", {"task_types": 2}),
        ("t5-tiny", {"task_types": 2}),
        ("gpt-oss-20b", {"relative_bias": True}),
    ],
)
def test_distances_that_would_not_be_computed_are_refused(model: str, changes: dict[str, object]) -> None:
    with pytest.raises(WorkloadError):
        preset(model).changed(changes)


def test_a_type_of_task_moves_every_token() -> None:
    model, batch = model_of("ernie-1.0-base", layers=1, task_types=3), {"tokens": tokens()}
    kinds = torch.zeros(2, LENGTH, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(model(batch).logits, model({**batch, "task_types": kinds}).logits)
        kinds[0, 5] = 2
        moved = (model({**batch, "task_types": kinds}).logits - model(batch).logits).abs().amax(-1)
    assert moved[0].all()
    assert not moved[1].any()


def test_a_prefix_model_sees_what_the_batch_allows() -> None:
    order = torch.arange(LENGTH)
    allowed = (order < 6)[None] | (order[None] <= order[:, None])
    batch = {"tokens": tokens(), "attention": allowed.expand(2, -1, -1)}
    for name in ("unilm-tiny", "glm-tiny"):
        assert torch.equal(seen(model_of(name, layers=1), batch), allowed)


def test_a_row_that_may_see_nothing_is_no_nan() -> None:
    batch = {"tokens": tokens(), "attention": torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)}
    assert model_of("unilm-tiny")(batch).logits.isfinite().all()


def test_packed_documents_do_not_see_each_other() -> None:
    segments = (torch.arange(LENGTH) >= 10).long().expand(2, -1)
    reached = seen(model_of("gpt-tiny", layers=1), {"tokens": tokens(), "segments": segments})
    assert torch.equal(reached, lower() & (segments[0][:, None] == segments[0][None]))


def test_a_window_with_global_tokens() -> None:
    order = torch.arange(LENGTH)
    near = (order[:, None] - order[None]).abs() < 4
    everywhere = (order < 2)[:, None] | (order < 2)[None]
    causal = seen(model_of("llama-tiny", layers=1, window=4, global_tokens=2), {"tokens": tokens()})
    assert torch.equal(causal, (near | everywhere) & lower())
    both = seen(model_of("bert-tiny", layers=1, window=4, global_tokens=2), {"tokens": tokens()})
    assert torch.equal(both, near | everywhere)


def test_windows_in_some_layers_and_a_sink_that_all_see() -> None:
    sizes = {"kv_heads": 2, "head_dim": 8, "intermediate": 32, "window": 4, "rope_scaling": None,
             "moe": {"experts": 4, "top_k": 2, "intermediate": 32}}  # fmt: skip
    batch = {"tokens": tokens(), "segments": (torch.arange(LENGTH) >= 9).long().expand(2, -1)}
    near, steps = model_of("gpt-oss-20b", layers=1, **sizes), torch.arange(LENGTH)
    windowed = lower() & (steps[:, None] - steps < 4)
    assert torch.equal(seen(near, {"tokens": tokens()}), windowed)
    apart = batch["segments"][0][:, None] == batch["segments"][0]
    assert torch.equal(seen(near, batch), windowed & apart)
    far = model_of("gpt-oss-20b", layers=2, **sizes)
    assert torch.equal(seen(far, {"tokens": tokens()}), lower())
    assert torch.equal(seen(far, batch), lower() & apart)


def test_a_pair_reads_its_source_and_writes_left_to_right() -> None:
    pegasus = {"kv_heads": 4, "head_dim": 8}
    for name, more in (("t5-tiny", {}), ("bart-tiny", {}), ("switch-tiny", {}), ("pegasus-large", pegasus)):
        model = model_of(name, layers=1, decoder_layers=1, **more)
        batch = {"tokens": tokens(), "decoder_tokens": tokens(length=8)}
        with torch.no_grad():
            before = model(batch).logits
            source = {**batch, "tokens": batch["tokens"].roll(1, 1)}
            assert ((model(source).logits - before).abs().amax(-1) > 0).all()
            later = batch["decoder_tokens"].clone()
            later[:, 5] = 3 + (later[:, 5] - 2) % 94
            changed = (model({**batch, "decoder_tokens": later}).logits - before).abs().amax(-1)
        assert not changed[:, :5].any()
        assert changed[:, 5:].all()


def test_positions_of_the_batch_are_used() -> None:
    for name in ("gpt-tiny", "llama-tiny", "glm-tiny"):
        model, batch = model_of(name), {"tokens": tokens()}
        given = {**batch, "positions": torch.arange(LENGTH).expand(2, -1)}
        moved = {**batch, "positions": torch.arange(LENGTH).flip(0).expand(2, -1)}
        assert torch.equal(model(batch).logits, model(given).logits)
        assert not torch.allclose(model(batch).logits, model(moved).logits)


def test_rotary_attention_depends_on_distance_alone() -> None:
    model, batch = model_of("llama-tiny"), {"tokens": tokens()}
    shifted = {**batch, "positions": torch.arange(LENGTH).expand(2, -1) + 11}
    assert torch.allclose(model(batch).logits, model(shifted).logits, atol=1e-5)


def test_glm_counts_within_the_span_too() -> None:
    model = model_of("glm-tiny")
    steps = torch.arange(LENGTH).expand(2, -1)
    flat = {"tokens": tokens(), "positions": torch.stack((steps, torch.zeros_like(steps)), 1)}
    inner = {"tokens": tokens(), "positions": torch.stack((steps, steps % 3), 1)}
    assert torch.equal(model(flat).logits, model({"tokens": tokens()}).logits)
    assert not torch.allclose(model(flat).logits, model(inner).logits)


@pytest.mark.parametrize(
    "cuts", [((0, 1), (1, 3)), ((0, 0), (0, 2), (2, 3), (3, 3))], ids=["even", "ends-without-layers"]
)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "mixtral-tiny", "glm-tiny"])
def test_stages_make_the_whole(name: str, cuts: tuple[tuple[int, int], ...]) -> None:
    config = Case(name, name, {"layers": 3}).config
    workload = workload_of(config)
    state = random_state(workload)
    whole = workload.build().eval()
    whole.load_state_dict(state)
    assert workload.stages() == ("layers.1", "layers.2")
    batch, hidden, extra, names = {"tokens": tokens()}, None, None, []
    for number, (start, stop) in enumerate(cuts):
        with torch.device("meta"):
            stage = workload.build()
        stage.keep(start, stop, first=number == 0, last=number == len(cuts) - 1)
        stage.to_empty(device="cpu").load_state_dict({n: state[n] for n in stage.state_dict()})
        names += [n for n, _ in stage.named_parameters()]
        output = stage(batch, hidden, extra)
        hidden, extra = output.hidden, output.extra
    assert torch.equal(output.logits, whole(batch).logits)
    assert (output.extra is None) == (config.moe is None)
    assert output.extra is None or torch.equal(output.extra, whole(batch).extra)
    # Nothing is twice but a tied table, and nothing is lost.
    assert sorted(names) == sorted([*dict(whole.named_parameters()), *["tokens.weight"] * config.tied])


@pytest.mark.parametrize("name", TINY)
def test_every_pattern_of_the_sharding_cuts_something(name: str) -> None:
    config = preset(name)
    workload = workload_of(config)
    with torch.device("meta"):
        modules = dict(workload.build().named_modules())
    for pattern, style in workload.sharding().items():
        found = [m for n, m in modules.items() if fnmatch(n, pattern)]
        assert found, pattern
        for module in found:
            _check_style(module, style, config)


def _check_style(module: nn.Module, style: str, config: TransformerConfig) -> None:
    shapes = {n: p.shape for n, p in module.named_parameters()}
    if style == "expert":
        assert all(s[0] == config.moe.experts for s in shapes.values())
        assert len(shapes) == (2 + config.gated) * (1 + config.moe.bias)
    elif style == "vocab":
        assert all(s[0] == config.vocab_size for s in shapes.values())
    elif style in ("sequence", "heads"):
        assert all(len(s) == 1 for s in shapes.values())
    else:
        assert style in ("column", "row")
        assert len(shapes["weight"]) == 2


def test_column_and_row_cuts_leave_the_sum_of_the_parts() -> None:
    """Two ranks' halves, as tensor parallelism runs them, add up to the whole attention and feed-forward."""
    workload = workload_of(Case("llama", "llama-tiny", {"layers": 1}).config)
    state = random_state(workload)
    whole = workload.build().eval()
    whole.load_state_dict(state)
    hidden = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(2))
    context = whole._context({"tokens": tokens()}, torch.arange(LENGTH)[None], None, 0)
    layer = whole.layers["0"]
    parts = [_half(workload, state, rank).layers["0"] for rank in (0, 1)]
    attended = sum(part.attention(hidden, context) for part in parts)
    assert torch.allclose(attended, layer.attention(hidden, context), atol=1e-5)
    fed = sum(part.feedforward(hidden) for part in parts)
    assert torch.allclose(fed, layer.feedforward(hidden), atol=1e-5)


def _half(workload: TransformerWorkload, state: dict[str, Tensor], rank: int) -> nn.Module:
    model = workload.build().eval()
    model.load_state_dict(state)
    for name, module in model.named_modules():
        for pattern, style in workload.sharding().items():
            if fnmatch(name, pattern) and style in ("column", "row"):
                module.weight = nn.Parameter(module.weight.chunk(2, dim=int(style == "row"))[rank])
    return model


@pytest.mark.parametrize("name", TINY)
def test_the_meta_device_loses_nothing(name: str) -> None:
    """All that a forward pass needs is in the state, so a model made without memory can be filled."""
    workload = workload_of(preset(name))
    with torch.device("meta"):
        model = workload.build()
    names = [n for n, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert sorted(names) == sorted(workload.shapes) == sorted(model.state_dict())


def test_a_tied_weight_stands_once_and_gets_both_gradients() -> None:
    model = model_of("gpt-tiny", layers=1)
    assert "head.weight" not in dict(model.named_parameters())
    batch = {"tokens": torch.full((1, 4), 7), "labels": torch.full((1, 4), 9)}
    result = loss(model.config, model(batch), batch)
    result.total.backward()
    assert model.tokens.weight.grad[7].abs().sum() > 0
    assert model.tokens.weight.grad[9].abs().sum() > 0
    assert model.tokens.weight.grad[50].abs().sum() > 0  # through the softmax of the output


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_learns(name: str) -> None:
    config = preset(name).changed({"max_positions": LENGTH})
    workload = workload_of(config)
    model = workload.build()
    model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
    batch = {"tokens": tokens(), "labels": tokens(), "targets": tokens(), "decoder_tokens": tokens()}
    batch |= {"sequence_labels": torch.tensor([0, 1]), "sample_seed": torch.tensor([5, 6])}
    result = workload.loss(model, batch)
    (result.total / result.count + (0 if result.extra is None else result.extra)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_bf16_under_autocast_stays_near() -> None:
    for name in ("llama-tiny", "mixtral-tiny", "deepseek-v3-tiny"):
        model, batch = model_of(name), {"tokens": tokens()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = model(batch).logits
        assert (
            torch.nn.functional.cosine_similarity(low.float().flatten(), model(batch).logits.flatten(), 0)
            > 0.99
        )


def test_layers_shared_by_albert_are_one() -> None:
    model = model_of("albert-tiny", layers=5)
    assert list(model.layers) == ["0"]
    assert workload_of(model.config).stages() == ()
    once, often = model_of("albert-tiny", layers=1), model
    assert not torch.allclose(once({"tokens": tokens()}).logits, often({"tokens": tokens()}).logits)


def test_a_larger_model_is_the_same_code() -> None:
    config = replace(preset("gpt2"), layers=2)
    with torch.device("meta"):
        assert isinstance(build_model(config), Transformer)


def test_an_unknown_tensor_has_no_initial_value() -> None:
    with pytest.raises(WorkloadError, match=r"has no tensor 'head\.weight'"):
        workload_of(preset("gpt-tiny")).initial("head.weight", 0)
