"""A folder without the tokens that the data never uses computes the same for those that are left."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from base_run import document
from hf_tokenizers import bert, gpt2
from jobs import curve, rows, write_job, write_text
from local_chain import drive_chain_here
from local_run import drive_here
from prepared import prepare_here
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from orchestrator.chain import drive
from orchestrator.chain.drive import ChainOutcome
from orchestrator.cli.app import call
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.store.tokens import Tokens
from orchestrator.export import vocabulary
from orchestrator.export.vocabulary import without_unused_tokens
from orchestrator.launch import preparation
from orchestrator.resolve.prepared_data import PreparedData


def save(folder: Path, kind: str) -> None:
    """A small model with random weights, and a real tokenizer."""
    folder.mkdir()
    torch.manual_seed(0)
    if kind == "gpt2":
        gpt2(folder)
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64)).save_pretrained(folder)
        return
    bert(folder)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)


def asked(text: str, folder: Path, kind: str) -> dict[str, Any]:
    objective = "causal_lm" if kind == "gpt2" else "masked_lm"
    found = document(text, model=f"hf:{folder}", changes={}, objective=objective)
    found["data"]["tokenizer"] = str(folder)
    return found


def prepared(cache: Path, spec: JobSpec) -> PreparedData:
    return PreparedData(prepare_here(spec, str(cache)))


def reduced(
    text: str, folder: Path, kind: str, cache: Path, target: Path, at_least: int = 1
) -> tuple[PreparedData, dict[str, Any]]:
    """What the command does, on this machine: the job's data, and what is told of the folder that is made."""
    spec = parse(asked(text, folder, kind))
    data = prepared(cache, spec)
    made = without_unused_tokens(
        spec.workload.model,
        spec.data.tokenizer,
        data,
        str(target),
        lambda made: prepared(cache, parse(asked(text, Path(made), kind))),
        at_least,
    )
    return data, made


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "bert"])
def test_what_is_left_is_the_same_model(tmp_path: Path, kind: str) -> None:
    text = write_text(tmp_path / "text", 20_000)
    save(tmp_path / "large", kind)
    data, made = reduced(text, tmp_path / "large", kind, tmp_path / "cache", tmp_path / "small")
    assert made["tokens"] < 0.2 * made["tokens_before"]
    assert made["parameters"] < 0.2 * made["parameters_before"]
    large, small = (
        Tokenizer.from_file(str(tmp_path / each / "tokenizer.json")) for each in ("large", "small")
    )
    kept = [large.token_to_id(small.id_to_token(number)) for number in range(made["tokens"])]
    numbers = {old: new for new, old in enumerate(kept)}
    words = Tokens.open(data.uri).window(0, 0, 48).astype(np.int64)
    tokens = torch.from_numpy(words)[None]
    renumbered = torch.tensor([[numbers[int(number)] for number in words]])
    load = AutoModelForCausalLM if kind == "gpt2" else AutoModelForMaskedLM
    models = [load.from_pretrained(tmp_path / each).eval() for each in ("large", "small")]
    with torch.no_grad():
        wanted = models[0](tokens).logits[..., kept]
        torch.testing.assert_close(models[1](renumbered).logits, wanted, rtol=1e-5, atol=1e-5)
    assert models[1].config.vocab_size == made["tokens"]
    for name in ("eos_token_id", "pad_token_id"):
        before = getattr(models[0].config, name, None)
        assert getattr(models[1].config, name, None) == (before if before is None else numbers[before])
    phrase = Path(text).read_text()[:300].rpartition(" ")[0]
    ids = [AutoTokenizer.from_pretrained(tmp_path / each)(phrase)["input_ids"] for each in ("large", "small")]
    assert [numbers[number] for number in ids[0]] == ids[1]


