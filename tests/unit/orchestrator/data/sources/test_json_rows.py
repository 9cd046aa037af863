"""Files of JSON that are one list of objects: the objects that the library json reads, wherever blocks end."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from raw_files import read

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources import lines
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.sources.rows import rows

OBJECTS = [
    {"text": f'été {n} "]}}, [" \\ 😀' * (n % 4 + 1), "more": [{"a": [n, None, 1.5e3]}, "\n"]}
    for n in range(60)
]


@pytest.fixture(params=[3, 64, 2**20])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lines, "BLOCK", request.param)
    return int(request.param)


@pytest.mark.parametrize("indent", [None, 2, "\t"])
@pytest.mark.parametrize("ascii_alone", [True, False])
def test_a_list_has_the_rows_of_its_objects(
    indent: Any, ascii_alone: bool, block: int, tmp_path: Path
) -> None:
    whole = json.dumps(OBJECTS, indent=indent, ensure_ascii=ascii_alone)
    for name, data in {
        "a.json": whole.encode(),
        "b.json": b"\xef\xbb\xbf " + whole.encode() + b"\r\n \n",
        "e.json": b"\n \n " + whole.encode(),
        "c.json.gz": gzip.compress(whole.encode()),
        "d.jsonl": whole.encode(),
    }.items():
        (tmp_path / name).write_bytes(data)
        plain = gzip.decompress(data) if name.endswith("gz") else data
        for on_error in ("fail", "skip", "repair"):
            (part,) = sources.cut(
                sources.resolve([Source(uri=str(tmp_path / name))], on_error=on_error), 2**26
            )
            rejected = Rejected()
            found = list(rows(sources.from_json(sources.to_json(part, 100))[0], rejected))
            assert [row.values for row in found] == OBJECTS
            assert [json.JSONDecoder().raw_decode(plain[row.at :].decode())[0] for row in found] == OBJECTS
            assert rejected.to_json() == []


def test_a_list_is_read_by_one_task_and_lines_by_several(tmp_path: Path) -> None:
    texts = [each["text"] for each in OBJECTS]
    (tmp_path / "a.json").write_text("\n\n" + json.dumps(OBJECTS, indent=1))
    (tmp_path / "b.json").write_text("".join(json.dumps(each) + "\n" for each in OBJECTS))
    parts = {}
    for name in ("a.json", "b.json"):
        assert read(tmp_path / name, part_bytes=500) == texts
        files = sources.resolve([Source(uri=str(tmp_path / name))])
        parts[name] = [len(sources.cut(files, 500, data_format)) for data_format in (6, 5)]
    assert parts["a.json"][0] == 1 < parts["a.json"][1]
    assert parts["b.json"][0] == parts["b.json"][1] > 1


@pytest.mark.parametrize("text", ["[]", " [ ] ", "[\n]\n", "[{}]", '[{"a": 1} ,{}\n]'])
def test_short_lists(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    (part,) = sources.cut(sources.resolve([Source(uri=str(tmp_path / "a.json"))]), 10**9)
    assert [dict(row.values) for row in rows(part[0])] == json.loads(text)


@pytest.mark.parametrize(
    ("text", "kept", "kind", "said"),
    [
        ('[{"text": "a"}, {"text": "b"}', ["a", "b"], "torn", "is cut off: the end of its list is missing"),
        ('[{"text": "a"}, {"text": "b', ["a"], "json", "is not JSON"),
        ('[{"text": "a"},', ["a"], "torn", "is cut off"),
        ("[", [], "torn", "is cut off"),
        ('[{"text": "a"} {"text": "b"}]', ["a"], "json", "has no comma before this"),
        ('[{"text": "a"}]\n{"text": "b"}', ["a"], "json", "continues after the end of its list"),
        ('[{"text": "a"}, [1], {"text": "b"}]', ["a", "b"], "json", "is not an object"),
        ('[{"text": "a"}, 12, {"text": "b"}]', ["a", "b"], "json", "is not an object"),
        ('[{"text": "a"}, {text: 1}, {"text": "b"}]', ["a"], "json", "is not JSON"),
        ('[{"text": "a"}, {"text": "b\n"}, {"text": "c"}]', ["a", "c"], "json", "is not JSON"),
    ],
)
def test_what_is_wrong_with_a_list(
    text: str, kept: list[str], kind: str, said: str, block: int, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / "a.json")
    assert len(str(caught.value).splitlines()) == 1
    rejected = Rejected()
    assert read(tmp_path / "a.json", on_error="skip", rejected=rejected) == kept
    assert [(each["kind"], each["count"]) for each in rejected.to_json()] == [(kind, 1)]


def test_one_object_that_is_no_utf8_is_left_out_or_repaired_alone(tmp_path: Path) -> None:
    data = b'[{"text": "a"}, {"text": "b \xff ' + b"b" * 30 + b'"}, {"text": "c"}]'
    (tmp_path / "a.json").write_bytes(data)
    assert read(tmp_path / "a.json", on_error="skip") == ["a", "c"]
    assert read(tmp_path / "a.json", on_error="repair") == ["a", "b \ufffd " + "b" * 30, "c"]
    with pytest.raises(InputError, match="line 1, at byte 16: is not JSON in UTF-8"):
        read(tmp_path / "a.json")


def test_a_long_object_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 2**12)
    monkeypatch.setattr(lines, "BLOCK", 2**8)
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": "a"}, {"text": "b" * 2**14}, {"text": "c"}], indent=1)
    )
    rejected = Rejected()
    assert read(tmp_path / "a.json", on_error="skip", rejected=rejected) == ["a"]
    assert [each["kind"] for each in rejected.to_json()] == ["long"]


def test_a_compressed_list_that_is_cut_off(tmp_path: Path) -> None:
    drawn = random.Random(0)
    objects = [{"text": f"{drawn.random()}" * 9} for _ in range(2000)]
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(objects).encode())[:-5000])
    rejected = Rejected()
    found = read(tmp_path / "a.json.gz", on_error="skip", rejected=rejected)
    assert found == [each["text"] for each in objects[: len(found)]]
    assert 0 < len(found) < 2000
    assert [each["kind"] for each in rejected.to_json()] == ["torn"]


def test_data_of_an_earlier_format_has_no_lists(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}]')
    (part,) = sources.cut(sources.resolve([Source(uri=str(tmp_path / "a.json"))]), 10**9)
    with pytest.raises(InputError, match="begins a list; write each of its objects on a separate line"):
        list(rows(part[0], data_format=5))
