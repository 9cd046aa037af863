"""The log-probability of a text: the sum over its tokens, each given the preceding ones.

Texts are read in batches of similar length, one forward pass per batch. The order depends only on the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from workloads.errors import LogitsNotFinite, WorkloadError
from workloads.model.generate import check_generates, evaluating, padded
from workloads.workload import Batch

if TYPE_CHECKING:
    from workloads.workload import Workload

ROWS = 64
"""The maximum number of texts in a batch."""
LOGITS = 2**27
"""The maximum number of logits of a batch of several texts: half a gibibyte in fp32, and the same again for their
logarithms.
"""


class Score(NamedTuple):
    """The log-probability of a text in nats, and whether greedy search would generate the text."""

    total: float
    greedy: bool


class _Text(NamedTuple):
    """The model's inputs for a text. The encoder of an encoder-decoder reads `source`, the decoder `inputs`; the last
    outputs predict `targets`.
    """

    source: Sequence[int]
    inputs: Sequence[int]
    targets: Sequence[int]


@torch.inference_mode()
def score(
    workload: Workload,
    model: nn.Module,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    progressed: Callable[[], object] = lambda: None,
) -> list[Score]:
    """Return the score of each continuation given its context, both token ids, under a model of `workload`.

    A decoder reads the context and then the continuation. The encoder of an encoder-decoder reads the context, and its
    decoder scores the continuation. Neither may be empty or exceed the model's positions. `progressed` is called after
    each batch.

    Raises WorkloadError if the model does not predict text from left to right, and LogitsNotFinite if its logits are
    not finite.

    Args:
        workload: the model's kind, and its first decoder token.
        model: its module.
        pairs: context and continuation of each text.
        progressed: called after each batch.
    """
    check_scores(workload)
    config = workload.config
    # An expert's capacity depends on the length, padding included, and some classes do not support padding at all.
    even = config.as_transformer is None or bool(config.moe and config.moe.capacity_factor)
    texts = [_text(workload, context, continuation) for context, continuation in pairs]
    score_by_number: dict[int, Score] = {}
    with evaluating(model):
        for numbers in _batches(texts, max(LOGITS // config.vocab_size, 1), even):
            score_by_number |= zip(
                numbers, _scored(workload, model, [texts[n] for n in numbers], even), strict=True
            )
            progressed()
    return [score_by_number[number] for number in range(len(texts))]


def check_scores(workload: Workload) -> None:
    """Raise WorkloadError if a model does not predict text from left to right."""
    config = workload.config
    if config.as_transformer is not None:
        check_generates(config)
    elif not getattr(config, "gives_logits", True):
        raise WorkloadError(f"{workload.name} gives no logits of the next token; add logits(batch)")
    elif config.architecture == "encoder":
        raise WorkloadError(
            f"{workload.name} is an encoder and generates no text; use a decoder or an encoder-decoder"
        )
    if config.architecture == "encoder-decoder" and workload.decoder_start is None:
        raise WorkloadError("the decoder has no token to begin with; give the vocabulary a pad token")


def longest(workload: Workload) -> int | None:
    """Return the maximum number of tokens that the model reads at once, without an adapter's; None if nothing limits
    them.
    """
    config, adapter = workload.config, getattr(workload, "adapter", None)
    bounded = getattr(config, "positions", "learned") in ("learned", "rotary")
    if not bounded or config.max_positions >= UNLIMITED:
        return None
    return int(config.max_positions) - (adapter.positions if adapter else 0)


UNLIMITED = 1_000_000
"""The positions of a class that declares no limit, see `workloads.hf.as_they_are.hf_class`."""


def _text(workload: Workload, context: Sequence[int], continuation: Sequence[int]) -> _Text:
    if not context or not continuation:
        raise WorkloadError(
            "an empty text has no score; give a context and a continuation of a token at least"
        )
    if workload.config.architecture == "encoder-decoder":
        start = workload.decoder_start
        assert start is not None
        return _Text(context, [start, *continuation[:-1]], continuation)
    return _Text((), [*context, *continuation[:-1]], continuation)


def _batches(texts: Sequence[_Text], most: int, even: bool) -> Iterator[list[int]]:
    """Yield the indices of the texts of each batch, longest first: at most `most` tokens with padding; of equal length
    if `even`.
    """

    def size(number: int) -> tuple[int, int]:
        return len(texts[number].inputs), len(texts[number].source)

    batch: list[int] = []
    for number in sorted(range(len(texts)), key=size, reverse=True):
        full = batch and (len(batch) == ROWS or (len(batch) + 1) * size(batch[0])[0] > most)
        if full or (even and batch and size(number) != size(batch[0])):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _scored(workload: Workload, model: nn.Module, texts: Sequence[_Text], even: bool) -> list[Score]:
    device = next(model.parameters()).device
    tokens, real = padded([text.inputs for text in texts], device)
    batch: Batch = {"tokens": tokens} if even else {"tokens": tokens, "padding": real}
    if texts[0].source:
        source, padding = padded([text.source for text in texts], device)
        batch = {"tokens": source, "padding": padding, "decoder_tokens": tokens}
        if not even:
            batch["decoder_padding"] = real
    logits: Tensor = model(workload.asking_logits(batch)).logits
    return [_score(row, text) for row, text in zip(logits, texts, strict=True)]


def _score(logits: Tensor, text: _Text) -> Score:
    """Return the score from the logits [L, vocabulary] of one text, which may be padded at its end."""
    first = len(text.inputs) - len(text.targets)
    count = len(text.targets)
    shares = logits[first : first + count].float().log_softmax(-1)
    targets = torch.tensor(text.targets, device=logits.device)
    # The log-softmax is in fp32, the sum over thousands of tokens in fp64.
    total = shares.gather(1, targets.unsqueeze(1)).double().sum()
    if not torch.isfinite(total):
        raise LogitsNotFinite
    return Score(float(total), bool((shares.argmax(-1) == targets).all()))
