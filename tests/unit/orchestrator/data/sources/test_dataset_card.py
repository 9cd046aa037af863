"""Cards beside data: which label each number is, of which configuration, and that this is part of what data is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.prepare import fingerprint
from orchestrator.data.sources.identity import part_key

FIELD = {"text": "text", "label": "label"}


def named(*names: str, config: str = "") -> dict[str, Any]:
    label = {"class_label": {"names": {str(number): name for number, name in enumerate(names)}}}
    features = [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": label}]
    return {"features": features} | ({"config_name": config} if config else {})


def card(folder: Path, info: Any, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(
        f"---\n{yaml.safe_dump({'dataset_info': info, **more})}---\n# A dataset\n"
    )


def row_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": "a", "label": 0}) + "\n")
    return path


def labels_of(uri: Path | str, field: Any = FIELD) -> list[dict[str, list[str]]]:
    return [file.labels for file in sources.resolve([Source(uri=str(uri), field=field)])]


def test_the_nearest_card_that_describes_a_dataset_names_labels(tmp_path: Path) -> None:
    file = row_file(tmp_path / "a" / "b" / "c" / "rows.jsonl")
    assert labels_of(file) == [{}]
    card(tmp_path / "a", named("bad", "good"))
    assert labels_of(file) == [{"label": ["bad", "good"]}]
    (tmp_path / "a" / "b" / "README.md").write_text("# Nothing about dataset_info\n")
    assert labels_of(file) == [{"label": ["bad", "good"]}]
    card(tmp_path / "a" / "b", named("no", "yes"))
    assert labels_of(file) == [{"label": ["no", "yes"]}]
    assert labels_of(file, "text") == [{}]  # no column of labels
    assert labels_of(file, {"text": "text", "label": "text"}) == [{}]


def test_more_than_ten_names_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"name {number}" for number in range(12)]
    card(tmp_path, named(*names))
    assert labels_of(row_file(tmp_path / "rows.jsonl")) == [{"label": names}]


@pytest.mark.parametrize(
    "data_files",
    [
        "en/*.jsonl",
        ["en/*.jsonl"],
        [{"split": "train", "path": "en/*.jsonl"}],
        {"train": ["**/en/*.jsonl", "en/*"]},
    ],
)
def test_a_file_has_the_names_of_its_configuration(data_files: Any, tmp_path: Path) -> None:
    infos = [named("bad", "good", config="en"), named("gut", "schlecht", config="de")]
    english, german = (row_file(tmp_path / lang / "rows.jsonl") for lang in ("en", "de"))
    card(tmp_path, infos)
    says = r"README.md: names the labels of 'label' differently in its configurations en, de; add"
    with pytest.raises(InputError, match=says):
        labels_of(english)
    others = {"config_name": "de", "data_files": "de/*"}
    card(tmp_path, infos, configs=[{"config_name": "en", "data_files": data_files}, others])
    assert labels_of(english) == [{"label": ["bad", "good"]}]
    assert labels_of(german) == [{"label": ["gut", "schlecht"]}]
    card(tmp_path, [named("bad", "good", config="en"), named("bad", "good", config="de")])
    assert labels_of(german) == [{"label": ["bad", "good"]}]


def test_a_card_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = row_file(tmp_path / "rows.jsonl")
    (tmp_path / "README.md").write_text("---\ndataset_info: [\n---\n")
    with pytest.raises(InputError, match=r"README.md: has a dataset_info that is not YAML; fix it"):
        labels_of(file)


def test_on_a_store(tmp_path: Path) -> None:
    row_file(tmp_path / "hub" / "data" / "rows.jsonl")
    card(tmp_path / "hub", named("bad", "good"))
    fs = fsspec.filesystem("memory")
    fs.put(str(tmp_path / "hub"), "/hub", recursive=True)
    try:
        assert labels_of("memory://hub/data/rows.jsonl") == [{"label": ["bad", "good"]}]
    finally:
        fs.rm("/hub", recursive=True)


def test_names_are_part_of_what_data_is(tmp_path: Path) -> None:
    file = row_file(tmp_path / "rows.jsonl")
    found = []
    for names in (("bad", "good"), ("good", "bad"), ()):
        card(tmp_path, named(*names))
        files = sources.resolve([Source(uri=str(file), field=FIELD)])
        part = sources.cut(files, 2**20)[0]
        assert sources.from_json(sources.to_json(part))[0].file.labels == files[0].labels
        new, old = (fingerprint.fingerprint(files, ["x", {}], 300, each) for each in (6, 5))
        found.append((part_key(part), new, old))
    keys, new, old = zip(*found, strict=True)
    assert len({*keys}) == len({*new}) == 3
    assert len({*old}) == 1
