"""How supervised objectives frame and cut records."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from workloads.errors import WorkloadError
from workloads.objectives import build
from workloads.objectives.samples import Samples
from workloads.record_format import pack
from workloads.workload import Frame, Objective, Vocabulary

CLS, SEP, PAD = 1, 2, 3
FRAME = Frame(((CLS,), (SEP,)), ((CLS,), (SEP,), (SEP,)), False)
KNOWN = Vocabulary(50, eos=SEP, pad=PAD, cls=CLS, sep=SEP, frame=FRAME)


def tokenizers_cut(length: int) -> Tokenizer:
    words = {name: number for number, name in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "a", "b"])}
    found = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    found.enable_truncation(length)
    found.enable_padding(length=length, pad_id=PAD, pad_token="[PAD]")
    return found


@pytest.mark.parametrize("length", [8, 9])
def test_two_texts_are_cut_as_tokenizers_cuts_them(length: int) -> None:
    """Of all pairs of lengths, equal ones among them: there the second text keeps the odd token."""
    theirs = tokenizers_cut(length)
    pairs = [(first, second) for first in range(1, 12) for second in range(1, 12)]
    found: dict[int, list[list[int]]] = {}
    for rule in (5, 6):
        objective = build(
            "sequence_classification",
            vocabulary=KNOWN,
            sequence_length=length,
            seed=0,
            rule=rule,
            labels="ab",
        )
        read = Samples(lambda n: pack([[4] * pairs[n][0], [5] * pairs[n][1], [0]]), len(pairs))
        found[rule] = objective.collate(read, range(len(pairs)), 0)["tokens"].tolist()
    wanted = [theirs.encode(" ".join("a" * first), " ".join("b" * second)).ids for first, second in pairs]
    assert found[6] == wanted
    unlike = [pair for pair, before, now in zip(pairs, found[5], wanted, strict=True) if before != now]
    assert bool(unlike) == (length % 2 == 0)  # 3 tokens of them are the frame
    assert all(first == second for first, second in unlike)


def test_a_target_without_room_for_a_token_is_refused() -> None:
    two = Frame(((CLS,), (SEP,)), ((CLS,), (SEP,), (SEP,)), False)
    for target in (1, 2):
        with pytest.raises(WorkloadError, match=rf"target is {target}, and 2 tokens .*make it at least 3"):
            made(two, target)
    batch = made(two, 3).collate(Samples(lambda _: pack([[4], [5, 5]]), 1), [0], 0)
    assert batch["labels"].tolist() == [[CLS, 5, SEP]]
    with pytest.raises(WorkloadError, match="make it at least 2"):
        made(None, 1)


def made(frame: Frame | None, target: int) -> Objective:
    known = Vocabulary(50, eos=SEP, pad=PAD, frame=frame)
    return build("seq2seq", vocabulary=known, sequence_length=8, seed=0, target=target)


def test_a_run_of_an_earlier_version_keeps_a_target_that_is_the_end_alone() -> None:
    known = Vocabulary(50, eos=SEP, pad=PAD)
    objective = build("seq2seq", vocabulary=known, sequence_length=8, seed=0, target=1, rule=5)
    batch = objective.collate(Samples(lambda _: pack([[4], [5, 5]]), 1), [0], 0)
    assert np.array_equal(batch["labels"], [[SEP]])
