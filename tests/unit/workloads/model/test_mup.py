"""Maximal update parametrisation: activations that do not grow with the width, and the plain model at the base's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from texts import Corpus

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import Rate, groups_of
from workloads.errors import WorkloadError
from workloads.hf.check.parity_table import SWITCH, TOLERANCE, Case, compare
from workloads.load import load
from workloads.model.mup import folded, logit_scale, score_scale, with_base
from workloads.model.presets import PRESETS, preset
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

SIZE, LENGTH = 160, 32
VOCABULARY = Vocabulary(SIZE, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, SIZE)),
                        word_start=np.ones(SIZE, bool), sentence_end=np.arange(SIZE) % 7 == 0)  # fmt: skip
WIDTHS, STEPS, LR = (32, 64, 128, 256), 4, 4e-3
FLAT, GROWS = 0.15, 0.4
"""Slopes of log(mean |x|) over log(width)."""


def widths(model: str, hidden: int) -> dict[str, Any]:
    """Every size in proportion; heads of width 8."""
    found: dict[str, Any] = {"hidden": hidden, "heads": hidden // 8, "intermediate": 2 * hidden}
    if model == "mixtral-tiny":
        found |= {"kv_heads": hidden // 16, "moe": {"intermediate": hidden}}
    return found


def workload_of(
    model: str, hidden: int, mup: Mapping[str, Any] | None, objective: str = "causal_lm"
) -> TransformerWorkload:
    changes = {"layers": 2, "max_positions": 64, **widths(model, hidden)}
    found = load(model, objective, VOCABULARY, changes=changes, mup=mup, sequence_length=LENGTH)
    assert isinstance(found, TransformerWorkload)
    return found


def built(workload: TransformerWorkload) -> torch.nn.Module:
    model = workload.build()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(workload.initial(name, 0))
    return model


def trained(workload: TransformerWorkload, lr: float) -> dict[str, float]:
    """mean |x| of every layer's output and of the logits, after some steps of AdamW on one batch."""
    model = built(workload)
    spec = OptimizerSpec(lr=lr, weight_decay=0.0)
    named = ((p, p.dim() > 1, Rate(workload.lr_scale(n))) for n, p in model.named_parameters())
    optimizer = torch.optim.AdamW(groups_of(spec, named), betas=spec.betas)
    window = workload.objective.window(LENGTH)
    batch = workload.objective.collate(
        Corpus(lambda sample: np.random.default_rng(sample).integers(6, 50, window)), range(8), 0
    )
    seen: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(_: object, __: object, out: Any) -> None:
            seen[name] = float((out[0] if isinstance(out, tuple) else out).detach().abs().mean())

        return hook

    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("layers"):
            module.register_forward_hook(watch(name))
    for _ in range(STEPS):
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        (loss.total / loss.count + (0.0 if loss.extra is None else loss.extra)).backward()
        optimizer.step()
    seen["logits"] = float(model(batch).logits.detach().abs().mean())
    return seen


def slopes(model: str, objective: str, scaled: bool) -> dict[str, float]:
    """By what is watched, the slope of its logarithm over that of the width."""
    base = widths(model, WIDTHS[0]) if scaled else None
    found = [trained(workload_of(model, width, base, objective), LR) for width in WIDTHS]
    width = np.log(WIDTHS)
    return {name: float(np.polyfit(width, np.log([one[name] for one in found]), 1)[0]) for name in found[0]}


@pytest.mark.parametrize(
    ("model", "objective", "watched"),
    [
        ("gpt-tiny", "causal_lm", "layers.1"),
        ("mixtral-tiny", "causal_lm", "layers.1"),
        # Its layers end in norms, so that growth shows in the logits alone.
        ("bert-tiny", "masked_lm", "logits"),
    ],
)
def test_coordinates_stay_as_large_as_the_base_s(model: str, objective: str, watched: str) -> None:
    """The coordinate check (Tensor Programs V, appendix D.1), beside the same learning rate without."""
    scaled, plain = (slopes(model, objective, scaled) for scaled in (True, False))
    assert max(abs(slope) for slope in scaled.values()) < FLAT, scaled
    assert plain[watched] > GROWS, plain
    assert plain["logits"] > GROWS, plain


def test_the_layers_of_a_pair_stay_as_large_too() -> None:
    """T5's logits shrink at first, as theirs begin with: its embeddings are so large that steps hardly show."""
    scaled, plain = (slopes("t5-tiny", "span_corruption", scaled) for scaled in (True, False))
    layers = [name for name in scaled if name != "logits"]
    assert max(abs(scaled[name]) for name in layers) < FLAT, scaled
    assert plain["encoder.layers.1"] > GROWS, plain


