from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchestrator.data.prepared.tokens import Tokens
from orchestrator.data.samples.look import documents_cut
from workloads.workload import Reading


def test_a_document_is_cut_if_what_is_predicted_of_it_is_in_two_samples(
    prepare_here: Callable[..., str],
) -> None:
    words = ["some", "words", "of", "text", "that", "is", "read"]
    texts = [" ".join(words[: n % 7] * (1 + n % 4)) for n in range(70)]
    tokens = Tokens.open(prepare_here(["\n<|endoftext|>\n".join(texts)]))
    stride = 20
    ends = tokens.document_ends(0).tolist()
    cut = short = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        samples = {(token - 1) // stride for token in range(begin + 1, end)}
        cut += len(samples) > 1
        short += len(samples) > 1 and end - begin <= stride + 1
    found = documents_cut(tokens, Reading("stream", stride + 1, stride), False)
    assert found == {"documents": len(ends), "cut": cut, "cut_though_short": short}
    assert 0 < short < cut
    long = int((np.diff([0, *ends]) > stride + 1).sum())
    packed = documents_cut(tokens, Reading("stream", stride + 1, stride), True)
    assert packed == {"documents": len(ends), "cut": long, "cut_though_short": 0}
