"""Presets with random changes: an export computes the same in transformers and comes back, or it is refused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from thin import every

from workloads.errors import WorkloadError
from workloads.hf.check.compare import TOLERANCE, difference, probes
from workloads.hf.check.parity_table import LENGTH, SIZE, VOCABULARY, random_state
from workloads.hf.convert.folder import describe_folder
from workloads.hf.convert.load_weights import pretrained
from workloads.hf.convert.write_folder import structure
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS, preset
from workloads.model.stored import whole
from workloads.transformer_workload import TransformerWorkload

ROUNDS = 8
MODELS = [name for name in PRESETS if name.endswith("-tiny") and name != "glm-tiny"]
DENSE = {"layers": 2, "kv_heads": 2, "head_dim": 8}
ROUTED = DENSE | {"moe": {"experts": 4, "top_k": 2, "intermediate": 24}}
FULL_SIZE: dict[str, dict[str, Any]] = {
    "qwen2-7b": DENSE, "mistral-7b": DENSE, "phi-3-mini": DENSE, "olmo-2-7b": DENSE,
    "gemma-2-2b": DENSE | {"window": 5}, "gemma-3-1b": DENSE | {"window": 5, "full_every": 2},
    "qwen1.5-moe-a2.7b": ROUTED, "qwen3-30b-a3b": ROUTED,
    "gpt-oss-20b": ROUTED | {"window": 5, "swiglu_limit": 0.5, "intermediate": 24,
                             "rope_scaling": {"factor": 4.0, "original_positions": 8}},
    "xlm-roberta-base": {"layers": 2}, "distilbert-base": {"layers": 2}, "ernie-1.0-base": {"layers": 2},
    "mpnet-base": {"layers": 2},
    "deberta-v3-base": {"layers": 2, "disentangled": 6, "relative_distance": 16},
    "xlnet-base": {"layers": 2, "kv_heads": 0, "head_dim": 0},
    "mt5-small": {"layers": 2, "kv_heads": 0},
    "mbart-large": {"layers": 2, "kv_heads": 0, "head_dim": 0},
    "pegasus-large": {"layers": 2, "kv_heads": 0, "head_dim": 0},
}  # fmt: skip
"""Presets that have no tiny one."""
SMALL = {"vocab_size": SIZE, "max_positions": LENGTH, "hidden": 32, "heads": 4, "intermediate": 48}
ROPE = [None, {"kind": "linear", "factor": 3.0},
        {"kind": "llama3", "factor": 8.0, "original_positions": 8, "high_frequency": 3.0},
        *({"kind": "yarn", "factor": 4.0, "original_positions": 8, **more}
          for more in ({}, {"attention_factor": 1.3}, {"truncate": False}, {"beta_fast": 8.0}, {"mscale": 0.7},
                       {"mscale_all": 0.6}, {"mscale": 0.7, "mscale_all": 1.2}))]  # fmt: skip
CHANGES: dict[str, tuple[Any, ...]] = {
    "tied": (True, False), "activation": ("gelu", "gelu_tanh", "relu", "silu"), "norm_eps": (1e-3, 1e-5, 1e-12),
    "layers": (1, 3), "decoder_layers": (1, 3), "heads": (2, 8), "kv_heads": (1, 2, 4), "head_dim": (4, 16),
    "intermediate": (24, 40), "max_positions": (LENGTH, 40), "norm": ("layer", "rms", "rms_offset"),
    "norm_position": ("pre", "post", "both", "branch"), "scaled_embedding": (True, False), "score_cap": (0.0, 1.5),
    "logit_cap": (0.0, 2.0), "sinks": (True, False), "swiglu_limit": (0.0, 0.3), "swiglu_alpha": (0.7, 1.0),
    "qk_norm_whole": (True, False), "full_every": (0, 2), "window_theta": (0.0, 300.0),
    "final_norm": (True, False), "embedding_norm": (True, False), "position_offset": (0, 2, 4),
    "positions": ("learned", "sinusoidal", "rotary", "relative", "relative_keys", "none"), "rope_theta": (500.0, 1e6),
    "rope_scaling": tuple(ROPE), "relative_buckets": (8, 16), "relative_distance": (10, 64), "token_types": (0, 1, 3),
    "task_types": (0, 3),
    "head_bias": (True, False),
    "relative_bias": (True, False), "disentangled": (0, 8),
    "embedding_size": (16, 24, 32), "scaled_head": (True, False), "gated": (True, False), "qk_norm": (True, False),
    "attention_bias": (True, False), "output_bias": (True, False), "feedforward_bias": (True, False),
    "attention_scale": (0.5, 1.0), "window": (5, 9), "shared_layers": (True, False), "pooler": ("tanh", "gelu"),
    "head_activation": ("", "relu", "gelu"), "counted_positions": (True, False), "generator": (0, 8, 16),
    "head": ("language", "masked", "sequence", "token", "none"), "sentence_head": (True, False),
    "moe": ({"experts": 6, "top_k": 1}, {"every": 2, "first": 1}, {"capacity": 4}, {"normalise": False},
            {"gate": "sigmoid"}, {"shared": 2},
            {"bias": True}, {"bias": False}, {"scale": 1.5}, {"first": 0}, {"capacity_factor": 1.5},
            {"bias_rate": 0.001}, {"groups": 2, "top_groups": 1, "experts": 8}, {"intermediate": 20}),
    "latent": ({"query_rank": 0}, {"value_dim": 8}, {"norm_eps": 1e-4}, {"nope_dim": 8, "rope_dim": 4}),
}  # fmt: skip


def started(model: str) -> TransformerConfig:
    """The preset over the small vocabulary, as it is trained."""
    more: dict[str, Any] = {"albert-tiny": {"embedding_size": 16}, **FULL_SIZE}.get(model, {})
    config = preset(model).changed(SMALL | more)
    if config.moe and not config.latent and model not in FULL_SIZE:
        limit = {"capacity": 6} if model == "switch-tiny" else {}
        config = config.changed({"moe": {"intermediate": 48, "capacity_factor": None, **limit}})
    return config


def a_part(shape: torch.Size, draw: random.Random) -> tuple[slice, ...]:
    """A part of a tensor of that shape, in every dimension one element at least."""
    edges = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
    return tuple(slice(*pair) for pair in edges)


def apart(config: TransformerConfig, folder: Path) -> float:
    """Largest difference between random weights here and their export; what was exported must come back."""
    workload = TransformerWorkload("random", config, None, VOCABULARY)  # type: ignore[arg-type]
    state = random_state(workload)
    workload.check_hf()
    workload.to_hf(state.__getitem__, str(folder))
    model = workload.build().eval()
    model.load_state_dict(state)
    text = torch.randint(3, SIZE, (4 * LENGTH,), generator=torch.Generator().manual_seed(1))
    again = describe_folder(str(folder))
    pooler = {"pooler": config.pooler}  # which only some heads have
    assert structure(again) | pooler == structure(config)
    weights, draw = pretrained(config, workload.shapes, str(folder)), random.Random(1)
    for name, value in state.items():
        found = weights.find(name)
        assert found is not None
        for part in (whole(value.shape), a_part(value.shape, draw)):
            assert torch.equal(found[part], value[part]), (name, part)
    return difference(config, model, str(folder), probes(config, VOCABULARY, text, (LENGTH, 7)))


@pytest.mark.parametrize("model", every(5, [*MODELS, *FULL_SIZE]))
def test_what_leaves_computes_the_same_and_comes_back(model: str, tmp_path: Path) -> None:
    draw, lines, taken = random.Random(model), [], 0
    for number in range(ROUNDS):
        chosen = draw.sample(sorted(CHANGES), number % 3)
        changes = {name: draw.choice(CHANGES[name]) for name in chosen}
        try:
            found = apart(started(model).changed(changes), tmp_path / str(number))
        except WorkloadError as error:
            lines.append(str(error))
            continue
        taken += 1
        assert found <= TOLERANCE, changes
    assert taken > 1
    assert not any("\n" in line for line in lines)
