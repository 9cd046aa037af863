"""The batch of an encoder-decoder."""

from __future__ import annotations

import numpy as np

from workloads.objectives.sampled import IGNORE, Sample
from workloads.objectives.spans import padded


def source_and_target(
    source: np.ndarray, target: np.ndarray, lengths: tuple[int, int], start: int, pad: int
) -> Sample:
    """Return tokens [lengths[0]] and decoder_tokens, labels [lengths[1]] with their padding, all padded at the end.

    The decoder reads `start` and the target without its last token. Its labels are the target.

    Args:
        source: int64 [lengths[0] or fewer].
        target: int64 [lengths[1] or fewer].
        lengths: of the encoder's and of the decoder's row.
        start: first token of the decoder.
        pad: the padding token.
    """
    encoder, decoder = lengths
    shifted = np.concatenate(([start], target[:-1]))[: len(target)]
    return {
        "tokens": padded(source, encoder, pad),
        "padding": np.arange(encoder) < len(source),
        "decoder_tokens": padded(shifted, decoder, pad),
        "decoder_padding": np.arange(decoder) < max(len(target), 1),
        "labels": padded(target, decoder, IGNORE),
    }
