"""Several drawn answers to each prompt, with the log-probabilities of their tokens, for learning from rewards.

All answers of a call are decoded together with a key-value cache. A prompt is read once for all of its answers. Rows
whose answer has ended leave the batch, so that the longest answers do not keep the others' rows busy.

Every draw uses random numbers that depend only on (seed, number of the answer, position of the token). The same call on
the same kind of machine therefore gives the same tokens, wherever and whenever it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workloads.errors import LogitsNotFinite, WorkloadError
from workloads.model.cache import Cache
from workloads.model.config import TransformerConfig
from workloads.model.dropout import uniform_numbers
from workloads.model.generate import check_generates, evaluating, padded, random_key, uniform
from workloads.workload import Batch, Ended, Sampling

FULL = 0.75
"""Rows of ended answers are removed when at most this share of the rows continues."""


class Drawn(NamedTuple):
    """A generated answer.

    Attributes:
        tokens: its tokens, with the one that ends it, if it has ended.
        log_probabilities: of each token, at the temperature, without the cuts of top_k and top_p.
        entropy: the sum over tokens of the entropy of their distributions, in nats; as `log_probabilities`, at the
            temperature and without those cuts.
        ended: whether it ended by itself, not by reaching the maximum length.
    """

    tokens: list[int]
    log_probabilities: list[float]
    entropy: float
    ended: bool


@torch.inference_mode()
def draw_answers(
    model: nn.Module,
    config: TransformerConfig,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
    ended: Ended | None = None,
    progressed: Callable[[], object] = lambda: None,
    begun: Sequence[Sequence[int]] = (),
) -> list[list[Drawn]]:
    """Return the answers to each prompt.

    Args:
        model: the decoder, on any device.
        config: its configuration.
        prompts: token ids of each prompt.
        numbers: for each prompt, the number of each of its answers; every prompt has as many.
        max_tokens: the maximum length of an answer, without what it begins with.
        sampling: how tokens are drawn.
        ends: tokens that end an answer.
        ended: further says of an answer's tokens whether it has ended.
        progressed: called after each token.
        begun: the tokens that each answer begins with, which are the last ones of its prompt; then every prompt has one
            answer. `Drawn.tokens` has them, and what else it has is of the others.

    Raises:
        LogitsNotFinite: if logits are not finite.
        WorkloadError: if the model generates no text, or a prompt is empty or leaves no room.
    """
    check_generates(config)
    if config.architecture != "decoder":
        raise WorkloadError(
            f"answers are drawn from a decoder, and {config.family} is an {config.architecture}"
        )
    copies = len(numbers[0])
    longest = max(map(len, prompts))
    if not min(map(len, prompts)) or (config.positions == "learned" and longest >= config.max_positions):
        raise WorkloadError(
            f"prompts have {min(map(len, prompts))} to {longest} tokens, but the model {config.max_positions} "
            "positions; give one token at least, and leave room for an answer"
        )
    if config.positions == "learned":
        max_tokens = min(max_tokens, config.max_positions - longest)
    device = next(model.parameters()).device
    rows = _Rows([number for each in numbers for number in each], sampling, ends, ended, begun)
    cache = Cache(longest + max_tokens)
    with evaluating(model):
        tokens, real = padded(prompts, device)
        positions = torch.arange(longest, device=device).expand_as(tokens)
        batch: Batch = {"tokens": tokens, "positions": positions, "padding": real}
        # One pass reads each prompt once; the rows of its answers begin with copies of its keys and values.
        logits = model(batch, cache=cache).logits[:, 0].repeat_interleave(copies, 0)
        at = real.sum(1, keepdim=True).repeat_interleave(copies, 0)
        # [prompts, ..] becomes [prompts x copies, ..], the answers to a prompt next to each other.
        cache.select(torch.arange(len(prompts), device=device).repeat_interleave(copies))
        for token_number in range(max_tokens):
            chosen = rows.draw(logits)
            progressed()
            continuing = rows.remaining()
            if not rows.going or token_number + 1 == max_tokens:
                break
            if len(continuing) < len(chosen):
                index = torch.tensor(continuing, device=device)
                chosen = chosen[index]
                at = at[index]
                cache.select(index)
            batch = {
                "tokens": chosen.unsqueeze(1),
                "positions": at,
                "padding": torch.ones_like(at, dtype=torch.bool),
            }
            logits = model(batch, cache=cache).logits[:, 0]
            at = at + 1
    answers = rows.answers
    return [answers[first : first + copies] for first in range(0, len(answers), copies)]


class _Rows:
    """The answers of a call, and the answer that each row of the batch belongs to."""

    def __init__(
        self,
        numbers: list[int],
        sampling: Sampling,
        ends: Collection[int],
        ended: Callable[[list[int]], bool] | None,
        begun: Sequence[Sequence[int]],
    ) -> None:
        self._numbers = numbers
        self._sampling = sampling
        self._ends = frozenset(ends)
        self._ended = ended
        self._rows = list(range(len(numbers)))
        self._is_over = [False] * len(numbers)
        self._tokens: list[list[int]] = list(map(list, begun)) or [[] for _ in numbers]
        self._log_p: list[list[float]] = [[] for _ in numbers]
        self._entropy = [0.0] * len(numbers)
        self.going = len(numbers)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token of every row, int64 [B], from logits [B, vocabulary]; add it to the answers that go on.

        Raises LogitsNotFinite if logits are not finite.
        """
        scores = logits.float()
        if self._sampling.temperature not in (0.0, 1.0):
            scores = scores / self._sampling.temperature
        places = [(self._numbers[row], len(self._tokens[row])) for row in self._rows]
        chosen, log_p_of_chosen, entropy = choose(scores, places, self._sampling)
        # One transfer from the device for everything that is read here.
        facts = torch.stack([chosen.double(), log_p_of_chosen.double(), entropy]).tolist()
        if not all(map(math.isfinite, facts[-1])):
            raise LogitsNotFinite
        for row, token, value, uncertainty in zip(self._rows, *facts, strict=True):
            if self._is_over[row]:
                continue
            tokens = self._tokens[row]
            tokens.append(int(token))
            self._log_p[row].append(value)
            self._entropy[row] += uncertainty
            if tokens[-1] in self._ends or (self._ended is not None and self._ended(tokens)):
                self._is_over[row] = True
                self.going -= 1
        return chosen

    def remaining(self) -> list[int]:
        """Return the indices of the rows that stay in the batch: all of them, or only those that continue if they are
        few."""
        if self.going > FULL * len(self._rows):
            return list(range(len(self._rows)))
        continuing = [index for index, row in enumerate(self._rows) if not self._is_over[row]]
        self._rows = [self._rows[index] for index in continuing]
        return continuing

    @property
    def answers(self) -> list[Drawn]:
        return [
            Drawn(*row) for row in zip(self._tokens, self._log_p, self._entropy, self._is_over, strict=True)
        ]


