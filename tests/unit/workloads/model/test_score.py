"""The likelihood of texts: that of transformers, text by text, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.hf.check.compare import load
from workloads.hf.check.parity_table import CASES, VOCABULARY, Case, random_state
from workloads.model import score as scores
from workloads.model.score import longest, score
from workloads.transformer_workload import TransformerWorkload

TITLES = ("GPT-2", "Llama 3", "Mixtral, window", "DeepSeek-V3", "T5", "BART", "Switch")
PAIRS = [
    (list(range(3, 3 + a)), list(range(20, 20 + b))) for a, b in ((4, 3), (9, 1), (1, 6), (4, 3), (2, 2))
]


def made(case: Case) -> tuple[TransformerWorkload, dict[str, Tensor], nn.Module]:
    workload = TransformerWorkload(case.model, case.config, None, VOCABULARY)
    state = random_state(workload)
    model = workload.build()
    model.load_state_dict(state)
    return workload, state, model


def theirs(hf_model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By transformers: labels shifted by the class itself, or the end of one forward pass."""
    wanted = torch.tensor([continuation])
    with torch.no_grad():
        if hf_model.config.is_encoder_decoder:
            logits = hf_model(input_ids=torch.tensor([context]), labels=wanted).logits
        else:
            both = torch.tensor([context + continuation])
            logits = hf_model(both[:, :-1]).logits[:, len(context) - 1 :]
    shares = logits.log_softmax(-1)
    total = shares.gather(2, wanted.unsqueeze(2)).sum()
    return float(total), bool((shares.argmax(-1) == wanted).all())


def test_an_adapter_s_tokens_are_among_those_that_a_model_reads_at_once() -> None:
    case = next(case for case in CASES if case.title == "GPT-2")
    workload = TransformerWorkload(case.model, case.config, None, VOCABULARY)
    adapted = replace(workload, adapter=Adapter("prefix", 3, 1.0, ()))
    assert longest(workload) == case.config.max_positions
    assert longest(adapted) == case.config.max_positions - 3


@pytest.mark.parametrize("case", [c for c in CASES if c.title in TITLES], ids=lambda case: case.title)
def test_scores_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    workload, state, model = made(case)
    workload.to_hf(state.__getitem__, str(tmp_path))
    hf_model = load(str(tmp_path))
    found = score(workload, model, PAIRS)
    for (context, continuation), ours in zip(PAIRS, found, strict=True):
        total, greedy = theirs(hf_model, context, continuation)
        assert ours.total == pytest.approx(total, abs=1e-5)
        assert ours.greedy == greedy
    # The same pair in another batch: with several threads, sums may differ in the last bits.
    assert found[0].total == pytest.approx(found[3].total, abs=1e-5)
    assert [s.total for s in found] == pytest.approx([score(workload, model, [p])[0].total for p in PAIRS])


def case_of(title: str, **changes: Any) -> Case:
    found = next(case for case in CASES if case.title == title)
    return Case(found.title, found.model, {**found.changes, **changes})


def test_what_greedy_search_says_is_greedy() -> None:
    workload, _, model = made(case_of("GPT-2"))
    from workloads.workload import Sampling

    (said,) = workload.generate(model, [[5, 6, 7]], 4, Sampling())
    other = [*said[:-1], (said[-1] + 1) % 97]
    assert [s.greedy for s in score(workload, model, [([5, 6, 7], said), ([5, 6, 7], other)])] == [
        True,
        False,
    ]


def test_a_capacity_by_length_does_not_see_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, _, model = made(case_of("Switch", moe={"capacity_factor": 0.75, "capacity": None}))
    alone = [score(workload, model, [pair])[0].total for pair in PAIRS]
    assert [found.total for found in score(workload, model, PAIRS)] == pytest.approx(alone, abs=1e-6)


def test_batches_are_bounded_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, _, model = made(case_of("GPT-2"))
    whole, told = score(workload, model, PAIRS), list[int]()
    monkeypatch.setattr(scores, "LOGITS", 97 * 7)
    found = score(workload, model, PAIRS, lambda: told.append(1))
    assert [s.total for s in found] == pytest.approx([s.total for s in whole], abs=1e-6)
    assert len(told) == 5
    assert score(workload, model, []) == []


def test_what_gives_no_likelihood_is_refused() -> None:
    workload, _, model = made(case_of("GPT-2"))
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(WorkloadError, match="an empty text has no score"):
            score(workload, model, [pair])
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(WorkloadError, match="not finite; it has diverged"):
        score(workload, model, PAIRS)
    bert = next(case for case in CASES if case.model == "bert-tiny")
    encoder = TransformerWorkload(bert.model, bert.config, None, VOCABULARY)
    with pytest.raises(WorkloadError, match="generates no text; use a decoder or an encoder-decoder"):
        score(encoder, nn.Module(), PAIRS)
