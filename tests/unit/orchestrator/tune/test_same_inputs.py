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
from orchestrator.tune.same_inputs import INPUTS, check_same_inputs


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
        cache = str(self.place / "cache")
        uri = prepare_here(self.spec, cache)
        check_same_inputs(self.spec, self.sweep, PreparedData(uri, prepare_sets_here(self.spec, cache, uri)))


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
    assert "is not the text that this search has read so far" in str(told.value)


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
    with pytest.raises(InputError, match="is not the text"):
        search.check()
