from __future__ import annotations

import random
from pathlib import Path

import pytest

from orchestrator.config.errors import InputError
from orchestrator.data.clean import documents
from orchestrator.data.clean.documents import aligned, texts
from orchestrator.data.config import Source
from orchestrator.data.sources import cut, resolve


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_documents_are_whole_in_whatever_parts(tmp_path: Path, end: str) -> None:
    draw = random.Random(4)
    for trial in range(12):
        found = [
            end.join("word " * draw.randint(1, 30) for _ in range(draw.randint(1, 8)))
            for _ in range(draw.randint(1, 40))
        ]
        if trial % 3 == 0:
            found[draw.randrange(len(found))] = "long " * 3000 + "<|endoftext|> in a line"
        path = tmp_path / f"{trial}.txt"
        last = draw.choice(["", end, f"{end}<|endoftext|>{end}", f"{end}<|endoftext|>"])
        path.write_text(f"{end}<|endoftext|>{end}".join(found) + last, newline="")
        files = resolve([Source(uri=str(path))])
        whole = [text for part in cut(files, 10**9) for text, _ in texts(part)]
        for size in (50, 333, 5000):
            parts = aligned(cut(files, size))
            assert [text for part in parts for text, _ in texts(part)] == whole == found
            spans = [span for part in parts for span in part]
            assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
            assert spans[-1].stop == path.stat().st_size


def test_a_line_that_only_ends_in_the_separator_divides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a window of the file begins, and where separators follow each other."""
    monkeypatch.setattr(documents, "BLOCK", 40)
    draw = random.Random(5)
    for trial in range(60):
        kinds = [
            "text<|endoftext|>\n",
            "<|endoftext|>\n",
            "<|endoftext|>\r\n",
            "more of it\n",
            "x<|endoftext|>\n",
        ]
        text = "".join(draw.choice(kinds) for _ in range(draw.randint(1, 60)))
        path = tmp_path / f"{trial}.txt"
        path.write_text(text, newline="")
        files = resolve([Source(uri=str(path))])
        whole = [found for part in cut(files, 10**9) for found, _ in texts(part)]
        for size in (17, 64, 200):
            parts = aligned(cut(files, size))
            assert [found for part in parts for found, _ in texts(part)] == whole, (trial, size)
            spans = [span for part in parts for span in part]
            assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]


def test_a_document_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "DOCUMENT_BYTES", 10_000)
    monkeypatch.setattr(documents, "BLOCK", 1000)
    path = tmp_path / "a.txt"
    path.write_text("line of text\n" * 5000)
    files = resolve([Source(uri=str(path))])
    with pytest.raises(InputError, match="has a document of more than 0 MiB at byte"):
        aligned(cut(files, 1000))
    (part,) = aligned(cut(files, 10**9))
    with pytest.raises(
        InputError, match=r"has a document of more than 0 MiB; data.clean judges whole documents"
    ):
        list(texts(part))


def test_files_that_are_not_there_stay_in_their_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo")
    (tmp_path / "all.list").write_text(f"{tmp_path}/a.txt\n{tmp_path}/gone.txt\n")
    files = resolve([Source(uri=str(tmp_path / "all.list"))], on_error="skip")
    assert len(aligned(cut(files, 10**6))[0]) == 2