def choose(
    scores: Tensor, places: Sequence[tuple[int, int]], sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is drawn from each row: tokens int64 [n], their log-probabilities fp32 [n], and the entropies of the
    distributions fp64 [n]. An entropy is finite if and only if the scores of its row are.

    In a race each token gets a random number u, and the least -log(u) / probability wins (exponential race, or Gumbel
    maximum). Probabilities that differ by a share d draw another token with a probability of about d (Daliri, Musco and
    Suresh 2024), where draws from the cumulative sums do with that of about d for each token of the vocabulary.

    Args:
        scores: logits at the temperature, fp32 [n, vocabulary].
        places: of each row, the number of the answer, and that of the token in it.
        sampling: how tokens are drawn.
    """
    log_p = scores.log_softmax(-1)
    shares = log_p.double().exp()
    entropy = -(shares * log_p).sum(-1)
    if not sampling.temperature:
        chosen = scores.argmax(-1)
    elif sampling.is_race:
        keys = [random_key(sampling.seed, number, token_number) for number, token_number in places]
        numbers = uniform_numbers(torch.tensor(keys, device=shares.device), shares.shape[1])
        chosen = (_cut(shares, sampling) / numbers.log_().neg_()).argmax(-1)
    else:
        heights = [uniform(sampling.seed, number, token_number) for number, token_number in places]
        chosen = _drawn(shares, heights, sampling)
    return chosen, log_p.gather(1, chosen.unsqueeze(1)).squeeze(1), entropy


def _drawn(shares: Tensor, heights: Sequence[float], sampling: Sampling) -> Tensor:
    """Return the token of every row at which the cumulative probability exceeds the row's height in [0, 1).

    `shares`, fp64 [B, vocabulary], are the probabilities. The tokens are in the order of the vocabulary, because
    sorting them would take most of the time.
    """
    # Not divided by their total: the height is multiplied with it, which is one operation a row instead of one a token.
    # The product never rounds up to the total, which no sum exceeds: a height has 53 bits, so that the product is at
    # least half of the total's last digit below it, and a total that is a power of two has finer digits below it.
    sums = _cut(shares, sampling).cumsum(-1)
    height = torch.tensor(heights, dtype=torch.float64, device=shares.device).unsqueeze(1) * sums[:, -1:]
    # Only a row that is not finite has no such token.
    return torch.searchsorted(sums, height, right=True).squeeze(1).clamp(max=shares.shape[1] - 1)


def _cut(shares: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities fp64 [B, vocabulary] with 0 for tokens that may not be drawn.

    `top_k` keeps the most probable tokens; `top_p` then keeps the fewest whose probabilities sum to at least top_p.
    """
    if 0 < sampling.top_k < shares.shape[1]:
        least = shares.topk(sampling.top_k, -1).values[:, -1:]
        shares = shares.where(shares >= least, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = (shares / shares.sum(-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
        in_nucleus = ordered.cumsum(-1) - ordered < sampling.top_p
        in_nucleus[:, 0] = True  # with a top_p of 0, the most probable token alone
        shares = torch.zeros_like(shares).scatter(1, order, ordered.where(in_nucleus, 0.0))
    return shares
