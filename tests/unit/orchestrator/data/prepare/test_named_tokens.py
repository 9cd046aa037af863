"""Names of special tokens in texts: counted, told, and read as transformers reads them where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hf_tokenizers import with_bos
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.framing import Framing
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.prepare.named_tokens import NamedTokens, notes, summed
from orchestrator.data.prepare.records import RecordKind, records_of
from orchestrator.data.store.data_folder import DataFolder
from workloads.record_format import MARK, unpack

BEGIN, END, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_0|>"
RENDERED = f"{BEGIN}{TURN}user\nTwo and two?{TURN}assistant\nFour.{END}"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("tokenizer")
    with_bos(folder)
    return tokenizer.load(str(folder), ())


def tokens_of(
    given: tuple[str, dict[str, int]], folder: Path, parsed: bool, rows: list[str]
) -> list[list[int]]:
    """The documents of rows of text in prepared data; and what its manifest says of names is as it should be."""
    text, roles = given
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    files = sources.resolve([Source(uri=str(folder / "rows.jsonl"))])
    made = DataFolder(str(folder / f"data-{parsed}"))
    made.write("tokenizer.json", text.encode())
    framing = Framing.of(text, roles["eos"], True, parsed)
    written = shards.TokenFormat(tokenizer.size_in(text), roles, framing=framing)
    (part,) = sources.cut(files, 10**6)
    shards.make_shard(made.uri, 0, part, written)()
    found = gather(made, "f" * 32, ["rows"], [part], written)
    count = 2 * len(rows)
    assert found.named == {"tokens" if parsed else "text": {TURN: count, BEGIN: count // 2, END: count // 2}}
    assert found.inner_ends == 0
    (line,) = notes(found.named)
    assert line.startswith(f"the text contains names of special tokens {2 * count} times ({TURN} {count}")
    assert ("special_tokens: parse" in line) == (not parsed)
    ids = np.frombuffer(made.read("shards/000000.bin") or b"", found.dtype)
    ends = np.frombuffer(made.read("shards/000000.ends") or b"", "<u4")
    return [part.tolist() for part in np.split(ids, ends)[:-1]]


def test_text_is_spelled_out_or_read_as_transformers_reads_it(
    given: tuple[str, dict[str, int]], tmp_path: Path
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(given[0]))
    expected = theirs(RENDERED, add_special_tokens=False)["input_ids"]
    rows = [RENDERED, RENDERED]
    assert tokens_of(given, tmp_path, True, rows) == [expected, expected]
    spelled = tokens_of(given, tmp_path, False, rows)[0]
    begin, end = (theirs.convert_tokens_to_ids(name) for name in (BEGIN, END))
    inside = theirs(RENDERED, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert spelled == [begin, *inside, end]
    assert len(inside) > len(expected)


@pytest.mark.parametrize("parsed", [False, True])
def test_records_of_texts_are_read_alike(
    given: tuple[str, dict[str, int]], tmp_path: Path, parsed: bool
) -> None:
    """Preferences have their frame; what is parsed says it itself."""
    text, roles = given
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))
    start, answer = RENDERED.removesuffix(f"Four.{END}"), f"Four.{END}"
    row = {"text": RENDERED, "label": 1, "prompt": start, "chosen": answer, "rejected": "Five."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")

    def record(objective: str, field: dict[str, str], framed: bool) -> list[np.ndarray]:
        files = sources.resolve([Source(uri=str(tmp_path / "rows.jsonl"), field=field)])
        framing, kind = Framing.of(text, roles["eos"], framed, parsed), RecordKind(objective, ("a", "b"))
        encoder = tokenizer.encoder(text, parsed)
        (span,) = sources.cut(files, 10**6)[0]
        (found,) = records_of(span, kind, encoder, roles["eos"], framing=framing)
        return unpack(found.words)

    def ids(whole: str) -> list[int]:
        return theirs(whole, add_special_tokens=False, split_special_tokens=not parsed)["input_ids"]

    classified, _, _ = record("sequence_classification", {"text": "text", "label": "label"}, False)
    assert classified.tolist() == ids(RENDERED)
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    chosen, rejected = (part & ~MARK for part in record("dpo", columns, True))
    begin, end = (theirs.convert_tokens_to_ids(name) for name in (BEGIN, END))
    before, after = ([], []) if parsed else ([begin], [end])
    assert chosen.tolist() == [*before, *ids(start + answer), *after]
    assert rejected.tolist() == [*before, *ids(start + "Five."), end]


def test_names_in_messages_are_read_as_tokens(given: tuple[str, dict[str, int]]) -> None:
    named = NamedTokens(given[0])
    named.add_record(
        json.dumps({"messages": [{"role": "user", "content": f"say {TURN}"}], "prompt": END}), False
    )
    assert named.to_json() == {"text": {END: 1}, "tokens": {TURN: 1}}
    assert summed([named.to_json(), {"text": {END: 2}}]) == {"text": {END: 3}, "tokens": {TURN: 1}}
    assert not NamedTokens("").to_json()


@pytest.mark.parametrize("part_bytes", [10**6, 700, 300])
def test_a_text_that_is_divided_among_parts_has_its_frame_once(
    given: tuple[str, dict[str, int]], tmp_path: Path, part_bytes: int
) -> None:
    text, roles = given
    documents = [" ".join(f"word{number}" for number in range(count)) for count in (120, 3, 90, 1)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    parts = sources.cut(sources.resolve([Source(uri=str(tmp_path / "text.txt"))]), part_bytes)
    made = DataFolder(str(tmp_path / "data"))
    made.write("tokenizer.json", text.encode())
    framing = Framing.of(text, roles["eos"], True, False)
    written = shards.TokenFormat(tokenizer.size_in(text), roles, framing=framing)
    for number, part in enumerate(parts):
        shards.make_shard(made.uri, number, part, written)()
    names = [f"shards/{number:06d}.bin" for number in range(len(parts))]
    ids = np.frombuffer(b"".join(made.read(name) or b"" for name in names), written.dtype)
    found = gather(made, "f" * 32, ["text"], parts, written)
    whole = np.split(ids, np.flatnonzero(ids == roles["eos"]) + 1)[:-1]
    assert (len(parts) > 1) == (part_bytes < 10**6)
    assert [(row[0], int((row == framing.before[0]).sum())) for row in whole] == [(framing.before[0], 1)] * 4
    assert found.bytes_per_token == found.bytes / (found.tokens - 4)