@pytest.mark.slow
def test_training_begins_with_the_same_loss(tmp_path: Path) -> None:
    """That of a softmax over fewer tokens is less by what the removed ones had."""
    text = write_text(tmp_path / "text", 20_000)
    save(tmp_path / "large", "gpt2")
    reduced(text, tmp_path / "large", "gpt2", tmp_path / "cache", tmp_path / "small")
    job = asked(text, tmp_path / "small", "gpt2")
    job["train"] |= {"steps": 2}
    drive_here(job, str(tmp_path / "run"), tmp_path / "cache")
    tokens = json.loads((tmp_path / "small" / "config.json").read_text())["vocab_size"]
    assert rows(tmp_path / "run")[0]["loss"] == pytest.approx(np.log(tokens), abs=0.1)


def test_rare_tokens_are_replaced_by_shorter_ones(tmp_path: Path) -> None:
    """Every other token of the texts stays, and no word becomes unknown."""
    text = write_text(tmp_path / "text", 20_000)
    save(tmp_path / "large", "bert")
    data, made = reduced(text, tmp_path / "large", "bert", tmp_path / "cache", tmp_path / "small", 3)
    large, small = (
        Tokenizer.from_file(str(tmp_path / each / "tokenizer.json")) for each in ("large", "small")
    )
    tokens = Tokens.open(data.uri).window(0, 0, made["length_before"]).astype(np.int64)
    counts = {str(large.id_to_token(number)): count for number, count in Counter(tokens.tolist()).items()}
    rare = {token for token, count in counts.items() if count < 3 and len(token.removeprefix("##")) > 1}
    assert rare
    assert not rare & set(small.get_vocab())
    assert {*counts} - rare <= set(small.get_vocab())
    words = Path(text).read_text()
    for each in (large, small):
        each.no_truncation()
    before, after = (each.encode(words).tokens for each in (large, small))
    assert "".join(before).replace("##", "") == "".join(after).replace("##", "")
    assert made["unknown"] == made["unknown_before"]
    assert made["length"] > made["length_before"]


def test_a_tokenizer_that_would_give_other_tokens_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_text(tmp_path / "text", 20_000)
    save(tmp_path / "large", "bert")
    data = prepared(tmp_path / "cache", parse(asked(text, tmp_path / "large", "bert")))
    whole = vocabulary._token_counts
    names = Tokenizer.from_file(str(tmp_path / "large" / "tokenizer.json")).id_to_token
    longest = max(whole(data.uri), key=lambda number: len(str(names(number))))  # nothing merges with it
    without = {number: count for number, count in whole(data.uri).items() if number != longest}
    monkeypatch.setattr(vocabulary, "_token_counts", lambda uri: Counter(without))
    with pytest.raises(InputError, match="some texts would have other tokens"):
        reduced(text, tmp_path / "large", "bert", tmp_path / "cache", tmp_path / "small")
    assert not (tmp_path / "small").exists()
    assert not list(tmp_path.glob(".small*"))


