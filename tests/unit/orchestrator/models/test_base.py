"""Which weights a job begins with, and what is wrong with them, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.models.base import Base, _digest_of, base_json, base_of, base_of_commit, tokenizer_notes
from orchestrator.models.pinned_base import bases_of
from orchestrator.resolve.training_inputs import load_workload
from orchestrator.storage.run_directory import RunDir
from workloads.load import load
from workloads.workload import Vocabulary, Workload

KNOWN = Vocabulary(512, eos=0, pad=1, cls=3, sep=4, mask=5, sentence_end=np.ones(512, bool))
SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}


def job(**workload: Any) -> JobSpec:
    return parse({
        "name": "tuned",
        "workload": {"model": "bert-tiny", "changes": SMALL, "objective": "masked_lm", **workload},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": 24},
        "train": {"steps": 10, "global_batch": 8},
    })  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run directory with commits at 4 and 8 of an encoder."""
    spec = job()
    workload = load("bert-tiny", "masked_lm", KNOWN, changes=SMALL, sequence_length=24)
    store = Store(str(tmp_path / "base" / "checkpoints"))
    for step in (4, 8):
        pieces = [full_piece(f"model.{name}", workload.initial(name, step)) for name in workload.shapes]
        meta = {"position": 0, "receipt": "", "identity": spec.identity()}
        store.publish(step, store.write_shard(step, 0, pieces), meta)
    return str(tmp_path / "base")


def begun(spec: JobSpec) -> Workload:
    base = base_of(spec.workload, spec.needs_base, {}, False)
    return load_workload(
        spec=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        vocabulary=KNOWN,
        data_format=3,
        model=None,
        base=base,
    )


def test_the_weights_are_those_of_the_step(run: str) -> None:
    wanted = load("bert-tiny", "masked_lm", KNOWN, changes=SMALL, sequence_length=24)
    for tag, step in (("", 8), ("@last", 8), ("@4", 4)):
        workload = begun(job(init_from=f"{run}{tag}"))
        assert workload.notes == ()
        assert torch.equal(workload.initial("tokens.weight", 0), wanted.initial("tokens.weight", step))


def test_the_best_commit_is_that_of_the_metric_which_the_run_keeps(run: str) -> None:
    spec = parse({
        **job().model_dump(mode="json"),
        "evaluate": {"every": 4, "sets": {"held": {"sources": [{"uri": "none"}]}}},
        "checkpoint": {"keep_best": "held.loss"},
    })  # fmt: skip
    RunDir(run).write_text("job.yaml", dump(spec))
    store = Store(f"{run}/checkpoints")
    for step, loss in ((12, 1.0), (16, 2.0)):
        meta = {"evaluation": {"held.loss": loss}, "last_evaluation_step": step, "identity": spec.identity()}
        store.publish(step, store.write_shard(step, 0, []), {"position": 0, "receipt": "", **meta})
    base = base_of((asked := job(init_from=f"{run}@best")).workload, asked.needs_base, {}, False)
    assert base is not None
    assert base.step == 12


def test_frozen_weights_that_an_earlier_version_drew_are_not_drawn_otherwise(run: str) -> None:
    store, spec = Store(f"{run}/checkpoints"), job()
    commit = store.manifest(8)
    frozen = spec.model_copy(update={"train": spec.train.model_copy(update={"freeze": ["tokens.*"]})})
    ours = RunDir(f"{run}-of-ours")
    assert bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded={},
        commit=commit,
        run=ours,
    ) == (None, None)  # it has all weights
    for look in (
        lambda given: bases_of(
            workload=frozen.workload,
            reads_base=frozen.reads_base,
            needs_base=frozen.needs_base,
            recorded={},
            commit=given,
            run=ours,
        ),
        lambda given: base_of_commit(frozen.workload, frozen.reads_base, given),
    ):
        with pytest.raises(
            InputError, match=r"train.freeze: the commit at step 8 lacks frozen weights, .*begin"
        ):
            look(commit)
        look(replace(commit, meta={**commit.meta, "tiles": True}))


