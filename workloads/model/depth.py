"""The distance of a parameter from the output, in layers. Torch-free."""

from __future__ import annotations

from workloads.model.config import TransformerConfig

OUTPUT = ("norm", "head", "sentence_head")
"""The modules after the last layer, within a stack or next to it."""


def layer_count(config: TransformerConfig) -> int:
    """Return the number of layers that `depth` counts."""
    if config.shared_layers:
        return 1
    pair = config.architecture == "encoder-decoder"
    return config.layers + (config.decoder_layers if pair else 0)


def depth(config: TransformerConfig, name: str) -> int:
    """Return 0 for heads and the last norm, 1 for the last layer, and the number of layers plus one for embeddings.

    A decoder's layers come after those of its encoder. Layers that share their weights count as one.

    Args:
        config: the model.
        name: name of the parameter.
    """
    pair = config.architecture == "encoder-decoder"
    count = layer_count(config)
    parts = name.split(".")
    if "layers" in parts:
        number = int(parts[parts.index("layers") + 1])
        return count - number - (config.layers if pair and parts[0] == "decoder" else 0)
    if pair and parts[:2] == ["encoder", "norm"]:
        return count - config.layers + 1
    within = parts[1:] if parts[0] in ("decoder", "generator", "discriminator") else parts
    return 0 if within[0] in OUTPUT else count + 1
