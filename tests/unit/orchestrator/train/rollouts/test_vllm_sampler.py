"""Answers from vLLM. It cannot run here without a GPU, so that a package of its interface stands in its place, see
`tests/fixtures/vllm_stub.py`; `tests/gpu/test_vllm.py` is for the real one."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from letters import write_tokenizer
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.parallel.device import Device
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.engine_check import check_engine
from orchestrator.train.rollouts.sampler import Unit
from orchestrator.train.rollouts.vllm_sampler import MissingLogProbability, VllmSampler, answer_seed
from workloads.errors import LogitsNotFinite, WorkloadError
from workloads.load import load
from workloads.workload import Vocabulary

STUB = Path(__file__).parents[4] / "fixtures" / "vllm_stub.py"
ASKED = RolloutSpec(group=2, max_tokens=6, temperature=0.7, workers=1, engine="vllm")  # type: ignore[arg-type]
UNIT = Unit([[6, 7, 8], [9, 10]], [[4, 5], [6, 7]])
END = 5


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package in vLLM's place."""
    (tmp_path / "path" / "vllm").mkdir(parents=True)
    shutil.copy(STUB, tmp_path / "path" / "vllm" / "__init__.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path"), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")  # and it is as before afterwards
    yield importlib.import_module("vllm")
    sys.modules.pop("vllm", None)


def workload_of(model: str = "qwen3-tiny") -> Any:
    return load(
        model,
        "grpo",
        vocabulary=Vocabulary(25, eos=END, pad=0),
        sequence_length=24,
        changes={"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64},
    )


@pytest.fixture
def sampler(stub: Any, tmp_path: Path) -> Callable[..., VllmSampler]:
    def made(workload: Any, asked: RolloutSpec = ASKED) -> VllmSampler:
        none: Any = None
        write_tokenizer(tmp_path, template=False)
        found = VllmSampler(
            workload,
            Device(torch.device("cpu"), torch.float32, none),
            seed=3,
            spec=asked,
            ends=[END],
            sequence_length=24,
            tokenizer=Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        )
        fill(found, 0.0)
        return found

    return made


@torch.no_grad()
def fill(sampler: VllmSampler, added: float) -> None:
    """Give it weights, as a rollout worker does."""
    draws = torch.Generator().manual_seed(1)
    for tensor in sampler.replica._tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=draws) * 0.3 + added)
    sampler.use_replica()


def log_probabilities(sampler: VllmSampler, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Those of the project's own model, at the temperature of ASKED."""
    whole = torch.tensor([[*prompt, *answer]])
    batch = {
        "tokens": whole,
        "positions": torch.arange(whole.shape[1])[None],
        "padding": torch.ones_like(whole) > 0,
    }
    logits = sampler.replica.model(batch).logits[0, len(prompt) - 1 : -1]
    return (logits / ASKED.temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("model", ["qwen3-tiny", "gpt-tiny"])
def test_weights_reach_it_by_name_and_its_log_probabilities_are_the_trainer_s(
    model: str, stub: Any, sampler: Callable[..., VllmSampler]
) -> None:
    workload = workload_of(model)
    made = sampler(workload)
    assert [call[0] for call in stub.CALLS] == ["LLM", "reload_weights", "reset_prefix_cache"]
    assert stub.CALLS[0] == ("LLM", "float32", 24)
    assert set(stub.CALLS[1][1]) == set(workload.hf_tensors())
    before = made.answers_of(UNIT)
    assert made.answers_of(UNIT) == before  # NaN is the same object in both
    fill(made, 0.1)
    after = made.answers_of(UNIT)
    assert [each.log_probabilities for each in after[0]] != [each.log_probabilities for each in before[0]]
    assert [call[0] for call in stub.CALLS[-3:]] == ["reload_weights", "reset_prefix_cache", "generate"]
    assert stub.CALLS[-1][1] == [answer_seed(3, number) for number in (4, 5, 6, 7)]
    for prompt, drawn in zip(UNIT.prompts, after, strict=True):
        for answer in drawn:
            assert math.isnan(answer.entropy)
            assert answer.ended == (answer.tokens[-1] == END)
            own = log_probabilities(made, prompt, answer.tokens)
            torch.testing.assert_close(torch.tensor(answer.log_probabilities), own, atol=1e-5, rtol=0)


def test_the_most_likely_answer_depends_on_no_seed(stub: Any, sampler: Callable[..., VllmSampler]) -> None:
    made = sampler(workload_of())
    greedy = made.answers_of(UNIT._replace(is_greedy=True))
    assert greedy[0][0].tokens == greedy[0][1].tokens
    own = log_probabilities(made, UNIT.prompts[0], greedy[0][0].tokens)
    assert len(own) == len(greedy[0][0].tokens)


@pytest.mark.parametrize(
    ("missing", "told"),
    [("one", "no log-probability of token 1"), ("shorter", "returned 5 log-probabilities for 6 tokens")],
)
def test_a_missing_log_probability_is_refused(
    missing: str, told: str, sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for in NeMo-RL#4218, where it counted as 0.0."""
    made = sampler(workload_of())
    made._ends = []
    monkeypatch.setenv("VLLM_STUB_MISSING", missing)
    with pytest.raises(MissingLogProbability, match=told):
        made.answers_of(UNIT)


def test_the_log_probability_of_the_drawn_token_is_taken_from_among_others(
    sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for in NeMo-RL#3297, where that of the first candidate counted."""
    made = sampler(workload_of())
    alone = made.answers_of(UNIT)
    monkeypatch.setenv("VLLM_STUB_OTHERS", "1")
    assert made.answers_of(UNIT) == alone
    likely = made.answers_of(UNIT._replace(is_greedy=True))
    assert likely[0][0].tokens != alone[0][0].tokens, "the first candidate is the drawn one"


def test_a_log_probability_that_is_not_finite_is_a_fault_of_the_weights(
    sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sampler(workload_of())
    monkeypatch.setenv("VLLM_STUB_SHIFT", "nan")
    with pytest.raises(LogitsNotFinite):
        made.answers_of(UNIT)


def test_seeds_of_answers_differ_and_are_valid() -> None:
    seeds = {answer_seed(seed, number) for seed in (0, 1, 17) for number in range(200)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_it_is_refused_without_a_gpu_or_the_package_and_for_models_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("orchestrator.train.rollouts.engine_check.find_spec", lambda name: None)
    plain, with_gpu = ResourceSpec(), ResourceSpec.model_validate({"per_worker": {"gpu": 1}})
    check_engine(RolloutSpec(), plain, None)
    with pytest.raises(InputError, match="vllm needs a GPU, and each worker of this job has none"):
        check_engine(ASKED, plain, None)
    with pytest.raises(InputError, match="vllm is not installed"):
        check_engine(ASKED, with_gpu, None)
    monkeypatch.setattr("orchestrator.train.rollouts.engine_check.find_spec", lambda name: True)
    check_engine(ASKED, with_gpu, workload_of())

    class Unknown:
        config = workload_of().config

        def check_hf(self) -> None:
            raise WorkloadError("transformers has no such class")

    with pytest.raises(InputError, match="no such class"):
        check_engine(ASKED, with_gpu, Unknown())
    own = SimpleNamespace(config=SimpleNamespace(as_transformer=None))
    with pytest.raises(InputError, match="vllm generates with this project's models only"):
        check_engine(ASKED, with_gpu, own)
