"""Answers of a job begin, end and are drawn like those of its base, or the job says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import job as plain_job
from prepared import prepare_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.models.base import base_of
from orchestrator.models.base_text import text_notes, text_of_workload
from orchestrator.models.kept_config import config_json
from orchestrator.resolve.prepared_data import EXCERPT
from orchestrator.resolve.training_inputs import load_workload
from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FolderConfig, folder_config
from workloads.load import load
from workloads.workload import Frame, Vocabulary, Workload

KNOWN = Vocabulary(512, eos=0, pad=1, cls=3, sep=4, mask=5, sentence_end=np.ones(512, bool))
SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
ENGLISH, FRENCH = 20, 21
SETTINGS = "generation_config.json"


def job(**workload: Any) -> JobSpec:
    return parse({
        "name": "tuned",
        "workload": {"model": "bart-tiny", "changes": SMALL, "objective": "seq2seq", **workload},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": 24},
        "train": {"steps": 10, "global_batch": 8},
    })  # fmt: skip


def begun(spec: JobSpec, known: Vocabulary = KNOWN) -> Workload:
    return load_workload(
        spec=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        vocabulary=known,
        data_format=6,
        base=base_of(spec.workload, spec.needs_base, {}, False),
    )


def folder_of(place: Path, model: str = "bart-tiny", objective: str = "seq2seq", **settings: Any) -> str:
    """Export a preset, add these generation settings to the export, and return its folder."""
    ours = load(model, objective, KNOWN, changes=SMALL, sequence_length=24)
    place.mkdir(exist_ok=True)
    ours.to_hf(lambda name: ours.initial(name, 0), str(place))
    config = json.loads((place / "config.json").read_text())
    if "decoder_start_token_id" in settings:
        config["decoder_start_token_id"] = settings["decoder_start_token_id"]
        (place / "config.json").write_text(json.dumps(config))
    found = json.loads((place / SETTINGS).read_text())
    (place / SETTINGS).write_text(json.dumps({**found, **settings}))
    return str(place)


def run_of(place: Path, workload: dict[str, Any], kept: FolderConfig | None = None) -> str:
    """A run directory with a commit of a seq2seq job, and the excerpt of a tokenizer whose padding is 1."""
    rows = place.parent / "rows.jsonl"
    rows.write_text(json.dumps({"source": "a b", "target": "c d"}) + "\n")
    document = plain_job(str(rows))
    document["workload"] = {"model": "bart-tiny", "changes": SMALL, "objective": "seq2seq", **workload}
    document["data"] |= {"sources": [{"uri": str(rows), "field": {"source": "source", "target": "target"}}]}
    spec = parse(document)
    place.mkdir()
    Path(prepare_here(spec, str(place.parent / "cache"))).rename(place / EXCERPT)
    model = load("bart-tiny", "seq2seq", KNOWN, changes=SMALL, sequence_length=24)
    store = Store(str(place / "checkpoints"))
    pieces = [full_piece(f"model.{name}", model.initial(name, 4)) for name in model.shapes]
    meta = {"position": 0, "receipt": "", "identity": spec.identity(), "folder_config": config_json(kept)}
    store.publish(4, store.write_shard(4, 0, pieces), meta)
    return str(place)


def test_settings_of_a_folder_that_a_preset_does_not_apply_are_named(tmp_path: Path) -> None:
    asked = {"no_repeat_ngram_size": 3, "forced_eos_token_id": 0, "eos_token_id": [0, 7], "num_beams": 4}
    folder = folder_of(tmp_path / "folder", **asked)
    (note,) = begun(job(init_from=folder)).notes
    assert note == (
        f"generation settings of {folder} that the job does not apply: no_repeat_ngram_size 3, "
        f"forced_eos_token_id 0, eos_token_id [7]; to apply them, name hf:{folder} in workload.model"
    )
    assert begun(job(init_from=folder_of(tmp_path / "plain"))).notes == ()


def test_a_decoder_of_text_has_the_ends_of_its_base_named(tmp_path: Path) -> None:
    asked = {"model": "gpt-tiny", "objective": "causal_lm"}
    folder = folder_of(tmp_path / "folder", "gpt-tiny", "causal_lm", eos_token_id=[0, 9])
    (note,) = begun(job(**asked, init_from=folder)).notes
    assert "does not apply: eos_token_id [9]; " in note


def test_a_pretrained_model_with_weights_of_another_folder_keeps_its_own_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "folder", decoder_start_token_id=5, no_repeat_ngram_size=3)
    workload = begun(job(model=f"hf:{folder}", changes={}, init_from=folder))
    assert workload.notes == ()
    assert workload.decoder_start == 5
    other = folder_of(tmp_path / "other")
    with pytest.raises(
        InputError, match=r"begins with token 1, but that of the job with 5; set .*start to 1"
    ):
        begun(job(model=f"hf:{folder}", changes={}, init_from=other))


def test_a_preset_lacks_the_language_of_a_target(tmp_path: Path) -> None:
    framed = Frame(((), (0, ENGLISH)), ((), (), (0, ENGLISH)), False)
    known = replace(KNOWN, frame=framed, source_language=ENGLISH)
    folder = folder_of(tmp_path / "folder", forced_bos_token_id=FRENCH)
    with pytest.raises(
        InputError, match=rf"are framed by the tokens \[0, {FRENCH}\], .*name hf:.*workload.model"
    ):
        begun(job(init_from=folder), known)


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (
            {"options": {"start": 5}},
            {},
            r"@4 begins with token 5, but that of the job with 1; set .*start to 5",
        ),
        ({"options": {"start": 5}}, {"options": {"start": 5}}, ""),
        ({"options": {"start": 5}}, {"options": {"start": 1}}, ""),
        ({}, {}, ""),
    ],
)
def test_the_decoder_begins_like_that_of_the_run_it_starts_from(
    theirs: dict[str, Any], ours: dict[str, Any], says: str, tmp_path: Path
) -> None:
    spec = job(**ours, init_from=run_of(tmp_path / "run", theirs))
    if says:
        with pytest.raises(InputError, match=says):
            begun(spec)
    else:
        assert begun(spec).decoder_start == ours.get("options", {}).get("start", 1)


def test_a_run_of_a_folder_passes_on_what_it_has_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "folder", decoder_start_token_id=5, no_repeat_ngram_size=3)
    asked = {"model": f"hf:{folder}", "changes": {}}
    run = run_of(tmp_path / "run", asked, folder_config(folder))
    folder_of(tmp_path / "folder")  # another start, no settings
    with pytest.raises(InputError, match=r"@4 begins with token 5, .*set workload.options.start to 5"):
        begun(job(init_from=run))
    (note,) = begun(job(init_from=run, options={"start": 5})).notes
    assert "does not apply: no_repeat_ngram_size 3; to apply them, give the model of the base" in note


def test_a_run_without_a_commit_is_compared_too() -> None:
    theirs = load("bart-tiny", "seq2seq", KNOWN, changes=SMALL, sequence_length=24, options={"start": 5})
    ours = load("bart-tiny", "seq2seq", KNOWN, changes=SMALL, sequence_length=24)
    with pytest.raises(WorkloadError, match=r"the decoder of stage begins with token 5, .* job with 1"):
        text_notes(ours, job().workload, text_of_workload(theirs, "seq2seq", "stage"))
