"""Answers that are drawn from the probabilities that a training pass computes, to the bit.

Generation with a key-value cache adds numbers in another order than training, so its probabilities differ in the last
bits. But a draw is a function of the probabilities and of (seed, answer, token), and these bits almost never change
what is drawn. So the answers are drafted with a cache, and a pass of training's kind then reads them: it gives the
probabilities of every token of an answer at once. A draft is kept up to the first token that these probabilities would
not have drawn. There the token that they draw takes its place, and the rest is drafted again. This is speculative
decoding (Leviathan et al. 2023) in which draft and model share their random numbers, so that what is drawn depends on
the passes alone, and not on the draft ("drafter-invariant": Daliri, Musco and Suresh 2024).

Some passes read several answers together. Where a row's numbers depend on the other rows (experts), tokens and
probabilities are those of the last pass over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from workloads.errors import LogitsNotFinite
from workloads.model.answers import Drawn, choose
from workloads.workload import Ended, Sampling


class Text(NamedTuple):
    """A prompt and its answer, as token ids."""

    prompt: list[int]
    answer: list[int]


class Read(NamedTuple):
    """What a pass computes of an answer of n tokens.

    Attributes:
        scores: logits at the temperature, from which each token is drawn, fp32 [n, vocabulary].
        log_probabilities: of its tokens, fp32 [n].
    """

    scores: Tensor
    log_probabilities: Tensor


class Draft(Protocol):
    """Generates answers quickly, and almost as a pass of training's kind would have them."""

    def __call__(
        self,
        *,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[Sequence[int]],
        max_tokens: int,
        begun: Sequence[Sequence[int]] = (),
    ) -> list[list[Drawn]]:
        """Return the answers to each prompt, as `draw_answers` does."""


def exact_answers(
    draft: Draft,
    read: Callable[[range, Sequence[Text]], Sequence[Read]],
    passes: Sequence[range],
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
    ended: Ended | None = None,
) -> list[list[Drawn]]:
    """Return the answers to each prompt, with the probabilities that passes compute.

    Args:
        draft: generates answers that are almost right. Answers differ from its drafts where it was wrong.
        read: makes a pass over the given rows of `passes`.
        passes: the rows that each pass reads. A row is an answer; rows are in the order of prompts.
        prompts: token ids of each prompt.
        numbers: for each prompt, the number of each of its answers.
        max_tokens: the maximum length of an answer.
        sampling: how tokens are drawn. By races, or much of the drafts is wrong if the vocabulary is large.
        ends: tokens that end an answer.
        ended: further says of an answer's tokens whether it has ended.

    Raises LogitsNotFinite if a pass computes logits that are not finite.
    """
    copies = len(numbers[0])
    row_prompts = [list(prompt) for prompt in prompts for _ in range(copies)]
    row_numbers = [number for each in numbers for number in each]
    drafts = draft(prompts=prompts, numbers=numbers, max_tokens=max_tokens)
    answers = [drawn.tokens for each in drafts for drawn in each]
    read_answers: list[Drawn | None] = [None] * len(answers)

    def is_over(tokens: list[int]) -> bool:
        return tokens[-1] in ends or (ended is not None and ended(tokens))

    def goes_on(row: int) -> bool:
        return len(answers[row]) < max_tokens and not is_over(answers[row])

    unread = list(passes)
    # A round makes at least one more token of each answer right, so that the last one finds nothing wrong. Only where
    # rows depend on each other may it do so, and then what it reads stays.
    for round_number in range(max_tokens + 1):
        corrected: list[int] = []
        for rows in unread:
            texts = [Text(row_prompts[row], answers[row]) for row in rows]
            for row, (scores, log_p) in zip(rows, read(rows, texts), strict=True):
                tokens = answers[row]
                exact: list[int] = []
                entropies: list[float] = []
                for part in scores.split(len(answers)):  # no more at once than a draft draws
                    token_numbers = range(len(exact), len(exact) + len(part))
                    places = [(row_numbers[row], token_number) for token_number in token_numbers]
                    chosen, _, entropy = choose(part, places, sampling)
                    exact += chosen.tolist()
                    entropies += entropy.tolist()
                if not all(map(math.isfinite, entropies)):
                    raise LogitsNotFinite
                read_answers[row] = Drawn(tokens, log_p.tolist(), sum(entropies), is_over(tokens))
                right = _equal_tokens(tokens, exact)
                if right < len(tokens) and round_number < max_tokens:
                    answers[row] = exact[: right + 1]
                    corrected.append(row)
        if not corrected:
            break
        # Several times, if the positions of the longest row leave the others too few tokens.
        while going := list(filter(goes_on, corrected)):
            drafts = draft(
                prompts=[row_prompts[row] + answers[row] for row in going],
                numbers=[[row_numbers[row]] for row in going],
                max_tokens=max_tokens - min(len(answers[row]) for row in going),
                begun=[answers[row] for row in going],
            )
            for row, (drawn,) in zip(going, drafts, strict=True):
                answers[row] = drawn.tokens[:max_tokens]
        unread = [rows for rows in unread if any(row in rows for row in corrected)]
    complete = [drawn for drawn in read_answers if drawn is not None]
    return [complete[first : first + copies] for first in range(0, len(complete), copies)]


def _equal_tokens(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """Return how many tokens are equal before the first that is not."""
    pairs = enumerate(zip(tokens, other_tokens, strict=True))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), len(tokens))