@pytest.mark.parametrize("name", sorted(n for n in PRESETS if n.endswith("-tiny")))
def test_a_model_as_wide_as_its_base_is_the_plain_model(name: str) -> None:
    config = preset(name)
    same = with_base(config, {"hidden": config.hidden, "heads": config.heads})
    plain, scaled = (TransformerWorkload(name, c, None, VOCABULARY) for c in (config, same))  # type: ignore[arg-type]
    assert plain.shapes == scaled.shapes
    for tensor in plain.shapes:
        assert torch.equal(plain.initial(tensor, 1), scaled.initial(tensor, 1))
        assert scaled.lr_scale(tensor) == plain.lr_scale(tensor) == 1.0
        assert folded(same, tensor) == 1.0
    assert (score_scale(same), logit_scale(same)) == (score_scale(config), logit_scale(config))


@pytest.mark.parametrize(
    ("tensor", "spread", "lr"),
    [
        ("tokens.weight", 1, 1),
        ("layers.0.attention_norm.weight", None, 1),
        ("layers.0.attention.query.weight", 1 / 2, 1 / 4),
        ("layers.0.attention.output.weight", 1 / 2, 1 / 4),
        ("layers.0.feedforward.experts.up", 1 / 2, 1 / 4),
        ("layers.0.feedforward.experts.down", 1 / 2, 1 / 4),
        ("layers.0.feedforward.router.weight", 1 / 4, 1 / 4),
        ("head.weight", 1 / 4, 1 / 4),
    ],
)
def test_four_times_the_width(tensor: str, spread: float | None, lr: float) -> None:
    """The table of the module, which is the paper's."""
    base = workload_of("mixtral-tiny", 64, None)
    wide = workload_of("mixtral-tiny", 256, widths("mixtral-tiny", 64))
    assert wide.lr_scale(tensor) == lr
    if spread is not None:
        ratio = float(wide.initial(tensor, 0).std() / base.initial(tensor, 0).std())
        assert ratio == pytest.approx(spread, rel=0.05)


def test_biases_of_experts_learn_as_vectors_do() -> None:
    moe = {"moe": {"bias": True}}
    config = preset("mixtral-tiny").changed(moe)
    wide = TransformerWorkload("wide", with_base(config, {"hidden": 16, "heads": 4}), None, VOCABULARY)  # type: ignore[arg-type]
    rates = {name.rpartition(".")[2]: wide.lr_scale(name) for name in wide.shapes if ".feedforward." in name}
    assert rates == {
        "weight": 0.25, "logit_bias": 1.0, "gate": 0.25, "up": 0.25, "down": 1.0, "gate_bias": 1.0, "up_bias": 1.0,
        "down_bias": 1.0,
    }  # fmt: skip


def test_scores_follow_the_width_of_a_head_not_their_number() -> None:
    base = preset("gpt-tiny").changed({"hidden": 64, "heads": 4})
    more, wider = base.changed({"hidden": 256, "heads": 16}), base.changed({"hidden": 256, "heads": 4})
    narrow = {"hidden": 64, "heads": 4}
    assert score_scale(with_base(more, narrow)) == score_scale(base) == 1 / 4
    assert score_scale(with_base(wider, narrow)) == 1 / 4 / 4


