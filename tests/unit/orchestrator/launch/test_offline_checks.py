"""A job is planned for machines that are not here without its text, and where its tokenizer is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch.offline_checks import check_on_paper
from workloads.model.presets import PRESETS


def job(model: str = "gpt2", **data: Any) -> JobSpec:
    document = {
        "name": "paper",
        "workload": {"model": model},
        "data": {
            "sources": [{"uri": "nowhere/*.txt"}],
            "tokenizer": "nowhere",
            "sequence_length": 64,
            **data,
        },
        "train": {"steps": 10, "global_batch": 8},
    }
    return parse(document)


def test_a_missing_tokenizer_is_taken_to_have_the_tokens_of_the_model() -> None:
    found, assumed = check_on_paper(job())
    assert found.shape.vocabulary == PRESETS["gpt2"].vocab_size
    assert assumed == ["the tokenizer nowhere is not here, and taken to have the 50,257 tokens of gpt2"]
    more, _ = check_on_paper(job(add_tokens=["<a>", "<b>"]))
    assert more.shape.vocabulary == PRESETS["gpt2"].vocab_size + 2


def test_what_the_job_says_of_its_tokenizer_is_not_assumed() -> None:
    found, assumed = check_on_paper(job(tokenizer={"train_bpe": 512}))
    assert (found.shape.vocabulary, assumed) == (512, [])


def test_a_tokenizer_that_is_there_and_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
        check_on_paper(job(tokenizer=str(tmp_path)))


def test_an_own_model_needs_to_be_told_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\n\n\nclass Model(nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="train_bpe: N"):
        check_on_paper(job("mine:Model"))


def test_what_is_wrong_wherever_it_runs_is_told_together() -> None:
    spec = job("bert-base", labels=["a", "b"])
    with pytest.raises(InputError) as refused:
        check_on_paper(spec)
    told = [str(each) for each in refused.value.each()]
    assert len(told) == 2
    assert any("does not train bert-base" in line for line in told)
    assert any("predicts no labels" in line for line in told)