def test_an_average_in_the_commit_is_what_a_run_begins_with(run: str) -> None:
    spec = parse({**job().model_dump(mode="json"), "checkpoint": {"average": {"ema": 0.9}}})
    model = load("bert-tiny", "masked_lm", KNOWN, changes=SMALL, sequence_length=24)
    store = Store(f"{run}/checkpoints")
    pieces = [full_piece(f"model.{name}", model.initial(name, 12)) for name in model.shapes]
    pieces += [full_piece(f"average.{name}", model.initial(name, 13)) for name in model.shapes]
    meta = {"position": 0, "receipt": "", "identity": spec.identity()}
    store.publish(12, store.write_shard(12, 0, pieces), meta)
    found = begun(job(init_from=run)).initial("tokens.weight", 0)
    assert torch.equal(found, model.initial("tokens.weight", 13))


def test_another_head_begins_anew_and_is_named(run: str) -> None:
    (new,) = begun(job(init_from=run, objective="next_sentence")).notes
    head = "sentence_head"
    named = ", ".join(f"{head}.{part}.{leaf}" for part in ("dense", "output") for leaf in ("weight", "bias"))
    assert new == f"{named} start from random values: {run}@8 has none"


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ({"init_from": "{run}@5"}, r"no commit at 5.*name a step of \[4, 8\]"),
        ({"init_from": "{run}@best"}, "keeps no best commit"),
        ({"init_from": "{run}-not"}, "has no commit, and is not an export"),
        ({"init_from": "{run}", "changes": {**SMALL, "layers": 3}}, "has layers 2, but workload.model 3"),
        ({"init_from": "{run}", "changes": {**SMALL, "hidden": 64}}, "give the model of the base"),
        ({"init_from": "{run}", "changes": {**SMALL, "activation": "relu"}}, "has activation 'gelu', but"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(run: str, workload: dict[str, Any], says: str) -> None:
    asked = {key: value.format(run=run) if key == "init_from" else value for key, value in workload.items()}
    with pytest.raises(InputError, match=says):
        begun(job(**asked))


def test_changed_weights_of_a_folder_are_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    spec = job(model=f"hf:{tmp_path}", changes={})
    before = base_json(base_of(spec.workload, spec.needs_base, {}, False))
    assert before is not None
    assert base_json(base_of(spec.workload, spec.needs_base, before, True)) == before
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="have changed"):
        base_of(spec.workload, spec.needs_base, before, True)
    (tmp_path / "model.safetensors").unlink()
    assert (
        base_json(base_of(spec.workload, spec.needs_base, before, True)) == before
    )  # a commit has all weights, and the configuration
    with pytest.raises(InputError, match="are gone"):
        base_of(spec.workload, spec.needs_base, before, False)


def test_a_run_that_began_beside_a_stale_index_goes_on_unless_it_reads_the_folder_again(
    tmp_path: Path,
) -> None:
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path, max_shard_size="40KB")
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    spec = job(model=f"hf:{tmp_path}", changes={})
    now = base_json(base_of(spec.workload, spec.needs_base, {}, False))
    assert now is not None
    assert base_json(base_of(spec.workload, spec.needs_base, now, True)) == now
    # Earlier versions took the checksum over all files, and read what the index names.
    earlier = now | {"digest": _digest_of(str(tmp_path), stale_too=True)}
    assert earlier != now
    assert base_of(spec.workload, spec.needs_base, earlier, True) is not None
    with pytest.raises(InputError, match="have changed"):
        base_of(
            (asked := job(model=f"hf:{tmp_path}", changes={}, adapter={"kind": "lora", "rank": 2})).workload,
            asked.needs_base,
            earlier,
            True,
        )
    (tmp_path / "model.safetensors.index.json").unlink()
    assert base_json(base_of(spec.workload, spec.needs_base, now, True)) == now


def test_an_export_gives_its_weights_to_a_preset(tmp_path: Path) -> None:
    source = load("bert-tiny", "masked_lm", KNOWN, changes=SMALL, sequence_length=24)
    source.to_hf(lambda name: source.initial(name, 3), str(tmp_path))
    workload = begun(job(init_from=str(tmp_path)))
    for name in workload.shapes:
        assert torch.equal(workload.initial(name, 0), source.initial(name, 3))


