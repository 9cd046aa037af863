from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.config.errors import InputError
from orchestrator.data.config import Source
from orchestrator.data.prepare import rejections, shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.prepare.records import RecordKind
from orchestrator.data.prepare.rejections import Ceiling, merged, notes, totals
from orchestrator.data.samples.held_out_split import split
from orchestrator.data.sources import SourceFile, Span, cut, resolve
from orchestrator.data.store import manifest
from orchestrator.data.store.census import census
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.summary import inspect
from orchestrator.data.store.tokens import Tokens


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


def test_prepared_data_says_how_many_tokens_more_it_takes_to_learn_turn_by_turn(tmp_path: Path) -> None:
    """A row counts once, however many records it has: in what may be left out, among duplicates, and when rows are held
    out, all records of one are on the same side."""
    words = ["<|endoftext|>", "user", "assistant", "a", "b", "c", "d", "then", "last", "?"]
    encoder = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} "
        "{{ 'last' if loop.last and m.role == 'assistant' else 'then' }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )

    def talk(*said: str) -> str:
        roles = ["user", "assistant"] * 3
        return json.dumps(
            {"m": [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]}
        )

    rows = [
        talk(*"abcdab"),
        talk(*"ab"),
        talk(*"abcd"),
        talk(*"abcdab"),
        talk("a", ""),
        *(talk("c", "d") for _ in "1234"),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = Source(uri=str(tmp_path / "a.jsonl"), field={"messages": "m"})
    parts = cut(resolve([source], on_error="skip"), 400)
    assert len(parts) > 1
    folder = DataFolder(str(tmp_path / "prepared"))
    folder.write("tokenizer.json", encoder.to_str().encode())
    written = shards.TokenFormat(10, {"eos": 0}, kind=RecordKind("conversation", (), template))
    for number in range(len(parts)):
        shards.make_shard(folder.uri, number, parts[number], written)()
    found = gather(folder, "f" * 32, ["a.jsonl"], parts, written)
    manifest.write(folder, found)
    assert manifest.read(folder) == found
    # Three answers: 6 and 12 tokens before the last; two: 6.
    assert found.turns == {"rows": 3, "more": 5, "tokens": 2 * (6 + 12) + 6}
    assert (found.documents, found.rows) == (8 + 5, 8)
    assert inspect(folder.uri)["turns"] == found.turns
    told, turns = rejections.notes_of(folder.uri)
    assert told.startswith("1 documents left out (record 1)")
    assert turns == (
        "3 conversations are learnt turn by turn, since the chat template rewrites an earlier answer when "
        "others follow: 8 records instead of 3, with 42 tokens more"
    )
    with pytest.raises(InputError, match="1 of 9 documents are left out"):
        rejections.check("11%", folder)
    rejections.check("12%", folder)
    (source_of,) = census(folder.uri)["sources"]
    assert source_of["duplicates"] == 1 + 3
    sides = split(Tokens.open(folder.uri), 0.5)
    assert sides.training.documents + sides.held_out.documents == 13
    for side in (
        sides.training,
        sides.held_out,
    ):  # the first of six answers' records is there as often as the last
        ends = side.document_ends(0)
        lengths = np.diff(ends, prepend=0).tolist()
        assert lengths.count(12 + 1) - lengths.count(18 + 1) in (0, 1)  # one is that of the two answers
        assert lengths.count(18 + 1) in (0, 2)
