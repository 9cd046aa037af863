"""Drawn answers: their probabilities are the model's, and nobody but their own number changes them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from workloads.errors import WorkloadError
from workloads.hf.check.parity_table import VOCABULARY, random_state
from workloads.model import answers
from workloads.model.answers import Drawn, draw_answers
from workloads.model.config import TransformerConfig
from workloads.model.generate import generate
from workloads.model.presets import PRESETS
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Generation, Sampling

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64, "vocab_size": 40, "max_positions": 24}
PROMPTS = [[5, 9, 3], [7], [11, 4, 30, 8, 21], [6, 6]]
GROUP = 4
NUMBERS = [[prompt * GROUP + k for k in range(GROUP)] for prompt in range(len(PROMPTS))]


def made(name: str = "llama-tiny") -> tuple[nn.Module, TransformerConfig]:
    """A model with random weights, peaked enough that answers differ and repeat."""
    config = PRESETS[name].changed(SMALL)
    workload = TransformerWorkload(name, config, None, VOCABULARY)
    model = workload.build()
    model.load_state_dict({key: 2.0 * value for key, value in random_state(workload).items()})
    return model.eval(), config


def drawn(sampling: Sampling | None = None, name: str = "llama-tiny", **how: Any) -> list[list[Drawn]]:
    model, config = made(name)
    asked: dict[str, Any] = {"prompts": PROMPTS, "numbers": NUMBERS, "max_tokens": 10, "ends": (), **how}
    return draw_answers(model, config, sampling=sampling or Sampling(temperature=1.0, seed=3), **asked)


def tokens_of(found: list[list[Drawn]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in each] for each in found]


@torch.no_grad()
def plain(model: nn.Module, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of every token of the vocabulary [answer, vocabulary], of one pass without a cache."""
    logits = model({"tokens": torch.tensor([prompt + answer])}).logits[0]
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_probabilities_and_entropies_are_those_of_a_plain_pass(temperature: float) -> None:
    model, _ = made()
    for prompt, each in zip(
        PROMPTS, drawn(Sampling(temperature=temperature, seed=3), ends=(2, 9)), strict=True
    ):
        for answer in each:
            expected = plain(model, prompt, answer.tokens, temperature)
            of_tokens = expected.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(answer.log_probabilities), of_tokens, atol=1e-4, rtol=0.0)
            entropy = -(expected.exp() * expected).sum().item()
            assert answer.entropy == pytest.approx(entropy, abs=1e-3)
            assert answer.ended == (answer.tokens[-1] in (2, 9))
            assert not {2, 9} & {*answer.tokens[:-1]}


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_an_answer_is_the_same_alone_and_among_others(name: str) -> None:
    together = tokens_of(drawn(name=name))
    assert len({tuple(answer) for each in together for answer in each}) > 8
    for prompt, numbers, found in zip(PROMPTS, NUMBERS, together, strict=True):
        for number, answer in zip(numbers, found, strict=True):
            alone = drawn(name=name, prompts=[prompt], numbers=[[number]])
            assert tokens_of(alone) == [[answer]]


def test_the_seed_and_the_number_decide() -> None:
    first = tokens_of(drawn())
    assert first == tokens_of(drawn())
    assert first != tokens_of(drawn(Sampling(temperature=1.0, seed=4)))
    turned = tokens_of(drawn(numbers=[each[::-1] for each in NUMBERS]))
    assert turned == [each[::-1] for each in first]


def test_removing_ended_rows_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for full in (0.0, 0.75, 1.0):  # never before all have ended, sometimes, at once
        monkeypatch.setattr(answers, "FULL", full)
        found[full] = drawn(ends=(2, 9, 14))
    lengths = {len(answer.tokens) for each in found[1.0] for answer in each}
    assert min(lengths) < max(lengths)
    assert tokens_of(found[0.0]) == tokens_of(found[0.75]) == tokens_of(found[1.0])
    for one, other in zip(*map(itertools.chain.from_iterable, (found[0.0], found[1.0])), strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-5)
        assert one.entropy == pytest.approx(other.entropy, abs=1e-4)
        assert one.ended == other.ended


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (4, 0.6)])
def test_only_allowed_tokens_are_drawn_and_their_probabilities_are_whole(top_k: int, top_p: float) -> None:
    model, _ = made()
    ranks = set()
    for prompt, each in zip(
        PROMPTS, drawn(Sampling(temperature=1.5, top_k=top_k, top_p=top_p, seed=3)), strict=True
    ):
        for answer in each:
            whole = plain(model, prompt, answer.tokens, 1.5)
            for place, token in enumerate(answer.tokens):
                assert answer.log_probabilities[place] == pytest.approx(whole[place, token].item(), abs=1e-4)
                shares, order = whole[place].exp().sort(descending=True)
                rank = order.tolist().index(token)
                ranks.add(rank)
                if top_k:
                    assert rank < top_k
                    shares = shares[:top_k] / shares[:top_k].sum()
                assert shares[:rank].sum().item() < top_p + 1e-5
    assert len(ranks) > 1


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_without_a_temperature_it_is_greedy_generation(name: str) -> None:
    model, config = made(name)
    expected = generate(model, config, PROMPTS, 10, Generation(ends=(2, 9)))
    found = drawn(Sampling(temperature=0.0, seed=3), name=name, ends=(2, 9))
    assert tokens_of(found) == [[answer] * GROUP for answer in expected]