def test_a_tokenizer_with_other_tokens_is_told(tmp_path: Path) -> None:
    def known(*words: str, **_: Any) -> Tokenizer:
        return Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))

    known("a", "b", "c").save(str(tmp_path / "tokenizer.json"))
    base = Base(str(tmp_path), None, "")
    assert tokenizer_notes(base, known("a", "b", "c", "d")) == []
    (line,) = tokenizer_notes(base, known("a", "c", "b", "d"))
    assert line.startswith("2 tokens differ in the tokenizer of ")
    assert tokenizer_notes(Base(str(tmp_path), 3, ""), known("a")) == []


# -- deeper models


def deeper(run: str, layers: int, **fields: Any) -> JobSpec:
    return job(init_from=run, grow="stack", **{"changes": {**SMALL, "layers": layers}, **fields})


@pytest.mark.parametrize("layers", [4, 6])
def test_layers_are_copied_on_top_of_themselves(run: str, layers: int) -> None:
    wanted = load("bert-tiny", "masked_lm", KNOWN, changes=SMALL, sequence_length=24)
    grown = begun(deeper(run, layers))
    assert "layers are stacked" in grown.notes[0]
    for name in grown.shapes:
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % 2)
        assert torch.equal(grown.initial(name, 0), wanted.initial(".".join(parts), 8)), name


@pytest.mark.parametrize(
    ("layers", "word"), [(3, "two or more times"), (2, "two or more times"), (1, "two or more")]
)
def test_a_depth_that_is_no_multiple_is_refused(run: str, layers: int, word: str) -> None:
    with pytest.raises(InputError, match=word):
        begun(deeper(run, layers))


def test_a_deeper_model_does_not_begin_with_fewer_layers_by_itself(run: str) -> None:
    with pytest.raises(InputError, match="has layers 2, but"):
        begun(job(init_from=run, changes={**SMALL, "layers": 4}))
    with pytest.raises(InputError, match="has embedding_size 32"):
        begun(deeper(run, 4, changes={**SMALL, "layers": 4, "hidden": 64}))
    with pytest.raises(InputError, match="give init_from"):
        job(grow="stack")


def test_a_distributed_checkpoint_without_its_configuration_says_so(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"has weights of torch\.distributed\.checkpoint and no config\.json"
    ) as told:
        base_of((asked := job(init_from=str(tmp_path))).workload, asked.needs_base, {}, False)
    assert "put the config.json of the model into that folder" in str(told.value)


