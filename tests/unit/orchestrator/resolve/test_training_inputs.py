"""What a run trains on and evaluates, over data that is prepared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import job
from letters import letters, write_tokenizer
from prepared import prepare_here, prepare_sets_here

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.store.tokens import Tokens
from orchestrator.launch.planned_job import planned_on_paper
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.row_lengths import lengths_of
from orchestrator.resolve.training_inputs import resolve_over, training_inputs
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.step_samples import StepPlan, StepReader
from orchestrator.train.training_progress import TrainingProgress

TEXTS = [" ".join(f"{number * number + i}" for i in range(40)) for number in range(80)]
BREAK = "\n<|endoftext|>\n"


def spec_of(folder: Path, share: float | None, **evaluate: Any) -> JobSpec:
    """A job over TEXTS."""
    (folder / "text.txt").write_text(BREAK.join(TEXTS))
    document = job(str(folder / "text.txt"))
    if share:
        document["data"]["validation"] = {"share": share}
    if evaluate:
        document["evaluate"] = evaluate
    return parse(document)


@pytest.fixture
def data(tmp_path: Path) -> Tokens:
    """TEXTS, prepared."""
    return Tokens.open(prepare_here(spec_of(tmp_path, None), str(tmp_path / "cache")))


def test_a_share_prepares_nothing_anew(tmp_path: Path, data: Tokens) -> None:
    for share in (0.1, 0.4):
        assert prepare_here(spec_of(tmp_path, share), str(tmp_path / "cache")) == data.folder.uri


def test_without_a_share_all_is_trained_on(tmp_path: Path, data: Tokens) -> None:
    inputs = training_inputs(spec_of(tmp_path, None), data)
    assert inputs.batches.read.streams is data
    assert inputs.sets == {}


def test_what_is_held_out_is_not_trained_on(tmp_path: Path, data: Tokens) -> None:
    spec = spec_of(tmp_path, 0.2, every=5)
    inputs = training_inputs(spec, data)
    assert list(inputs.sets) == spec.set_names == ["validation"]
    found = inputs.sets["validation"]
    read = inputs.batches.read.streams
    assert read.length(0) + found.tokens == data.length(0)
    batch = found.batch(range(found.samples))
    assert int((batch["labels"] != -100).sum()) == found.tokens - 1
    trained = data.tokenizer().decode(read.window(0, 0, read.length(0)).tolist(), skip_special_tokens=False)
    held_out = [text for text in TEXTS if text not in trained]
    assert len(held_out) == found.documents
    assert sum(map(len, held_out)) == found.bytes
    # the order of samples is over what is trained on
    position = inputs.batches.order.epoch_size
    ids = [inputs.batches.order.at(np.arange(position))[1]]
    assert sorted(np.concatenate(ids).tolist()) == list(range(len(inputs.batches.read)))


def test_a_share_is_held_out_without_an_evaluation_too(tmp_path: Path, data: Tokens) -> None:
    inputs = training_inputs(spec_of(tmp_path, 0.2), data)
    assert inputs.sets == {}
    assert inputs.batches.read.streams.length(0) < data.length(0)


def test_sets_of_their_own_text_are_in_the_order_of_the_job(tmp_path: Path, data: Tokens) -> None:
    for name, texts in (("wiki", TEXTS[:10]), ("code", ["print(1)", "print(2)"])):
        (tmp_path / f"{name}.txt").write_text(BREAK.join(texts))
    sets = {name: {"sources": [{"uri": str(tmp_path / f"{name}.txt")}]} for name in ("wiki", "code")}
    spec = spec_of(tmp_path, 0.2, sets=sets)
    uris = prepare_sets_here(spec, str(tmp_path / "cache"), data.folder.uri)
    inputs = training_inputs(spec, data, dict(reversed(uris.items())))
    assert list(inputs.sets) == spec.set_names == ["validation", "wiki", "code"]
    assert (inputs.sets["wiki"].documents, inputs.sets["code"].documents) == (10, 2)
    assert inputs.sets["code"].bytes == len("print(1)print(2)")
    without = training_inputs(spec, data)
    assert list(without.sets) == ["validation"]  # as a replay has it, which evaluates nothing
    assert torch.equal(without.batches.batch(0, 8)[0]["tokens"], inputs.batches.batch(0, 8)[0]["tokens"])
    found = inputs.sets["validation"].read.streams
    held_out = data.tokenizer().decode(found.window(0, 0, found.length(0)).tolist())
    trained = sum(text not in held_out for text in TEXTS[:10])
    job_, digest, notes = resolve_over(spec, PreparedData(data.folder.uri, uris))
    assert job_.shape.row_tokens == ((1, float(spec.data.sequence_length)),)
    without_lengths = replace(job_, shape=replace(job_.shape, row_tokens=()))
    assert (without_lengths, digest) == (inputs.job, data.manifest.digest)
    assert notes == [f"{trained} of the 10 documents of the set wiki are also in the training text"]


def test_an_empty_split_is_told(tmp_path: Path, data: Tokens) -> None:
    with pytest.raises(
        InputError, match=r"data.validation.share: 1e-06 holds out none of 80 documents; make it at"
    ):
        training_inputs(spec_of(tmp_path, 1e-6), data)


def test_a_source_that_is_held_out_whole_is_told(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 0.999, every=5)
    data = Tokens.open(prepare_here(spec, str(tmp_path / "cache")))
    with pytest.raises(InputError, match=r"data\.(sources\.0|validation\.share): "):
        training_inputs(spec, data)


def test_conversations_that_are_cut_are_counted_one_by_one_and_some_answer_is_left(tmp_path: Path) -> None:
    """As many as fit stand in one sample; where no answer fits, a run would learn nothing."""
    place, template = (
        tmp_path / "tokenizer",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
    )
    place.mkdir()
    (place / "tokenizer.json").write_text(train_bytes(TEXTS, 300, ["<|endoftext|>"]))
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (place / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def notes(short: int, long: int) -> list[str]:
        said = ["1"] * short + ["1 " * 300] * long
        rows = [[{"role": "user", "content": ask}, {"role": "assistant", "content": "2"}] for ask in said]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"m": row}) + "\n" for row in rows))
        document = job("")
        source = {"uri": str(tmp_path / "a.jsonl"), "field": {"messages": "m"}}
        document["data"] = {"sources": [source], "tokenizer": str(place), "sequence_length": 256}
        document["workload"]["objective"] = "conversation"
        spec = parse(document)
        return resolve_over(spec, PreparedData(prepare_here(spec, str(tmp_path / "cache"))))[2]

    cut = "2 of 42 records are longer than 256 tokens and are cut; 2 of them keep nothing that is predicted"
    assert notes(40, 2) == [cut]
    with pytest.raises(
        InputError, match=r"data\.sequence_length: all records are longer than 256 tokens, and cutting"
    ):
        notes(0, 12)


@pytest.mark.parametrize("objective", ["sequence_classification", "conversation"])
def test_rows_are_planned_as_long_as_training_reads_them(tmp_path: Path, objective: str) -> None:
    """As soon as the data is prepared; a plan without it says that it takes full rows."""
    write_tokenizer(tmp_path)
    rows = [{"text": letters(n), "label": "ab"[n % 2], "reply": letters(n + 3)} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labelled = objective == "sequence_classification"
    field = {"text": "text", "label": "label"} if labelled else {"prompt": "text", "completion": "reply"}
    model, options = ("bert-tiny", {}) if labelled else ("llama-tiny", {"pack": "no"})
    document: dict[str, Any] = {
        "name": "rows",
        "workload": {"model": model, "objective": objective, "options": options},
        "data": {
            "sources": [{"uri": str(tmp_path / "rows.jsonl"), "field": field}],
            "tokenizer": str(tmp_path),
            "labels": ["a", "b"] if labelled else [],
            "sequence_length": 128,
        },
        "train": {"steps": 4, "global_batch": 16},
        "parallel": {"micro_batch": 4},
        "checkpoint": {"export": None},
    }
    spec, run = parse(document), RunDir(str(tmp_path / "runs" / "rows"))
    unknown = planned_on_paper(spec, "cpu-core", trace=False, run=run)
    (assumed,) = unknown.assumed
    assert assumed.startswith("every row has 128 tokens")

    data = PreparedData(prepare_here(spec, str(tmp_path / "runs" / "_data")))
    found = dict(resolve_over(spec, data)[0].shape.row_tokens)
    inputs = training_inputs(spec, Tokens.open(data.uri))
    plan = StepPlan(spec.seed, spec.train, spec.reading, sequence_length=128, draws=False)
    for micro_batch in (1, 4, 16):
        layout = Layout(micro_batch=micro_batch)
        lengths = lengths_of(inputs.workload, layout, spec.train, on_gpu=False, packed=False)
        new = TrainingProgress.for_new_run(())
        reader = StepReader(plan, layout, 0, inputs.batches, new, lengths=lengths)
        share = float(np.mean([reader(step).share for step in range(4)]))
        assert found[micro_batch] == pytest.approx(share * 128)
    assert found[1] < found[4] < found[16] < 40

    known = planned_on_paper(spec, "cpu-core", trace=False, run=run)
    assert (known.assumed, known.plan.row_tokens) == ((), found[4])
    assert known.step_seconds < 0.5 * unknown.step_seconds
    assert known.plan.chosen.memory == unknown.plan.chosen.memory
    assert known.to_json()["predicted"]["row_tokens"] == round(found[4], 1)