def test_the_command_makes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray prepares the data of a command; here this process does."""
    text = write_text(tmp_path / "text", 20_000)
    save(tmp_path / "large", "bert")
    monkeypatch.setattr(
        preparation, "prepared_with_progress", lambda spec, *_: prepared(tmp_path / "cache", spec)
    )
    path = write_job(tmp_path, asked(text, tmp_path / "large", "bert"))
    target = tmp_path / "small"
    with pytest.raises(SystemExit) as ended:
        call(["data", "vocabulary", str(path), str(target), "--json"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    told = json.loads(said[said.index("{\n") :])  # after what a library says in a process that trains too
    assert told["tokens"] == Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab_size()
    with pytest.raises(SystemExit) as ended:
        call(["data", "vocabulary", str(path), str(target)])
    assert ended.value.code == 2
    assert "not empty" in capsys.readouterr().err


def test_another_tokenizer_than_the_models_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "large", "bert")
    for other in ({"train_bpe": 512}, str(tmp_path)):
        with pytest.raises(InputError, match="the tokenizer is not the model's"):
            without_unused_tokens(
                f"hf:{tmp_path / 'large'}", other, PreparedData(""), str(tmp_path / "small"), PreparedData
            )


def chained(text: str, folder: Path, at_least: int = 1) -> dict[str, Any]:
    """A chain: a pretrained model loses tokens, and a smaller one begins as a part of what is left."""
    found = asked(text, folder, "bert")
    found["train"] |= {"steps": 2}
    found["checkpoint"] = {"every": 2, "export": None}
    student = {
        "name": "student",
        "workload": {"model": "stage:words", "changes": {"layers": 1}, "shrink": {"layers": [1]}},
        "data": {"tokenizer": "stage:words"},
        "distill": {"teacher": "stage:words", "labels": 0.5, "logits": {"weight": 0.5}},
    }
    words = {"name": "words", "vocabulary": {"of": str(folder), "at_least": at_least}}
    return found | {"name": "c", "stages": [student, words]}


def drive_stages(
    wanted: dict[str, Any], root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> ChainOutcome:
    monkeypatch.setattr(drive, "prepared", lambda spec, *_, **__: prepared(cache, spec))
    return drive_chain_here(wanted, root, cache, monkeypatch)


@pytest.mark.slow
def test_a_stage_makes_the_folder_and_the_next_one_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, cache, root = write_text(tmp_path / "text", 20_000), tmp_path / "cache", tmp_path / "c"
    save(tmp_path / "large", "bert")
    reduced(text, tmp_path / "large", "bert", cache, tmp_path / "small")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "_write_tokenizer", killed)
        ended = drive_stages(chained(text, tmp_path / "large"), root, cache, monkeypatch)
    assert (ended.outcome, "still to come: words, student" in ended.line) == (Outcome.FAILED, True)
    assert not (root / "words" / "export").exists()
    ended = drive_stages(chained(text, tmp_path / "large"), root, cache, monkeypatch)
    assert (ended.outcome, ended.line) == (Outcome.DONE, "")
    made = root / "words" / "export"
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (made / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
    first = ended.summary["stages"][0]
    tokens = json.loads((made / "config.json").read_text())["vocab_size"]
    assert (first["stage"], first["state"]) == ("words", "done")
    assert first["reason"].startswith(f"{tokens} of ")
    assert ended.summary["stages"][1]["begins_with"] == {"stage": "words", "tag": "export", "step": None}
    alone = chained(text, tmp_path / "large")["stages"][0]
    job = asked(text, tmp_path / "small", "bert")
    job["workload"] |= alone["workload"] | {"model": f"hf:{tmp_path / 'small'}"}
    job |= {"distill": alone["distill"] | {"teacher": f"hf:{tmp_path / 'small'}"}}
    job["train"] |= {"steps": 2}
    drive_here(job, str(tmp_path / "run"), cache)
    assert curve(root / "student") == curve(tmp_path / "run")
    # What has changed is refused, and what is done is not made again.
    before = (made / "export.json").stat().st_mtime_ns
    assert drive_stages(chained(text, tmp_path / "large"), root, cache, monkeypatch).outcome == Outcome.DONE
    assert (made / "export.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match=r"stages.words: .*at_least is 1 in this stage and 2 in the job"):
        drive_stages(chained(text, tmp_path / "large", 2), root, cache, monkeypatch)
    (root / "words").rename(tmp_path / "words")
    with pytest.raises(InputError, match="began with the model of words, which is not made"):
        drive_stages(chained(text, tmp_path / "large"), root, cache, monkeypatch)
    (tmp_path / "words").rename(root / "words")
    config = tmp_path / "large" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(InputError, match=r"stages.words: .*the model that it was made of has changed"):
        drive_stages(chained(text, tmp_path / "large"), root, cache, monkeypatch)
    shutil.rmtree(tmp_path / "large")  # to save space
    assert drive_stages(chained(text, tmp_path / "large"), root, cache, monkeypatch).outcome == Outcome.DONE
