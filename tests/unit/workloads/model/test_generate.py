"""Generation: token for token that of transformers, with a cache as without one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from thin import every
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.hf.check.compare import load
from workloads.hf.check.parity_table import CASES, VOCABULARY, Case, random_state
from workloads.model import answers
from workloads.model.cache import Cache
from workloads.model.generate import choose, generate
from workloads.model.presets import PRESETS
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Generation, Sampling

TITLES = (
    "GPT-2", "Llama 3", "Llama 3.1, stretched rotary", "Qwen 3", "Mixtral", "Mixtral, window", "OLMo 2", "Gemma 2",
    "Gemma 3", "Qwen2-MoE", "gpt-oss", "DeepSeek-V3", "DeepSeek-V3, YaRN", "T5", "T5 1.1", "BART", "PEGASUS",
    "Switch",
)  # fmt: skip
GENERATING = [case for case in CASES if case.title in TITLES]
LENGTHS = (1, 5, 11, 7)
GREEDY = Sampling()


def made(case: Case) -> tuple[TransformerWorkload, dict[str, Tensor], nn.Module]:
    """A model with random weights, and no eos that would soon end every text."""
    workload = TransformerWorkload(case.model, case.config, None, VOCABULARY)
    state = random_state(workload)
    model = workload.build()
    model.load_state_dict(state)
    return workload, state, model


def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, 90, (length,)).tolist() for length in LENGTHS]


def test_every_kind_is_compared() -> None:
    assert [case.title for case in GENERATING] == list(TITLES)


@pytest.mark.contract
@pytest.mark.parametrize("case", every(3, GENERATING), ids=lambda case: case.title)
def test_greedy_search_is_that_of_transformers(case: Case, tmp_path: Path) -> None:
    workload, state, model = made(case)
    workload.to_hf(state.__getitem__, str(tmp_path))
    hf_model = load(str(tmp_path))
    ours = workload.generate(model, prompts(), 12, GREEDY)
    assert max(map(len, ours)) == 12
    for prompt, found in zip(prompts(), ours, strict=True):
        tokens = torch.tensor([prompt])
        told = hf_model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=12
        )[0].tolist()
        assert found == told[1 if workload.config.architecture == "encoder-decoder" else len(prompt) :]


def logits_of(model: nn.Module, rows: Tensor, source: Tensor | None, cache: Cache | None) -> Tensor:
    """Logits [B, L, vocabulary]: of one pass, or of one for the first three tokens and one for each after them."""
    if cache is None:
        batch = {"tokens": rows} if source is None else {"tokens": source, "decoder_tokens": rows}
        return model(batch).logits
    steps, memory, found = torch.arange(rows.shape[1]).expand_as(rows), None, []
    for part in (slice(0, 3), *(slice(i, i + 1) for i in range(3, rows.shape[1]))):
        if source is None:
            output = model({"tokens": rows[:, part], "positions": steps[:, part]}, cache=cache)
        else:
            given = {"tokens": source, "decoder_tokens": rows[:, part], "decoder_positions": steps[:, part]}
            output = model(given, memory=memory, cache=cache)
            memory = output.memory
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


@torch.no_grad()
@pytest.mark.parametrize("case", [c for c in GENERATING if c.title != "Switch"], ids=lambda case: case.title)
def test_logits_with_a_cache_are_those_without(case: Case) -> None:
    _, _, model = made(case)
    model.eval()
    torch.manual_seed(2)
    rows = torch.randint(3, 90, (2, 16))
    source = torch.randint(3, 90, (2, 9)) if case.config.architecture == "encoder-decoder" else None
    whole, cached = logits_of(model, rows, source, None), logits_of(model, rows, source, Cache(16))
    assert (whole[:, 2:] - cached).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("case", GENERATING, ids=lambda case: case.title)
def test_a_prompt_s_text_does_not_depend_on_the_others(case: Case) -> None:
    workload, _, model = made(case)
    together = workload.generate(model.train(), prompts(), 8, GREEDY)
    assert model.training
    assert together == [workload.generate(model, [prompt], 8, GREEDY)[0] for prompt in prompts()]


def case_of(title: str) -> Case:
    return next(case for case in CASES if case.title == title)


def test_a_text_ends_with_eos() -> None:
    workload, _, model = made(case_of("Llama 3"))
    whole = workload.generate(model, prompts(), 10, GREEDY)
    eos = whole[1][4]
    for before, after in zip(
        whole, generate(model, workload.config, prompts(), 10, Generation((eos,))), strict=True
    ):
        assert after == (before[: before.index(eos) + 1] if eos in before else before)


def test_learned_positions_end_a_text() -> None:
    workload, _, model = made(case_of("GPT-2"))
    most = workload.config.max_positions
    given = [list(range(3, 3 + most - 2)), [5, 6]]
    assert [len(row) for row in workload.generate(model, given, 100, GREEDY)] == [2, most - 2]
    with pytest.raises(
        WorkloadError, match=f"prompt 1 has {most} tokens, but the model has {most} positions"
    ):
        workload.generate(model, [[5], list(range(3, 3 + most))], 4, GREEDY)


def test_both_sides_of_a_pair_have_learned_positions() -> None:
    workload, _, model = made(case_of("BART"))
    most = workload.config.max_positions
    assert [len(row) for row in workload.generate(model, [list(range(3, 3 + most))], 100, GREEDY)] == [
        most - 1
    ]
    with pytest.raises(WorkloadError, match="prompt 0 has 25 tokens"):
        workload.generate(model, [list(range(3, 4 + most))], 4, GREEDY)


def test_rotary_positions_go_on() -> None:
    workload, _, model = made(case_of("Llama 3"))
    assert len(workload.generate(model, [[5, 6]], 40, GREEDY)[0]) == 40 > workload.config.max_positions


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        *(
            (name, {})
            for name in ("bert-tiny", "roberta-tiny", "albert-tiny", "electra-tiny", "unilm-tiny", "glm-tiny")
        ),
        ("gpt-tiny", {"head": "sequence", "classes": 3}),
        ("gpt-tiny", {"head": "none"}),
    ],
)
def test_what_generates_nothing_says_so(model: str, changes: dict[str, Any]) -> None:
    config = PRESETS[model].changed(changes)
    with pytest.raises(WorkloadError, match="generates no text; use a decoder or an encoder-decoder"):
        generate(nn.Linear(1, 1), config, [[5]], 4, Generation((2,)))


@pytest.mark.parametrize(
    ("given", "start", "wrong"),
    [([[5], []], 1, "prompt 1 is empty"), ([[5]], None, "the decoder has no token to begin with")],
)
def test_bad_prompts_are_named(given: list[list[int]], start: int | None, wrong: str) -> None:
    workload, _, model = made(case_of("T5"))
    with pytest.raises(WorkloadError, match=wrong):
        generate(model, workload.config, given, 4, Generation((2,)), start)
    assert workload.generate(model, [], 4, GREEDY) == []


def test_a_model_that_has_diverged_says_so() -> None:
    workload, _, model = made(case_of("GPT-2"))
    with torch.no_grad():
        model.tokens.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(WorkloadError, match="has diverged"):
        workload.generate(model, [[5]], 4, GREEDY)


# -- sampling


def test_what_is_drawn_depends_on_seed_prompt_and_place_alone() -> None:
    workload, _, model = made(case_of("Mixtral"))
    warm = Sampling(temperature=1.5, seed=3)
    first = workload.generate(model, prompts(), 8, warm)
    torch.rand(7)
    assert workload.generate(model, prompts(), 8, warm) == first
    assert workload.generate(model, prompts()[:2], 8, warm) == first[:2]
    assert workload.generate(model, prompts(), 4, warm) == [row[:4] for row in first]
    assert workload.generate(model, prompts(), 8, Sampling(temperature=1.5, seed=4)) != first
    same = [prompts()[1]] * 2
    assert len({tuple(row) for row in workload.generate(model, same, 8, warm)}) == 2


def drawn(logits: list[float], count: int, **options: Any) -> Tensor:
    """Share of each token among `count` draws."""
    rows = torch.tensor([logits]).expand(count, -1)
    found = choose(rows, Sampling(**{"temperature": 1.0, **options}), [0] * count)
    return found.bincount(minlength=len(logits)) / count


HEIGHTS = 4096


def shares_here(logits: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Tensor:
    """Share of each token, exactly: what is drawn at every one of HEIGHTS equal steps from 0 to 1."""
    monkeypatch.setattr(
        "workloads.model.generate.uniform", lambda seed, prompt, number: (number + 0.5) / HEIGHTS
    )
    drawn = choose(logits.expand(HEIGHTS, -1), Sampling(**options), range(HEIGHTS))
    return drawn.bincount(minlength=len(logits)) / HEIGHTS


def shares_there(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    from transformers.generation import logits_process as theirs

    none, scores = torch.zeros(1, 0, dtype=torch.long), logits.unsqueeze(0)
    steps = [theirs.TemperatureLogitsWarper(temperature)]
    steps += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    steps += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for step in steps:
        scores = step(none, scores)
    return scores.softmax(-1)[0]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [*itertools.product((0.3, 1.0, 1.7), (0, 1, 5, 40), (0.05, 0.5, 0.9, 1.0))],
)
def test_shares_of_tokens_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    logits = torch.randn(30) * 3
    found = shares_here(logits, monkeypatch, temperature=temperature, top_k=top_k, top_p=top_p)
    assert (found - shares_there(logits, temperature, top_k, top_p)).abs().max() <= 1.01 / HEIGHTS


def test_top_k_keeps_k_tokens_though_more_are_as_probable(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps all that tie with the last one."""
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    found = shares_here(logits, monkeypatch, temperature=1.0, top_k=2)
    assert found.nonzero().flatten().tolist() == [0, 1]
    assert shares_there(logits, 1.0, 2, 1.0).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_no_mass_leaves_the_most_probable_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, -1.0]])
    for seed in range(9):
        none = Sampling(temperature=2.0, top_p=0.0, seed=seed)
        assert choose(logits, none, [0, 0]).tolist() == [1, 0]
        shares = (logits.double() / 2).softmax(-1)
        assert answers._drawn(shares, [0.1 * seed, 1.0 - 2**-53], none).tolist() == [1, 0]


