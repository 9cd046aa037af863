"""Closed-form counts of parameters and FLOPs from a configuration. Torch-free."""

from __future__ import annotations

from workloads.model.config import TransformerConfig
from workloads.model.parts import MoE
from workloads.predicted import ALL, Predicted


def parameters(config: TransformerConfig, active: bool = False) -> int:
    """Return the number of trained parameters. A tied weight counts once; buffers do not count.

    With `active`, count only the parameters that one token uses: top_k routed experts and the shared ones.

    Args:
        config: the model.
        active: whether to count only what one token uses.
    """
    stacks = _layers(config, config.layers, False, active)
    stacks += _layers(config, config.decoder_layers, True, active) if config.decoder_layers else 0
    if config.disentangled:
        stacks += 2 * config.disentangled * config.hidden + _norm(config, config.hidden)
    sides = 2 if config.architecture == "encoder-decoder" else 1
    relative = config.heads * config.relative_buckets if config.biased_by_distance else 0
    stacks += sides * (
        _embeddings(config) + relative + (_norm(config, config.hidden) if config.final_norm else 0)
    )
    stacks += config.vocab_size * config.embedding_size + _projection(config) + _head(config)
    if config.generator:
        small = config.generator_config()
        stacks += _layers(small, small.layers, False, active) + _projection(small) + _head(small)
    return stacks


def flops(config: TransformerConfig, sequence_length: int, predicted: Predicted = ALL) -> float:
    """Return the FLOPs of a forward and backward pass per input token: 6 N + 12 layers heads head_dim length (PaLM,
    appendix B).

    N counts the weights that multiply a token. Lookup tables do not count, nor do the vectors of distances, which are
    projected once for all rows of a micro-batch. The output projection counts, tied or not, for the `predicted` tokens.
    Shared layers count each time they run. A head that reads one token of a row counts once a row. An encoder-decoder
    reads sequence_length tokens and writes predicted.target_length; its cost is per token read.

    Args:
        config: the model.
        sequence_length: tokens of a row.
        predicted: the share of the tokens that are predicted, and the length of a decoder's text.
    """
    if config.generator:
        alone = config.changed({"generator": 0})
        small = config.generator_config()
        return flops(alone, sequence_length) + flops(small, sequence_length, predicted)
    output = _vocabulary_weights(config)
    if config.architecture != "encoder-decoder":
        weights = _multiplied(config, config.layers, False) + _projection(config)
        share = predicted.share if config.architecture == "encoder" else 1.0
        head = share * (output + _token_head(config)) + _row_head(config) / sequence_length
        return 6 * (weights + head) + config.layers * _scores(config, sequence_length)
    ratio = (predicted.target_length or sequence_length) / sequence_length
    encoder_flops: float = 6 * _multiplied(config, config.layers, False) + config.layers * _scores(
        config, sequence_length
    )
    # The decoder's cross-attention projects keys and values of the encoder's tokens, not of its own.
    memory = 2 * config.decoder_layers * config.hidden * config.kv_heads * config.head_dim
    decoder_flops: float = 6 * (
        _multiplied(config, config.decoder_layers, True) - memory + predicted.share * output
    )
    decoder_flops += config.decoder_layers * _scores(config, int(ratio * sequence_length))
    decoder_flops += config.decoder_layers * _scores(config, sequence_length)
    return encoder_flops + 6 * memory + ratio * decoder_flops


