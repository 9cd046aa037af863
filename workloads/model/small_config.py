"""A small model with every component of a large one."""

from __future__ import annotations

from typing import Any

from workloads.model.config import TransformerConfig

HEAD, COLUMNS = 16, 128
"""Size of a small attention head, and number of columns of a small feed-forward block."""


def narrow(config: TransformerConfig, tp: int = 1, stages: int = 1, ep: int = 1) -> dict[str, Any]:
    """Return changes that make a model of this project small, and that ranks divide in the same way as the large model.

    Args:
        config: the large model.
        tp: ranks that divide its tensors.
        stages: stages of its pipeline.
        ep: ranks that divide its experts.
    """
    grouped = config.kv_heads < config.heads
    keys = tp * (2 if config.kv_heads // tp > 1 else 1)
    heads = max(2 * keys, 4) if grouped else max(keys, 4 // tp * tp)
    if not grouped:
        keys = heads
    fills_hidden = config.heads * config.head_dim == config.hidden
    moe = config.moe
    layers = max(stages, 2, (moe.first + moe.every) if moe else 0)
    layers = min(layers + layers % (moe.every if moe else 1), max(config.layers, layers))
    changes: dict[str, Any] = {
        "layers": layers,
        "hidden": heads * HEAD if fills_hidden else 4 * HEAD * tp,
        "heads": heads,
        "kv_heads": keys,
        "head_dim": HEAD,
        "intermediate": COLUMNS * tp,
    }
    if config.decoder_layers:
        changes["decoder_layers"] = layers
    if config.embedding_size != config.hidden:
        changes["embedding_size"] = min(config.embedding_size, 2 * HEAD)
    if config.generator:
        changes["generator"] = changes["hidden"] // 2
    if moe:
        most = -(-max(2 * moe.top_k, 2 * ep) // ep) * ep * moe.groups
        changes["moe"] = {
            "experts": moe.experts if moe.experts <= most else most,
            "intermediate": COLUMNS * tp // (1 if moe.intermediate == config.intermediate else 2),
        }
    if config.latent:
        changes["latent"] = {
            "query_rank": min(config.latent.query_rank, 2 * HEAD),
            "key_value_rank": 2 * HEAD,
            "nope_dim": HEAD,
            "rope_dim": HEAD,
            "value_dim": HEAD,
        }
        changes["head_dim"] = 2 * HEAD
    return changes
