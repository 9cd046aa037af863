from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from workloads.objectives.gap_sentences import rouge1
from workloads.objectives.spans import sentences


def plain_rouge1(sentence, rest):
    overlap = sum((Counter(sentence) & Counter(rest)).values())
    if overlap == 0:
        return 0.0
    precision, recall = overlap / len(sentence), overlap / len(rest)
    return 2 * precision * recall / (precision + recall)


def text_of(seed, vocabulary, size=127):
    """A document with few distinct tokens, so that sentences overlap; its sentences as lists."""
    rng = np.random.default_rng(seed)
    text = np.where(rng.random(size) < 0.15, rng.integers(300, 310, size), rng.integers(110, 140, size))
    starts, stops = sentences(text, vocabulary.eos, vocabulary.sentence_end)
    return text, starts, stops


def test_rouge_is_that_of_the_definition(vocabulary):
    for seed in range(20):
        text, starts, stops = text_of(seed, vocabulary)
        plain = [
            plain_rouge1(text[a:b].tolist(), [*text[:a], *text[b:]])
            for a, b in zip(starts, stops, strict=True)
        ]
        assert rouge1(text, starts, stops) == pytest.approx(plain)


def gaps_of(objective, text, epoch=0):
    batch = objective.collate(lambda i: text, [0], epoch)
    labels = batch["labels"][0].numpy()
    return batch["tokens"][0].numpy(), labels[labels != -100][:-1]


def test_principal_sentences_are_taken_in_the_order_of_the_text(make, vocabulary):
    objective = make("gap_sentences", 128)
    for seed in range(20):
        text, starts, stops = text_of(seed, vocabulary)
        scores = rouge1(text, starts, stops)
        wanted, room, best = max(1, round(0.3 * len(starts))), objective.target_length - 1, []
        for i in np.argsort(-scores, kind="stable"):
            if len(best) < wanted and stops[i] - starts[i] <= room:
                best.append(i)
                room -= stops[i] - starts[i]
        tokens, target = gaps_of(objective, text)
        assert target.tolist() == np.concatenate([text[starts[i] : stops[i]] for i in sorted(best)]).tolist()
        assert (tokens == 5).sum() == len(best)


def test_lead_and_random_sentences(make, vocabulary):
    text, _, stops = text_of(3, vocabulary)
    _, lead = gaps_of(make("gap_sentences", 128, choose="lead"), text)
    assert np.array_equal(lead, text[: len(lead)])
    assert len(lead) in stops
    drawn = {
        tuple(gaps_of(make("gap_sentences", 128, choose="random"), text, epoch)[1]) for epoch in range(10)
    }
    assert len(drawn) > 5


def test_the_share_of_sentences(make, vocabulary):
    taken = total = 0
    for seed in range(100):
        text, starts, _ = text_of(seed, vocabulary)
        taken += (gaps_of(make("gap_sentences", 128, choose="random"), text)[0] == 5).sum()
        total += len(starts)
    assert taken / total == pytest.approx(0.3, abs=0.02)


def test_only_one_document_is_used(make, vocabulary):
    text, _, _ = text_of(0, vocabulary)
    text[60] = 0
    tokens, target = gaps_of(make("gap_sentences", 128), text)
    assert set(target) <= set(text[61:])
    assert (tokens[tokens != 1] != 0).sum() <= 66


@pytest.mark.parametrize("size", [40, 127])
def test_a_single_sentence_predicts_nothing(make, size):
    tokens, target = gaps_of(make("gap_sentences", 128), np.where(np.arange(127) < size, 120, 0))
    assert target.tolist() == []
    assert (tokens[:size] == 120).all()
