from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from orchestrator.data.prepared import manifest
from orchestrator.data.prepared.data_folder import DataFolder
from orchestrator.data.prepared.summary import inspect
from orchestrator.data.preprocessing import rejections, shards
from orchestrator.data.preprocessing.gather import gather
from orchestrator.data.preprocessing.rejections import Ceiling, merged, notes, totals
from orchestrator.data.sources import SourceFile, Span, cut, resolve
from orchestrator.job.data import Source
from orchestrator.job.errors import InputError


def finding(
    count: int, kind: str = "json", file: str = "a.jsonl", action: str = "left out"
) -> dict[str, object]:
    places = [{"byte": n, "what": "", "text": ""} for n in range(min(count, 3))]
    return {"source": 0, "file": file, "kind": kind, "action": action, "count": count, "examples": places}


def test_findings_of_parts_are_one_a_file_and_kind(tmp_path: Path) -> None:
    found = [
        finding(2),
        finding(5, "utf-8"),
        finding(4),
        finding(1, file="b.jsonl"),
        finding(3, action="repaired"),
    ]
    whole = merged(found)
    assert [(f["file"], f["kind"], f["action"], f["count"], len(f["examples"])) for f in whole] == [
        ("a.jsonl", "json", "left out", 6, 3),
        ("a.jsonl", "utf-8", "left out", 5, 3),
        ("b.jsonl", "json", "left out", 1, 1),
        ("a.jsonl", "json", "repaired", 3, 3),
    ]
    folder = DataFolder(str(tmp_path))
    told = rejections.write(folder, found)
    assert told == {"left out": {"json": 7, "utf-8": 5}, "repaired": {"json": 3}} == totals(found)
    assert rejections.read(folder) == whole
    assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 4
    assert notes(told, "here") == [
        "12 documents left out (json 7, utf-8 5), 3 documents repaired (json 3); see here/rejected.jsonl"
    ]
    assert notes({}, "here") == []
    assert rejections.write(DataFolder(str(tmp_path / "none")), []) == {}
    assert not (tmp_path / "none").exists()


def parts_of(kind: str, count: int) -> list[tuple[Span, ...]]:
    return [(Span(SourceFile(0, "a", kind, 100, "", "text"), 0, 100, 100),) for _ in range(count)]


@pytest.mark.parametrize(
    ("limit", "kind", "ends_after"),
    [
        (25, ".jsonl", 3),  # as soon as there are more
        ("20%", ".jsonl", 4),  # 40, where 80 were read, and six parts have 13.5 documents each at most
        ("20%", ".parquet", 10),  # whose rows nobody knows before
        ("60%", ".jsonl", None),
        (100, ".jsonl", None),
        (None, ".jsonl", None),
    ],
)
def test_a_preparation_ends_when_too_much_is_left_out_for_certain(
    limit: int | str | None, kind: str, ends_after: int | None, tmp_path: Path
) -> None:
    """Ten parts, of each of which ten documents are right and ten are not."""
    parts, ceiling = parts_of(kind, 10), Ceiling(limit, DataFolder(str(tmp_path)))
    for number in range(10):
        record = {"rejected": [finding(10)], "documents": 10}
        if number + 1 == ends_after:
            with pytest.raises(
                InputError, match=r"of [0-9]+ documents are left out \(json [0-9]+\)"
            ) as caught:
                ceiling.check(number, record, parts)
            assert f"data.max_rejected {limit}" in str(caught.value)
            assert [f["count"] for f in rejections.read(ceiling.folder)] == [10 * (number + 1)] * (number < 9)
            return
        ceiling.check(number, record, parts)
    assert ends_after is None


def test_prepared_data_says_what_was_left_out_of_it(tmp_path: Path) -> None:
    """Whatever the order in which the parts are made."""
    rows = ['{"text": "one line"}', '{"text": 3}', "{", '{"text": "an\\u0000other"}', '{"text": "last"}']
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n".join(rows))
    parts = cut(resolve([Source(uri=str(tmp_path / "*.jsonl"))], on_error="repair"), 60)
    assert len(parts) > 2
    encoder = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "one": 1, "?": 2}, unk_token="?"))
    made = []
    for order in (range(len(parts)), reversed(range(len(parts)))):
        folder = DataFolder(str(tmp_path / f"prepared-{len(made)}"))
        folder.write("tokenizer.json", encoder.to_str().encode())
        for number in order:
            shards.make_shard(folder.uri, number, parts[number], shards.TokenFormat(3, {"eos": 0}))()
        found = gather(folder, "f" * 32, ["*.jsonl"], parts, shards.TokenFormat(3, {"eos": 0}))
        manifest.write(folder, found)
        made.append({str(p.relative_to(folder.uri)): p.read_bytes() for p in Path(folder.uri).rglob("*.*")})
        told = "4 documents left out (json 2, type 2), 2 documents repaired (nul 2)"
        assert rejections.notes_of(folder.uri) == [f"{told}; see {folder.uri}/rejected.jsonl"]
        assert (found.documents, inspect(folder.uri)["rejected"]["left out"]) == (6, {"json": 2, "type": 2})
        rejections.check(4, folder)
        rejections.check("40%", folder)
        for limit in (3, "39.9%"):
            with pytest.raises(InputError, match=r"4 of 10 documents are left out \(json 2, type 2\)"):
                rejections.check(limit, folder)
    assert made[0] == made[1]