def test_logits_of_a_tied_head_alone_are_divided() -> None:
    tied, apart = preset("gpt-tiny"), preset("llama-tiny")
    assert logit_scale(with_base(tied, {"hidden": tied.hidden // 4})) == 1 / 4
    assert logit_scale(with_base(apart, {"hidden": apart.hidden // 4})) == 1
    t5 = preset("t5-tiny").changed({"hidden": 64})
    assert logit_scale(with_base(t5, {"hidden": 16})) == pytest.approx(16**-0.5 / 4)


@dataclass(frozen=True)
class Wide(Case):
    """A case beside a narrower base."""

    base: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return with_base(super().config, self.base)


HALF = {"hidden": 16}
LATENT = {"hidden": 16, "head_dim": 16, "latent": {"nope_dim": 8}}
EXPORTS = [
    Wide("GPT-2", "gpt-tiny", {"layers": 2}, base=HALF),
    Wide("Llama 3", "llama-tiny", base=HALF),
    Wide("Qwen 3", "qwen3-tiny", {"head_dim": 16}, base={"hidden": 16, "head_dim": 4}),
    Wide("Mixtral", "mixtral-tiny", {"intermediate": 64}, base=HALF),
    Wide("DeepSeek-V3", "deepseek-v3-tiny", base=LATENT),
    Wide("full-rank queries", "deepseek-v3-tiny", {"latent": {"query_rank": 0}}, base=LATENT),
    Wide("BERT", "bert-tiny", {}, ("padding", "token_types", "sentence"), base=HALF),
    Wide("ALBERT", "albert-tiny", {"embedding_size": 16}, ("padding", "sentence"),
         base={"hidden": 16, "embedding_size": 8}),
    Wide("ELECTRA, generator", "electra-tiny", {"generator": 0, "head": "masked", "embedding_size": 16},
         base={"hidden": 16, "embedding_size": 8}),
    Wide("T5", "t5-tiny", {}, ("padding",), base=HALF),
    Wide("T5 1.1", "t5-v1.1-tiny", {}, ("padding",), base=HALF),
    Wide("BART", "bart-tiny", {}, ("padding",), base=HALF),
    Wide("Switch", "switch-tiny", SWITCH, ("padding",), base=HALF),
    Wide("XLNet", "xlnet-base", {"layers": 2, "kv_heads": 0, "head_dim": 0}, ("padding",),
         base={"hidden": 16, "heads": 4, "head_dim": 4}),
    Wide("classes", "gpt-tiny", {"head": "sequence", "classes": 3}, ("padding",), base=HALF),
]  # fmt: skip


@pytest.mark.parametrize("case", EXPORTS, ids=lambda case: case.title)
def test_transformers_computes_the_same_from_an_export(case: Wide) -> None:
    """Its configurations know no such scales: they are in the weights."""
    plain = replace(case.config, base=None)
    shapes = TransformerWorkload(case.model, plain, None, VOCABULARY).shapes  # type: ignore[arg-type]
    scaled = {name.rpartition(".")[0] for name in shapes if folded(case.config, name) != 1.0}
    assert any("query" in name for name in scaled)
    assert any("norm" in name.replace("query_norm", "") for name in scaled) == (
        logit_scale(case.config) != logit_scale(plain) and case.config.head != "sequence"
    )
    found = compare(case)
    assert found.logits < TOLERANCE
    assert found.loss < TOLERANCE


def test_a_scale_that_no_norm_can_take_is_not_exported() -> None:
    config = with_base(preset("gpt-tiny").changed({"final_norm": False}), {"hidden": 64})
    with pytest.raises(WorkloadError, match=r"set tied: false or checkpoint\.export to null"):
        folded(config, "layers.0.feedforward_norm.weight")


@pytest.mark.parametrize(
    ("model", "mup", "words"),
    [
        ("gpt-tiny", {"layers": 1}, "mup.layers is not a width; it takes the base model's hidden, heads"),
        ("gpt-tiny", {"width": 1}, "mup.width is not a width"),
        ("gpt-tiny", {"hidden": 33}, "hidden 33 is not a multiple of heads"),
        ("mixtral-tiny", {"hidden": 32, "moe": {"experts": 2}}, "mup.moe.experts is not a width"),
        ("mixtral-tiny", {"moe": 3}, "mup.moe is not a width"),
        ("albert-tiny", {"hidden": 32}, "has projection.bias; give it widths at which both have the same"),
        (
            "hf:somewhere",
            {"hidden": 32},
            "mup scales weights that start from random values, and hf:somewhere has weights",
        ),
    ],
)
def test_what_is_no_base(model: str, mup: dict[str, Any], words: str) -> None:
    objective = "masked_lm" if model.startswith("albert") else "causal_lm"
    with pytest.raises(WorkloadError, match=words.replace(".", r"\.")):
        load(model, objective, VOCABULARY, mup=mup, sequence_length=LENGTH)


def test_what_is_learned_is_what_the_table_says() -> None:
    """One step of Adam moves a weight by its learning rate."""
    workload = workload_of("gpt-tiny", 64, widths("gpt-tiny", 32))
    model, before = built(workload), built(workload)
    named = ((p, p.dim() > 1, Rate(workload.lr_scale(n))) for n, p in model.named_parameters())
    optimizer = torch.optim.AdamW(groups_of(OptimizerSpec(lr=0.01, weight_decay=0.0), named), eps=1e-12)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
        moved = float((parameter - old).detach().abs().mean())
        assert math.isclose(moved, 0.01 * workload.lr_scale(name), rel_tol=1e-3), name