@pytest.mark.parametrize("is_race", [False, True])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (1.5, 0), (1.0, 5)])
def test_frequencies_are_the_probabilities(temperature: float, top_k: int, is_race: bool) -> None:
    model, _ = made()
    count = 4000
    found = drawn(
        Sampling(temperature=temperature, top_k=top_k, seed=11, is_race=is_race),
        prompts=[PROMPTS[0]],
        numbers=[list(range(count))],
        max_tokens=1,
    )
    seen = Counter(answer.tokens[0] for answer in found[0])
    shares = plain(model, PROMPTS[0], [0], temperature)[0].double().exp()
    if top_k:
        shares = shares.where(shares >= shares.topk(top_k).values[-1], 0.0)
    expected = (shares / shares.sum() * count).tolist()
    assert all(expected[token] > 0 for token in seen)
    # Tokens that are expected fewer than five times count as one.
    often = [token for token, number in enumerate(expected) if number >= 5]
    rest = count - sum(expected[token] for token in often)
    observed = [seen[token] for token in often] + [count - sum(seen[token] for token in often)]
    predicted = [expected[token] for token in often] + [rest]
    if rest < 1e-6:
        observed, predicted = observed[:-1], predicted[:-1]
    assert len(predicted) >= 4
    assert chisquare(observed, predicted).pvalue > 0.001


def test_a_function_ends_answers() -> None:
    limit = 4
    unlimited = drawn()
    found = drawn(ended=lambda tokens: len(tokens) == limit)
    assert tokens_of(found) == [[answer.tokens[:limit] for answer in each] for each in unlimited]
    assert all(answer.ended for each in found for answer in each)
    assert not any(answer.ended for each in unlimited for answer in each)
    assert all(len(answer.log_probabilities) == limit for each in found for answer in each)


def test_learned_positions_limit_answers_and_others_do_not() -> None:
    room = SMALL["max_positions"] - max(map(len, PROMPTS))
    found = drawn(name="gpt-tiny", max_tokens=100)
    assert {len(answer.tokens) for each in found for answer in each} == {room}
    found = drawn(max_tokens=room + 7)
    assert {len(answer.tokens) for each in found for answer in each} == {room + 7}
    with pytest.raises(WorkloadError, match="leave room for an answer"):
        drawn(name="gpt-tiny", prompts=[[4] * SMALL["max_positions"]], numbers=[[0]])
    with pytest.raises(WorkloadError, match="one token at least"):
        drawn(prompts=[[], [3]], numbers=[[0], [1]])


def test_all_answers_may_be_over_at_the_first_token() -> None:
    found = drawn(ends=range(SMALL["vocab_size"]))
    assert all(len(answer.tokens) == 1 and answer.ended for each in found for answer in each)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(
    value: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = made()
    forward = model.forward

    def broken(*inputs: Any, **named: Any) -> Any:
        found = forward(*inputs, **named)
        found.logits[2, 0, 7] = value
        return found

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(WorkloadError, match="not finite"):
        draw_answers(
            model,
            config,
            prompts=PROMPTS,
            numbers=NUMBERS,
            max_tokens=3,
            sampling=Sampling(temperature=temperature, seed=1),
            ends=(),
        )


def test_in_a_race_nearly_equal_probabilities_draw_the_same_token() -> None:
    """A change of the logits by a share d changes a draw with a probability of about d, whatever the vocabulary."""
    random = torch.Generator().manual_seed(5)
    scores = torch.randn(500, 4000, generator=random)
    others = scores + 1e-3 * torch.randn(scores.shape, generator=random)
    places = [(number, 0) for number in range(500)]
    share = {}
    for is_race in (False, True):
        sampling = Sampling(temperature=1.0, seed=3, is_race=is_race)
        one, other = (answers.choose(each, places, sampling)[0] for each in (scores, others))
        share[is_race] = (one != other).float().mean().item()
    assert share[True] < 0.01
    assert share[False] > 0.03


def test_the_highest_number_draws_the_last_token_that_can_be_drawn() -> None:
    """Its product with the total of the probabilities does not round up to the total, or the token after all that have
    a probability would be drawn."""
    highest = (2**64 - 1 >> 11) / 2**53  # of `uniform`
    assert highest < 1.0
    draw = torch.Generator().manual_seed(0)
    totals = 1.0 + torch.rand(100_000, generator=draw, dtype=torch.float64)
    powers = 2.0 ** torch.arange(-30, 3, dtype=torch.float64)
    for total in (totals, totals / 4, powers, powers * highest):
        assert bool((highest * total < total).all())
    shares = torch.rand(1000, 50, generator=draw, dtype=torch.float64) + 1e-6
    last = torch.randint(0, 50, (1000,), generator=draw)
    shares[torch.arange(50) > last[:, None]] = 0.0
    assert torch.equal(answers._drawn(shares, [highest] * 1000, Sampling(temperature=1.0)), last)
    first = (shares > 0).to(torch.int8).argmax(-1)
    assert torch.equal(answers._drawn(shares, [0.0] * 1000, Sampling(temperature=1.0)), first)
