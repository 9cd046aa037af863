"""A search whose files became others since its first trials."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text
from prepared import prepare_here, prepare_sets_here
from transformers import LlamaConfig

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.same_inputs import INPUTS, InputsChanged, check_same_inputs
from orchestrator.tune.space import job_of


class Search:
    """A search whose data is prepared here."""

    def __init__(self, place: Path) -> None:
        self.place, self.sweep = place, RunDir(str(place / "sweep"))
        self.sweep.create()
        write_text(place, 20_000)
        (place / "held.txt").write_text((place / "topics.txt").read_text()[:3000])
        LlamaConfig(
            vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ).save_pretrained(place / "base")
        self.document: dict[str, Any] = job(str(place / "topics.txt"))
        self.document["workload"] = {"model": f"hf:{place / 'base'}"}
        self.document["data"]["validation"] = {"sources": [{"uri": str(place / "held.txt")}]}
        self.document["evaluate"] = {"every": 4}
        space = {"train.optimizer.lr": {"choice": [1e-3, 2e-3]}}
        self.document["tune"] = {"space": space, "trials": 2, "metric": "validation.loss"}

    @property
    def spec(self) -> JobSpec:
        """The job as it is now."""
        return parse(self.document)

    def check(self) -> None:
        """What a command does that begins the search, or goes on with it."""
        spec = self.spec
        assert spec.tune is not None
        check_same_inputs(
            self.sweep,
            self.prepared(spec),
            identity=spec.run_identity,
            workload=spec.workload,
            data=spec.data,
            searched=spec.tune.space,
        )

    def trial(self, values: dict[str, Any]) -> None:
        """What a trial with these values does before it trains."""
        spec = job_of(self.spec, values)
        check_same_inputs(
            self.sweep,
            self.prepared(spec),
            identity=spec.run_identity,
            workload=spec.workload,
            data=spec.data,
            values=values,
        )

    def prepared(self, spec: JobSpec) -> PreparedData:
        """The data of a job."""
        cache = str(self.place / "cache")
        uri = prepare_here(spec, cache)
        return PreparedData(uri, prepare_sets_here(spec, cache, uri))


@pytest.fixture
def search(tmp_path: Path) -> Search:
    """A search that has begun."""
    made = Search(tmp_path)
    made.check()
    return made


def test_the_same_files_are_gone_on_with(search: Search) -> None:
    search.check()


def test_text_that_only_moved_is_the_same(search: Search) -> None:
    (search.place / "elsewhere").mkdir()
    for name in ("topics.txt", "held.txt"):
        shutil.move(search.place / name, search.place / "elsewhere" / name)
    search.document["data"]["sources"] = [{"uri": str(search.place / "elsewhere" / "topics.txt")}]
    search.document["data"]["validation"] = {
        "sources": [{"uri": str(search.place / "elsewhere" / "held.txt")}]
    }
    search.check()


@pytest.mark.parametrize(
    ("name", "key"), [("held.txt", "data.validation.sources"), ("topics.txt", "data.sources")]
)
def test_another_text_of_the_same_name_is_refused_by_its_key(search: Search, name: str, key: str) -> None:
    (search.place / name).write_text("noise of another kind " * 400)
    with pytest.raises(InputError) as told:
        search.check()
    assert key in [each.where for each in told.value.each()]
    assert "differs from the text that earlier trials read" in str(told.value)


def test_a_model_folder_that_was_edited_is_refused_by_the_key_in_it(search: Search) -> None:
    path = search.place / "base" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(InputError, match=r"rms_norm_eps is 1e-06 in this run and 0\.5"):
        search.check()
    path.write_text(json.dumps(config))
    search.check()


def test_a_search_of_an_earlier_version_goes_on(search: Search) -> None:
    search.sweep.remove(INPUTS)
    (search.place / "held.txt").write_text("noise of another kind " * 400)
    search.check()


def test_a_set_that_is_new_is_added(search: Search) -> None:
    (search.place / "more.txt").write_text("some more words " * 400)
    search.document["evaluate"]["sets"] = {"more": {"sources": [{"uri": str(search.place / "more.txt")}]}}
    search.check()
    (search.place / "more.txt").write_text("other words than those " * 400)
    with pytest.raises(InputError, match="differs from the text"):
        search.check()


LR = "train.optimizer.lr"
SPECIAL = "data.special_tokens"
MODEL = "workload.model"


def test_a_trial_notices_text_that_was_edited_since_the_one_before(search: Search) -> None:
    search.trial({LR: 1e-3})
    (search.place / "topics.txt").write_text("noise of another kind " * 400)
    with pytest.raises(InputsChanged, match="differs from the text that earlier trials read") as told:
        search.trial({LR: 2e-3})
    assert "data.sources" in [each.where for each in told.value.each()]


def test_trials_whose_text_follows_from_a_key_of_the_search_are_compared_with_each_other(
    search: Search,
) -> None:
    search.document["tune"]["space"] = {SPECIAL: {"choice": ["text", "parse"]}, LR: {"choice": [1e-3, 2e-3]}}
    search.check()
    search.trial({SPECIAL: "parse", LR: 1e-3})
    search.trial({SPECIAL: "text", LR: 1e-3})
    search.trial({SPECIAL: "parse", LR: 2e-3})
    (search.place / "topics.txt").write_text("noise of another kind " * 400)
    with pytest.raises(InputsChanged, match="differs from the text"):
        search.trial({SPECIAL: "parse", LR: 1e-3})


@pytest.mark.parametrize("key", ["workload.dropout", MODEL])
def test_a_key_that_changes_no_text_leaves_texts_compared(search: Search, key: str) -> None:
    values = [0.1, 0.2] if key != MODEL else [search.document["workload"]["model"], "llama-tiny"]
    search.document["tune"]["space"] = {key: {"choice": values}}
    search.check()
    search.trial({key: values[0]})
    (search.place / "held.txt").write_text("noise of another kind " * 400)
    with pytest.raises(InputsChanged, match="differs from the text"):
        search.trial({key: values[1]})


def test_a_search_over_dropout_still_notices_a_folder_that_was_edited(search: Search) -> None:
    """Keys of the workload that do not name the folder leave it compared."""
    search.document["tune"]["space"] = {"workload.dropout": {"choice": [0.0, 0.1]}}
    search.sweep.remove(INPUTS)
    search.check()
    path = search.place / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    with pytest.raises(InputsChanged, match=r"rms_norm_eps is 1e-06 in this run and 0\.5"):
        search.check()
    with pytest.raises(InputsChanged, match=r"rms_norm_eps is 1e-06 in this run and 0\.5"):
        search.trial({"workload.dropout": 0.1})


def test_a_folder_of_a_search_over_models_is_compared_between_its_trials(search: Search) -> None:
    folder = search.document["workload"]["model"]
    search.document["tune"]["space"] = {MODEL: {"choice": [folder, "llama-tiny"]}}
    search.check()
    for model in (folder, "llama-tiny", folder):
        search.trial({MODEL: model})
    path = search.place / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    search.check()
    search.trial({MODEL: "llama-tiny"})
    with pytest.raises(InputsChanged, match=r"rms_norm_eps is 1e-06 in this run and 0\.5"):
        search.trial({MODEL: folder})