def test_a_distributed_checkpoint_that_changed_is_noticed(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    config.save_pretrained(tmp_path)
    spec = job(init_from=str(tmp_path))
    dcp.save(
        {"bert.embeddings.word_embeddings.weight": torch.ones(4, 32)}, checkpoint_id=tmp_path, no_dist=True
    )
    begun_with = base_of(spec.workload, spec.needs_base, {}, False)
    dcp.save(
        {"bert.embeddings.word_embeddings.weight": torch.zeros(4, 32)}, checkpoint_id=tmp_path, no_dist=True
    )
    with pytest.raises(InputError, match="have changed"):
        base_of(spec.workload, spec.needs_base, base_json(begun_with) or {}, False)


LABELS, OTHER = ["bad", "fair", "good"], ["good", "bad", "fair"]


def labelled(labels: list[str], objective: str = "sequence_classification", **workload: Any) -> JobSpec:
    found = job(objective=objective, **workload).model_dump(mode="json")
    return parse({**found, "data": {**found["data"], "labels": labels}})


@pytest.fixture
def classifier(tmp_path: Path) -> tuple[str, Workload]:
    """A run directory with a commit of a classifier of LABELS, and its model."""
    spec = labelled(LABELS)
    workload = load(
        "bert-tiny", "sequence_classification", KNOWN, changes=SMALL, sequence_length=24, labels=LABELS
    )
    store = Store(str(tmp_path / "base" / "checkpoints"))
    pieces = [full_piece(f"model.{name}", workload.initial(name, 4)) for name in workload.shapes]
    meta = {"position": 0, "receipt": "", "identity": spec.identity()}
    store.publish(4, store.write_shard(4, 0, pieces), meta)
    return str(tmp_path / "base"), workload


def classified(spec: JobSpec, data_format: int = 6) -> Workload:
    return load_workload(
        spec=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        vocabulary=KNOWN,
        data_format=data_format,
        model=None,
        base=base_of(spec.workload, spec.needs_base, {}, False),
    )


def test_a_run_begins_with_the_head_of_another_by_the_names_of_its_labels(
    classifier: tuple[str, Workload],
) -> None:
    run, theirs = classifier
    wanted, moved = theirs.initial("head.output.weight", 4), classified(labelled(OTHER, init_from=run))
    assert moved.notes == (
        f"the head of {run}@4 predicts bad, fair, good: its rows follow data.labels by name",
    )
    assert torch.equal(moved.initial("head.output.weight", 0), wanted[[2, 0, 1]])
    stored = moved.stored("head.output.weight", 0)
    assert stored is not None
    assert torch.equal(stored[(slice(1, 3), slice(4, 8))], wanted[[0, 1], 4:8])
    assert torch.equal(moved.initial("head.dense.weight", 0), theirs.initial("head.dense.weight", 4))
    assert classified(labelled(LABELS, init_from=run)).notes == ()
    before = classified(labelled(OTHER, init_from=run), 5)
    assert torch.equal(before.initial("head.output.weight", 0), wanted)
    for labels in (
        ["bad", "fair", "fine"],
        ["a", "b", "c"],
        ["bad", "good"],
        ["bad", "fair", "good", "fine"],
    ):
        with pytest.raises(
            InputError,
            match=r"@4 predicts bad, fair, good, and data.labels names (fine|a, b, c|bad, good); name .*order$",
        ):
            classified(labelled(labels, init_from=run))


def test_a_run_begins_with_the_head_of_an_export_by_name(
    classifier: tuple[str, Workload], tmp_path: Path
) -> None:
    _, theirs = classifier
    theirs.to_hf(lambda name: theirs.initial(name, 4), str(tmp_path / "export"))
    moved = classified(labelled(OTHER, init_from=str(tmp_path / "export")))
    wanted = theirs.initial("head.output.weight", 4)[[2, 0, 1]]
    assert torch.equal(moved.initial("head.output.weight", 0), wanted)
    with pytest.raises(InputError, match=r"names fine; .*or rename them in id2label"):
        classified(labelled(["bad", "fair", "fine"], init_from=str(tmp_path / "export")))
    with pytest.raises(
        InputError, match=r"predicts bad, fair, good, and data.labels names bad, good; .*id2label"
    ):
        classified(labelled(["bad", "good"], init_from=str(tmp_path / "export")))


def test_a_preset_whose_decoder_would_begin_otherwise_than_its_base_is_refused(tmp_path: Path) -> None:
    preset = {"model": "bart-tiny", "objective": "seq2seq", "init_from": str(tmp_path)}
    ours = load("bart-tiny", "seq2seq", KNOWN, changes=SMALL, sequence_length=24)
    ours.to_hf(lambda name: ours.initial(name, 0), str(tmp_path))
    assert begun_now(job(**preset)).decoder_start == KNOWN.pad
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.decoder_start_token_id = 5
    config.save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"two tokens: config.json says 5 and generation_config.json says 1; "
    ):
        begun_now(job(**preset))
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "decoder_start_token_id": 5}))
    with pytest.raises(InputError, match=r"begins with token 5, .*set workload.options.start to 5"):
        begun_now(job(**preset))
    assert begun_now(job(**preset, options={"start": 5})).decoder_start == 5
    assert begun(job(**preset)).decoder_start == KNOWN.pad  # a run of an earlier version goes on


def begun_now(spec: JobSpec) -> Workload:
    return load_workload(
        spec=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        vocabulary=KNOWN,
        data_format=6,
        model=None,
        base=base_of(spec.workload, spec.needs_base, {}, False),
    )
