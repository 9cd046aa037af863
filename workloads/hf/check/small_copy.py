"""Small copies of a transformers configuration: few heads, small widths, short windows and few tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workloads.hf.files.hf_config import nested_configs
from workloads.workload import Frame, Vocabulary

WIDTH = 64
"""Reduced width, if nothing else depends on it."""
WINDOW = 5
"""Keys that a sliding window sees, or that a chunk holds."""
TOKENS = 256
"""Ids below this stay in the small vocabulary."""

INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "hidden_dim", "d_ff", "n_inner", "dff", "mlp_hidden_size",
         "intermediate_size_mlp", "feed_forward_size", "expert_ffn_hidden_size", "ffn_intermediate_size",
         "dense_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
         "expert_intermediate_size", "block_ff_dim")  # fmt: skip
"""Names of the inner width of a feed-forward block."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
STATES = (("mamba_n_heads", "mamba_d_head", "mamba_expand"), ("mamba_num_heads", "mamba_head_dim", "expand"),
          ("num_heads", "head_dim", "expand"))  # fmt: skip
"""Names of a state space's number of heads, their size, and the ratio of its width to the model's."""
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size", "mamba_chunk_size")


def narrowings(hf_config: Any) -> Iterator[Any]:
    """Yield copies of a configuration with few heads, columns and experts, and short windows, the smallest first.

    Depth, the order of layer kinds, all switches and the head size stay, so token visibility is the same at little
    cost. Not every class accepts the smallest widths; the last copy is the configuration itself. Nested
    configurations (text, vision) are reduced as well.
    """
    for free, fewest in ((True, 2), (False, 2), (False, 4)):
        small = copy.deepcopy(hf_config)
        for part in nested_configs(small):
            _narrow(part, free, fewest)
        yield small
    yield copy.deepcopy(hf_config)


def fewer_tokens(hf_config: Any, vocabulary: Vocabulary) -> Vocabulary:
    """Return a vocabulary of the first TOKENS ids and the special ones, renumbered; update the configuration
    accordingly.
    """
    large = {
        token
        for part in nested_configs(hf_config)
        for _, ids in _ids(part)
        for token in ids
        if token >= TOKENS
    }
    framing = (
        {token for part in vocabulary.frame[:2] for side in part for token in side}
        if vocabulary.frame
        else set()
    )
    framing |= {token for side in vocabulary.target or () for token in side}
    start = vocabulary.decoder_start
    if start is not None:
        framing.add(start)
    large |= {token for token in vocabulary.special | framing | {*vocabulary.before} if token >= TOKENS}
    new = {token: TOKENS + index for index, token in enumerate(sorted(large))}
    size = TOKENS + len(new)
    for part in nested_configs(hf_config):
        for name, ids in _ids(part):
            now = [new.get(token, token) for token in ids]
            setattr(part, name, now if isinstance(getattr(part, name), list) else now[0])
        for name in [
            name for name in vars(part) if "vocab_size" in name
        ]:  # per-layer embeddings have their own
            if (_number(part, name) or 0) > size:
                setattr(part, name, size)
    known = {name: getattr(vocabulary, name) for name in ("eos", "pad", "bos", "cls", "sep", "mask")}
    small = replace(
        vocabulary,
        size=min(size, vocabulary.size),
        sentinels=tuple(new.get(token, token) for token in vocabulary.sentinels),
        frame=_renumbered(vocabulary.frame, new),
        target=_sides(vocabulary.target, new) if vocabulary.target else None,
        decoder_start=None if start is None else new.get(start, start),
        before=tuple(new.get(token, token) for token in vocabulary.before),
        reserved=frozenset(),  # most of them are gone, and what is drawn need not be text
        **{name: new.get(token, token) for name, token in known.items() if token is not None},
    )
    anywhere = np.ones(small.size, bool)
    words = vocabulary.word_start is not None
    sentences = vocabulary.sentence_end is not None
    return replace(
        small, word_start=anywhere if words else None, sentence_end=anywhere if sentences else None
    )


def _renumbered(frame: Frame | None, new: Mapping[int, int]) -> Frame | None:
    if frame is None:
        return None
    single, pair = (_sides(part, new) for part in frame[:2])
    return Frame((single[0], single[1]), (pair[0], pair[1], pair[2]), frame.typed)


def _sides(sides: Sequence[tuple[int, ...]], new: Mapping[int, int]) -> Any:
    return tuple(tuple(new.get(token, token) for token in side) for side in sides)


def _ids(part: Any) -> Iterator[tuple[str, list[int]]]:
    """Return the attributes of a configuration that hold token ids, with the ids."""
    for name, value in list(vars(part).items()):
        ids = value if isinstance(value, list) else [value]
        if name.endswith(("token_id", "token_index")) and ids and all(type(token) is int for token in ids):
            yield name, ids


def _narrow(part: Any, free: bool, fewest: int) -> None:
    heads = _number(part, "num_attention_heads")
    hidden = _number(part, "hidden_size")
    if heads and hidden:
        _heads(part, heads, hidden, free, fewest)
    elif hidden and hidden > 8 * WIDTH and free:
        _columns(part, hidden, 8 * WIDTH)
    for name in INNER:
        if (_number(part, name) or 0) > WIDTH:
            setattr(part, name, WIDTH)
    groups = _number(part, "n_group") or 1
    chosen = _number(part, "num_experts_per_tok") or 2
    few = -(-max(2 * groups, 2 * chosen) // groups) * groups
    for name in EXPERTS:
        if (_number(part, name) or 0) > few:
            setattr(part, name, few)
    for name in WINDOWS:
        if (_number(part, name) or 0) > WINDOW:
            setattr(part, name, WINDOW)


def _heads(part: Any, heads: int, hidden: int, free: bool, fewest: int) -> None:
    """Reduce to `fewest` heads, or to four if groups of them share keys. The head size stays.

    With `free`, the hidden size need not be a multiple of it, if the class has a separate head size.
    """
    keys = _number(part, "num_key_value_heads") or heads
    few = min(heads, fewest if keys in (1, heads) else 4)
    if hidden % heads and not free:
        return
    width = WIDTH if free and (_number(part, "head_dim") or hidden % heads) else hidden // heads * few
    _columns(part, hidden, width)
    for name, value in list(vars(part).items()):
        counts = "head" in name and not name.endswith("dim") and "mamba" not in name
        if counts and type(value) is int and value in (heads, keys):
            setattr(part, name, few if value == heads else min(keys, 2))


def _columns(part: Any, hidden: int, width: int) -> None:
    for name in [name for name, value in vars(part).items() if type(value) is int and value == hidden]:
        setattr(part, name, width)
    for count, each, times in STATES:
        size = _number(part, each)
        by = _number(part, times)
        apart = _number(part, "mamba_d_ssm") is not None  # the class gives the width of its state separately
        if size and by and not apart and _number(part, count) and by * width % size == 0:
            setattr(part, part.attribute_map.get(count, count), by * width // size)


def _number(part: Any, name: str) -> int | None:
    """Return an integer attribute, by its usual name or the class's own; None without one."""
    value = vars(part).get(part.attribute_map.get(name, name))
    return value if type(value) is int else None