def test_tokens_are_drawn_by_their_probability() -> None:
    logits = [0.0, 2.0, 1.0, -1.0]
    assert torch.allclose(drawn(logits, 20_000), torch.tensor(logits).softmax(-1), atol=0.01)
    cool = (torch.tensor(logits) / 0.5).softmax(-1)
    assert torch.allclose(drawn(logits, 20_000, temperature=0.5), cool, atol=0.01)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]), ({"top_k": 2}, [1, 2]), ({"top_k": 9}, [0, 1, 2, 3]), ({"top_p": 0.6}, [1]),
        ({"top_p": 0.7}, [1, 2]), ({"top_p": 1.0}, [0, 1, 2, 3]), ({"top_p": 0.66}, [1, 2]),
        ({"top_k": 3, "top_p": 0.66}, [1]),
    ],
)  # fmt: skip
def test_the_improbable_is_cut_off(options: dict[str, Any], kept: list[int]) -> None:
    """The probabilities are 0.09, 0.64, 0.24, 0.03."""
    assert drawn([0.0, 2.0, 1.0, -1.0], 2_000, **options).nonzero().flatten().tolist() == kept


def test_without_a_temperature_the_most_probable_is_taken() -> None:
    assert choose(torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 2.0]]), GREEDY, [0, 0]).tolist() == [1, 0]
