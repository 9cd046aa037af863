"""Rows are cut to their micro-batch, and samples dealt by length: the same samples, the same losses and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.config.spec import parse
from orchestrator.data.samples.batches import slices
from orchestrator.parallel.arithmetic import NEWEST, Arithmetic
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.row_lengths import FULL_LENGTH, dealing_order, lengths_of, shortened_rows
from workloads import load
from workloads.model.dropout import KEYS, row_keys
from workloads.objectives.samples import Samples
from workloads.record_format import CLOSE, MARK, pack
from workloads.workload import Batch, Vocabulary

LENGTH = 24
KNOWN = Vocabulary(60, eos=2, pad=3, cls=1, sep=2)
RANDOM = np.random.default_rng(0)
TEXTS = [RANDOM.integers(5, 60, int(RANDOM.integers(3, 9))).tolist() for _ in range(12)]


def talk(n: int) -> np.ndarray:
    """A conversation: half of it predicted."""
    return np.array([*TEXTS[n], *(word | MARK for word in TEXTS[-1 - n])], dtype=np.int64)


RECORDS: dict[str, tuple[str, Any]] = {
    "sequence_classification": ("bert-tiny", lambda n: pack([TEXTS[n], [], [n % 2]])),
    "token_classification": ("bert-tiny", lambda n: pack([TEXTS[n], [1 + place % 2 for place in TEXTS[n]]])),
    "seq2seq": ("t5-tiny", lambda n: pack([TEXTS[n], TEXTS[-n - 1]])),
    "conversation": ("llama-tiny", lambda n: np.append(talk(n), CLOSE)),
    "orpo": ("llama-tiny", lambda n: pack([talk(n), talk(11 - n)])),
    "reward": ("llama-tiny", lambda n: pack([talk(n), talk(11 - n)])),
}


def workload_of(objective: str, **drawn: float) -> Any:
    model, _ = RECORDS[objective]
    changes = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 32}
    return load.load(
        model,
        objective,
        KNOWN,
        changes=changes,
        options={"pack": "no"} if objective == "conversation" else {},
        sequence_length=LENGTH,
        seed=0,
        labels=("a", "b") if "classification" in objective else (),
        **drawn,
    )


def tokens(batch: Batch) -> int:
    return sum(batch[name].numel() for name in ("tokens", "decoder_tokens") if name in batch)


@pytest.mark.parametrize("objective", RECORDS)
def test_shorter_rows_in_another_order_have_the_same_loss_and_gradient(objective: str) -> None:
    workload = workload_of(objective)
    model = workload.build()
    model.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    read = Samples(RECORDS[objective][1], 8)
    found = []
    for order, cut in (
        (np.arange(8), False),
        (dealing_order(np.array([len(read(n)) for n in range(8)]), 2, 1), True),
    ):
        model.zero_grad()
        total = used = 0.0
        for rows in order.reshape(4, 2).tolist():
            batch = workload.objective.collate(read, rows, 0)
            batch = shortened_rows(batch) if cut else batch
            used += tokens(batch)
            loss = workload.loss(model, batch)
            loss.total.backward()
            total += loss.total.item()
        found.append(
            (total, used, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (whole, all_tokens, gradients), (short, fewer, others) = found
    assert short == pytest.approx(whole, rel=1e-5)
    assert fewer < all_tokens
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("arithmetic", [Arithmetic.CUT_ROWS, NEWEST])
@pytest.mark.parametrize(
    ("samples", "micro_batch", "ranks"), [(16, 2, 2), (24, 4, 3), (6, 1, 6), (5, 5, 1), (8, 1, 3)]
)
def test_micro_batches_are_of_like_length_whatever_the_ranks(
    samples: int, micro_batch: int, ranks: int, arithmetic: Arithmetic
) -> None:
    lengths = np.random.default_rng(samples).integers(1, 100, samples)
    order = dealing_order(lengths, micro_batch, ranks, arithmetic)
    assert sorted(order.tolist()) == list(range(samples))
    rows = lengths[order].reshape(-1, micro_batch)
    by_length = rows[np.argsort(-rows.max(1), kind="stable")]
    assert (by_length[:-1].min(1) >= by_length[1:].max(1)).all()


@pytest.mark.parametrize(
    ("micro_batches", "ranks", "work"),
    [(8, 2, [18, 18]), (8, 4, [9, 9, 9, 9]), (4, 3, [4, 3, 3]), (9, 3, [16, 15, 14])],
)
def test_ranks_have_like_work(micro_batches: int, ranks: int, work: list[int]) -> None:
    """Micro-batches of lengths 1, 2, 3, ... in the blocks that ranks take."""
    lengths = np.arange(1, micro_batches + 1)
    found = lengths[dealing_order(lengths, 1, ranks)]
    blocks = [slices(0, micro_batches, rank, ranks, 1) for rank in range(ranks)]
    assert [sum(found[first] for first, _ in block) for block in blocks] == work


def test_a_run_that_began_with_bit_reversed_order_keeps_it() -> None:
    order = dealing_order(np.arange(8, 0, -1), 1, 2, Arithmetic.CUT_ROWS)
    assert order.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_rows_stay_whole_where_shapes_or_bits_must_not_change() -> None:
    document: dict[str, Any] = {
        "name": "small",
        "workload": {"model": "bert-tiny", "objective": "sequence_classification"},
        "data": {"sources": [{"uri": "a.jsonl"}], "tokenizer": "none", "sequence_length": 32, "labels": ["a", "b"]},
        "train": {"steps": 10, "global_batch": 8},
    }  # fmt: skip
    workload = workload_of("sequence_classification")

    def found(layout: Layout, **train: Any) -> Any:
        spec = parse({**document, "train": {**document["train"], **train}})
        return lengths_of(workload, layout, spec.train, on_gpu=False, packed=False)

    plain = found(Layout(dp=2))
    assert (plain.cuts, plain.deals, plain.multiple) == (True, True, 1)
    assert found(Layout(cp=2)).multiple == 4
    assert (
        found(Layout(cp=2, tp=4, sequence=True)).multiple == 8
    )  # each context part is cut by tensor parallelism too
    assert found(Layout(pp=2)) is FULL_LENGTH
    assert found(Layout(), compile=True) is FULL_LENGTH
    assert found(Layout(dp=2), determinism="bitwise") is FULL_LENGTH
    batch = workload.objective.collate(Samples(RECORDS["sequence_classification"][1], 4), [0, 1], 0)
    assert shortened_rows(batch, 4)["tokens"].shape[1] % 4 == 0
    assert shortened_rows(batch | {"mine": batch["tokens"]})["tokens"].shape[1] == LENGTH


@pytest.mark.parametrize("drawn", [{"dropout": 0.1}, {"embedding_noise": 5.0}], ids=str)
@pytest.mark.parametrize("objective", ["reward", "orpo"])
def test_two_answers_of_a_row_are_trained_with_random_numbers(
    objective: str, drawn: dict[str, float]
) -> None:
    """The ends of a reward model's answers were once taken for the positions of a row's tokens."""
    workload = workload_of(objective, **drawn)
    model = workload.build().train()
    model.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    batch = workload.objective.collate(Samples(RECORDS[objective][1], 8), [0, 1], 0)
    batch = shortened_rows(batch | {KEYS: row_keys(0, 0, 2)})
    workload.loss(model, batch).total.backward()
    assert all(
        parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None
    )
