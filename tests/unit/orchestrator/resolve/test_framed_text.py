"""A decoder of others reads a text as its tokenizer frames it: losses, prompts and likelihoods equal transformers'."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hf_tokenizers import DOCUMENTS, with_bos
from jobs import job
from prepared import prepare_here, prepare_sets_here
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.prepare import prepare
from orchestrator.data.store.summary import inspect
from orchestrator.data.store.tokens import Tokens
from orchestrator.resolve import prepared_data
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.prompts import framed
from orchestrator.resolve.training_inputs import TrainingInputs, resolve_over, training_inputs
from orchestrator.storage.run_directory import RunDir
from workloads.inference import with_weights

TEXTS = [" ".join(text.split())[:90] for text in DOCUMENTS[:4]]
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Llama's, with large weights, so that a token before a text matters."""
    made = tmp_path_factory.mktemp("model")
    with_bos(made)
    names = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(names))
    torch.manual_seed(1)
    size = len(PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json")))
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, bos_token_id=size - 11,
        eos_token_id=size - 10,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> SimpleNamespace:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return SimpleNamespace(model=LlamaForCausalLM.from_pretrained(folder).eval(), tokenizer=tokenizer)


def loss_of(theirs: SimpleNamespace, text: str) -> tuple[float, int]:
    """The sum over the tokens of a text and its end, as transformers' tokenizer frames it, and how many they are."""
    ids = torch.tensor([[*theirs.tokenizer(text)["input_ids"], theirs.tokenizer.eos_token_id]])
    assert ids[0, 0] == theirs.tokenizer.bos_token_id
    with torch.inference_mode():
        mean = theirs.model(input_ids=ids, labels=ids).loss.item()
    return mean * (ids.shape[1] - 1), ids.shape[1] - 1


def spec_of(folder: Path, place: Path, **options: Any) -> JobSpec:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (place / "text.jsonl").write_text(lines)
    (place / "more.jsonl").write_text(lines * 3)
    document = job(str(place / "more.jsonl"))
    document["workload"] = {"model": f"hf:{folder}", "objective": "causal_lm", "options": options}
    document["data"] |= {"tokenizer": str(folder), "sequence_length": 256}
    document["evaluate"] = {"every": 5, "sets": {"same": {"sources": [{"uri": str(place / "text.jsonl")}]}}}
    return parse(document)


def inputs_of(spec: JobSpec, place: Path) -> tuple[TrainingInputs, Tokens, PreparedData]:
    cache = str(place / "cache")
    uri = prepare_here(spec, cache)
    data = PreparedData(uri, prepare_sets_here(spec, cache, uri))
    tokens = Tokens.open(uri)
    return training_inputs(spec, tokens, data.sets), tokens, data


def test_held_out_loss_is_that_of_transformers(folder: Path, theirs: SimpleNamespace, tmp_path: Path) -> None:
    """Document by document, and bits per byte are those of the text: what stands before it is not a text."""
    spec = spec_of(folder, tmp_path, documents="isolate")
    inputs, tokens, data = inputs_of(spec, tmp_path)
    workload, held_out = inputs.workload, inputs.sets["same"]
    model = with_weights(workload, lambda name: workload.initial(name, 0))
    with torch.inference_mode():
        parts = [workload.loss(model, held_out.batch([number])) for number in range(held_out.samples)]
    total, count = sum(float(part.total) for part in parts), sum(int(part.count) for part in parts)
    each = [loss_of(theirs, text) for text in TEXTS]
    assert held_out.samples == 1
    assert (total, count) == (pytest.approx(sum(nats for nats, _ in each), rel=1e-5), sum(n for _, n in each))
    assert (held_out.tokens, held_out.bytes) == (count, sum(len(text.encode()) for text in TEXTS))
    assert tokens.manifest.bytes_per_token == held_out.bytes / count
    found = inspect(data.uri)
    assert (found["before_a_text"], "behind_a_text" in found) == ([BEGIN], False)
    assert f"each text begins with {BEGIN}, as its tokenizer frames it" in resolve_over(spec, data)[2]


def test_a_packed_stream_has_each_text_framed_and_predicts_no_frame(folder: Path, tmp_path: Path) -> None:
    inputs, tokens, _ = inputs_of(spec_of(folder, tmp_path), tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    stream = [number for text in TEXTS for number in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    assert tokens.window(0, 0, tokens.length(0)).tolist() == 3 * stream
    labels = inputs.sets["same"].batch([0])["labels"].numpy()
    assert tokenizer.bos_token_id not in labels
    assert (labels != -100).sum() == len(stream) - len(TEXTS)


def test_a_prompt_is_framed_as_training_framed_a_text(folder: Path, tmp_path: Path) -> None:
    inputs, tokens, _ = inputs_of(spec_of(folder, tmp_path), tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for prompt in ("The value", ""):
        row = framed(inputs.workload, tokens.tokenizer(), prompt)
        assert row == tokenizer(prompt)["input_ids"]
        assert framed(inputs.workload, tokens.tokenizer(), BEGIN + prompt) == row


def test_likelihoods_of_tasks_are_those_of_lm_eval_and_a_whole_text_has_no_bos(
    folder: Path, theirs: SimpleNamespace, tmp_path: Path
) -> None:
    """lm-eval 0.4.13 predicts the bos that the tokenizer adds to a whole text from another one, and counts that."""
    from lm_eval.models.huggingface import HFLM

    from orchestrator.evaluate.lm_eval_model import WorkloadLM

    inputs, _, _ = inputs_of(spec_of(folder, tmp_path), tmp_path)
    workload = inputs.workload
    model = with_weights(workload, lambda name: workload.initial(name, 0))
    ours = WorkloadLM(workload, model, theirs.tokenizer, lambda: None)
    other = HFLM(pretrained=theirs.model, tokenizer=theirs.tokenizer, backend="causal", batch_size=1)

    def asked(*arguments: str, **_: Any) -> Any:
        return SimpleNamespace(args=arguments)

    pairs = [asked(text[:40], text[40:60]) for text in TEXTS] + [asked("", TEXTS[0])]
    found, expected = (each.loglikelihood(pairs, disable_tqdm=True) for each in (ours, other))
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-4)
    whole = [asked(text) for text in TEXTS]
    rolled = ours.loglikelihood_rolling(whole)
    for text, total in zip(TEXTS, rolled, strict=True):
        ids = torch.tensor([theirs.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            nats = theirs.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        assert total == pytest.approx(-nats, rel=1e-4)
    begin = theirs.tokenizer.bos_token_id
    with torch.inference_mode():
        logits = theirs.model(input_ids=torch.tensor([[begin, begin]])).logits[0, 0]
    doubled = other.loglikelihood_rolling(whole, disable_tqdm=True)
    assert not np.allclose(rolled, doubled)
    ids = torch.tensor([[begin, *theirs.tokenizer(TEXTS[0])["input_ids"]]])
    with torch.inference_mode():
        theirs_whole = theirs.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert doubled[0] == pytest.approx(-theirs_whole, rel=1e-4)
    assert math.isfinite(float(logits[begin]))


def test_what_was_begun_by_an_earlier_version_is_read_as_then(folder: Path, tmp_path: Path) -> None:
    from functools import partial

    from orchestrator.data import sources
    from orchestrator.data.encoding.framing import UNFRAMED
    from orchestrator.data.prepare.fingerprint import (
        chosen_tokenizer,
        fingerprint,
        format_and_fingerprint,
        given_in,
        no_kind,
    )

    spec = spec_of(folder, tmp_path)
    files = sources.resolve(spec.data.sources)
    choose = partial(chosen_tokenizer, spec.data, ())
    given = partial(given_in, data=spec.data, choose=choose, kind_of=no_kind, framed=True)
    before = fingerprint(files, choose(5), 1000, 5)
    assert format_and_fingerprint(files, given, 1000, before)[::2] == (5, given(5))
    assert given(5).framing == UNFRAMED
    data_format, name, now = format_and_fingerprint(files, given, 1000, "")
    assert (data_format, len(now.framing.before)) == (6, 1)
    assert format_and_fingerprint(files, given, 1000, name)[0] == 6
    assert format_and_fingerprint(files, given, 1000, "", wanted=5)[:2] == (5, before)


@pytest.mark.parametrize(
    ("facts", "is_framed"), [({}, False), ({"data_format": 5}, False), ({"data_format": 6}, True)]
)
def test_an_export_is_evaluated_with_texts_as_its_run_framed_them(
    facts: dict[str, int], is_framed: bool, folder: Path, theirs: SimpleNamespace, tmp_path: Path
) -> None:
    """Exports of versions that framed no text lack the format of their data."""
    from orchestrator.evaluate.lm_eval_model import WorkloadLM
    from orchestrator.evaluate.of_export import format_of_export, spec_of_export
    from orchestrator.evaluate.on_tasks import subject_of_export

    shutil.copytree(folder, tmp_path / "export")
    known = {"objective": "causal_lm", "sequence_length": 256, "global_batch": 4, **facts}
    (tmp_path / "export" / "export.json").write_text(json.dumps({"evaluation": known}))
    subject = subject_of_export(str(tmp_path / "export"))
    begin, end = theirs.tokenizer.bos_token_id, theirs.tokenizer.eos_token_id
    ours = WorkloadLM(subject.workload, subject.model, subject.tokenizer, lambda: None)
    rolled = ours.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in TEXTS])
    for text, total in zip(TEXTS, rolled, strict=True):
        inside = theirs.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[begin if is_framed else end, *inside]])
        with torch.inference_mode():
            nats = theirs.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        assert total == pytest.approx(-nats, rel=1e-4)
    assert ours.tok_encode("The")[:1] == ([begin] if is_framed else ours.tok_encode("The", False)[:1])
    spec, _ = spec_of_export(str(tmp_path / "export"), {"same": "text.jsonl"})
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "prepare", lambda *_, data_format=0, **__: asked.append(data_format) or "made")
        before = PreparedData(format=format_of_export(str(tmp_path / "export")))
        prepared_data.prepared(spec, RunDir(str(tmp_path / "run")), before, lambda *_: None)
    assert asked[0] == (6 if is_framed else 5)


def test_an_end_within_a_text_does_not_divide_it_unseen(folder: Path, tmp_path: Path) -> None:
    """What a chat template has written ends each turn with the token that ends a document."""
    text = f"{BEGIN}user: two?{END}assistant: four.{END}"
    (tmp_path / "talk.jsonl").write_text(json.dumps({"text": text}) + "\n")
    document = spec_of(folder, tmp_path, documents="isolate").model_dump(mode="json")
    document["data"] |= {"sources": [{"uri": str(tmp_path / "talk.jsonl")}], "special_tokens": "parse"}
    document["data"]["sequence_length"] = 8
    document["evaluate"] = None
    spec = parse(document)
    tokens = Tokens.open(prepare_here(spec, str(tmp_path / "cache")))
    assert (tokens.manifest.documents, tokens.manifest.inner_ends) == (1, 1)
    with pytest.raises(
        InputError, match=f"documents by {re.escape(END)}, which also appears 1 times within texts"
    ):
        training_inputs(spec, tokens)
    document["workload"]["options"] = {"documents": "pack"}
    read = training_inputs(parse(document), tokens).text[0].read
    assert read(0)[0] == tokens.vocabulary().before[0]