def _scores(config: TransformerConfig, length: int) -> float:
    width: float = config.head_dim
    if config.latent:
        # Keys are wider than values here; 12 x width stands for both products together.
        width = (config.latent.nope_dim + config.latent.rope_dim + config.latent.value_dim) / 2
    # An encoder's token sees a window on both sides, |i - j| < window, and all global tokens, each of which sees all
    # (`sparse.near`).
    window = config.window if config.causal else 2 * config.window - 1
    seen_globally = config.global_tokens if config.causal else 2 * config.global_tokens
    drawn = config.random_blocks * config.block_size
    visible: float = min(length, window + seen_globally + drawn) if config.window else length
    if config.full_every:
        # A mean over the layers, of which every n-th sees the whole row.
        visible += (length - visible) * (config.layers // config.full_every) / config.layers
    if config.positions == "relative_keys":
        # A query also multiplies the keys of all 2 L distances: as many FLOPs as QK^T and PV of L tokens.
        visible += length
    # Disentangled attention multiplies queries and keys with the vector of each distance.
    # 2 FLOPs a multiply-add, two products (QK^T and PV), and a backward pass of twice the forward one: 2 x 2 x 3 = 12.
    # Causal rows count in full (PaLM, appendix B).
    return 12 * config.heads * width * (visible + 2 * config.disentangled)


def _norm(config: TransformerConfig, size: int) -> int:
    return 2 * size if config.norm == "layer" else size


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _embeddings(config: TransformerConfig) -> int:
    size, count = config.embedding_size, config.max_positions + config.position_offset
    tables = (config.positions == "learned") * count + config.block_positions * count
    tables += config.token_types + config.task_types + (config.positions == "relative_keys")
    return tables * size + (_norm(config, size) if config.embedding_norm else 0)


def _projection(config: TransformerConfig) -> int:
    if config.embedding_size == config.hidden:
        return 0
    return _linear(config.embedding_size, config.hidden, True)


def _vocabulary_weights(config: TransformerConfig) -> int:
    if config.head not in ("language", "masked"):
        return 0
    # A masked head maps to the size of the embedding first; a language head reads the hidden states.
    return config.vocab_size * (config.embedding_size if config.head == "masked" else config.hidden)


def _token_head(config: TransformerConfig) -> int:
    """Return the weights of a head that reads each token, without the projection to the vocabulary."""
    hidden = config.hidden
    if config.head == "masked":
        size = config.embedding_size
        return _linear(hidden, size, True) + _norm(config, size)
    if config.head == "discriminator":
        return _linear(hidden, hidden, True) + _linear(hidden, 1, True)
    return _linear(hidden, config.classes, True) if config.head in ("token", "span") else 0


def _row_head(config: TransformerConfig) -> int:
    """Return the weights of the heads that read one token of a row."""
    hidden = config.hidden
    pooler = _linear(hidden, hidden, True)
    total = pooler + _linear(hidden, 2, True) if config.sentence_head else 0
    if config.head == "sequence":
        total += hidden * config.classes if config.causal else pooler + _linear(hidden, config.classes, True)
    return total


def _has_bias(config: TransformerConfig) -> bool:
    return config.head == "masked" or (config.head == "language" and config.head_bias)


def _head(config: TransformerConfig) -> int:
    total = _token_head(config) + _row_head(config) + (config.vocab_size if _has_bias(config) else 0)
    return total if config.tied else total + _vocabulary_weights(config)


def _attention(config: TransformerConfig) -> int:
    hidden, bias = config.hidden, config.attention_bias
    gates = config.heads if config.head_gates else 0
    if config.latent:
        return _latent(config) + gates
    width = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    total = _linear(hidden, width, bias) + 2 * _linear(hidden, keys, bias)
    total += _linear(width, hidden, config.output_bias)
    total += gates + (config.heads if config.sinks else 0)
    if config.positions == "relative_keys":
        total += hidden * width + 5 * width
    normed = width + keys if config.qk_norm_whole else 2 * config.head_dim
    return total + (_norm(config, normed) if config.qk_norm else 0)


def _latent(config: TransformerConfig) -> int:
    latent = config.latent
    hidden = config.hidden
    bias = config.attention_bias
    assert latent is not None
    rank = latent.query_rank
    total = _linear(hidden, rank, bias) + _norm(config, rank) if rank else 0
    total += (rank or hidden) * config.heads * (latent.nope_dim + latent.rope_dim)
    total += _linear(hidden, latent.key_value_rank + latent.rope_dim, bias)
    total += _norm(config, latent.key_value_rank)
    total += latent.key_value_rank * config.heads * (latent.nope_dim + latent.value_dim)
    return total + _linear(config.heads * latent.value_dim, hidden, config.output_bias)


def _feedforward(config: TransformerConfig, size: int) -> int:
    bias = config.feedforward_bias
    up = _linear(config.hidden, size, bias)
    return (2 if config.gated else 1) * up + _linear(size, config.hidden, bias)


def _experts(config: TransformerConfig, moe: MoE, active: bool) -> int:
    ways = 2 if config.gated else 1
    per_expert = (ways + 1) * config.hidden * moe.intermediate
    per_expert += ways * moe.intermediate + config.hidden if moe.bias else 0
    shared = _feedforward(config, moe.shared * moe.intermediate) if moe.shared else 0
    shared += config.hidden if moe.shared_gate else 0
    return (
        (moe.top_k if active else moe.experts) * per_expert
        + shared
        + moe.experts * (config.hidden + moe.bias)
    )


def _layers(config: TransformerConfig, count: int, cross: bool, active: bool) -> int:
    total = 0
    for index in range(1 if config.shared_layers else count):
        moe = config.moe if config.moe and config.moe.at(index) else None
        total += _experts(config, moe, active) if moe else _feedforward(config, config.intermediate)
        total += (2 if cross else 1) * _attention(config)
        total += ((4 if config.norm_position == "both" else 2) + cross) * _norm(config, config.hidden)
    return total


def _multiplied(config: TransformerConfig, count: int, cross: bool) -> int:
    """Return how many weights multiply one token in `count` layers."""
    weights = _layers(config, count, cross, True) * (count if config.shared_layers else 1)
    if config.positions == "relative_keys":
        weights -= count * config.hidden * config.heads * config.head_dim  # of distances, see `flops`
    return weights
