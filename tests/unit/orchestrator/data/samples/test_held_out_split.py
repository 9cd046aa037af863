"""Which documents are held out depends on their text alone, and nothing is lost or read twice."""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.samples import held_out_split
from orchestrator.data.samples.held_out_split import split, trained_documents
from orchestrator.data.samples.windows import Streams
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.tokens import Tokens

Prepare = Callable[..., str]
ENTRIES = 320
TOKENIZER = train_bytes(["a few words of text, and more of them.\n"], ENTRIES, ())
BREAK = "\n<|endoftext|>\n"
TEXT = st.text(st.sampled_from("ab \né☃"), min_size=1, max_size=40).map(lambda text: text.strip("\n") or "a")
DOCUMENTS = st.lists(TEXT, min_size=2, max_size=12)


def written(folder: Path, files: list[str], part_bytes: int) -> Tokens:
    """The files as one source, prepared in parts of so many bytes."""
    for number, text in enumerate(files):
        (folder / f"{number:03d}.txt").write_text(text, newline="")
    named = Source(uri=str(folder / "*.txt"))
    parts = sources.cut(sources.resolve([named]), part_bytes)
    made = DataFolder(str(folder / "prepared"))
    made.write("tokenizer.json", TOKENIZER.encode())
    roles = tokenizer.roles_of(Tokenizer.from_str(TOKENIZER), {})
    for number, part in enumerate(parts):
        shards.make_shard(made.uri, number, part, shards.TokenFormat(ENTRIES, roles))()
    manifest.write(made, gather(made, "f" * 32, [named.uri], parts, shards.TokenFormat(ENTRIES, roles)))
    return Tokens.open(made.uri)


def documents_in(streams: Streams) -> list[tuple[int, ...]]:
    """The tokens of each document of the first source."""
    found = streams.window(0, 0, streams.length(0)).tolist()
    return [tuple(found[a:b]) for a, b in itertools.pairwise([0, *streams.document_ends(0).tolist()])]


def sides(files: list[str], part_bytes: int, share: float) -> tuple[list[str], list[str]]:
    """The documents that are trained on and those that are held out; either may be none."""
    decoder = Tokenizer.from_str(TOKENIZER)

    def texts(streams: Streams) -> list[str]:
        return [decoder.decode(document[:-1]) for document in documents_in(streams)]

    with tempfile.TemporaryDirectory() as folder:
        tokens = written(Path(folder), files, part_bytes)
        try:
            parts = split(tokens, share)
        except InputError as error:
            return (texts(tokens), []) if "holds out none" in str(error) else ([], texts(tokens))
        found = texts(parts.training), texts(parts.held_out)
        assert parts.bytes == sum(len(text.encode()) for text in found[1])
        assert parts.held_out.documents == len(found[1])
        assert parts.training.tokens + parts.held_out.tokens == tokens.length(0)
        assert sorted(documents_in(parts.training) + documents_in(parts.held_out)) == sorted(
            documents_in(tokens)
        )
        return found


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    documents=DOCUMENTS,
    more=DOCUMENTS,
    order=st.randoms(use_true_random=False),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    share=st.sampled_from([0.1, 0.5, 0.8]),
)
def test_neither_order_nor_cuts_nor_more_files_move_a_document(
    documents: list[str], more: list[str], order: random.Random, sizes: tuple[int, int], share: float
) -> None:
    training, held_out = sides([BREAK.join(documents)], sizes[0], share)
    assert sorted(training + held_out) == sorted(documents)
    assert not set(training) & set(held_out)

    shuffled = documents + more
    order.shuffle(shuffled)
    cut = order.randrange(len(shuffled))
    files = [BREAK.join(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    more_training, more_held_out = sides(files, sizes[1], share)
    assert sorted(more_training + more_held_out) == sorted(shuffled)
    assert set(more_held_out) & set(documents) == set(held_out)
    assert not set(more_training) & set(more_held_out)


def test_about_the_share_is_held_out(tmp_path: Path) -> None:
    tokens = written(tmp_path, [BREAK.join(f"document {number}" for number in range(4000))], 2000)
    for share in (0.01, 0.1, 0.5, 0.97):
        count = split(tokens, share).held_out.documents
        assert abs(count - 4000 * share) < 4 * np.sqrt(4000 * share * (1 - share))


@pytest.mark.parametrize(("share", "what"), [(1e-7, "1e-07 holds out none"), (0.9999999, "1 leaves none")])
def test_a_side_without_documents_is_told_with_a_share_that_would_do(
    tmp_path: Path, share: float, what: str
) -> None:
    tokens = written(tmp_path, [BREAK.join(f"document {number}" for number in range(50))], 200)
    with pytest.raises(
        InputError, match=f"data.validation.share: {what} of 50 documents; make it at"
    ) as told:
        split(tokens, share)
    better = float(re.findall(r"at (?:least|most) (\S+)$", str(told.value))[0])
    assert 0 < split(tokens, better).held_out.documents < 50


@pytest.mark.parametrize("text", ["one document", BREAK.join(["the same", "the same"])])
def test_text_that_cannot_be_divided_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        InputError, match=r"separate documents by lines of <\|endoftext\|>, or name held-out text"
    ):
        split(written(tmp_path, [text], 200), 0.5)


@pytest.mark.parametrize("data_format", [1, 2])
def test_data_of_an_earlier_format_is_not_divided(
    prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch, data_format: int
) -> None:
    tokens = Tokens.open(prepare_here(["text " * 90 + BREAK + "more"]))
    object.__setattr__(tokens.manifest, "format", data_format)
    with pytest.raises(InputError, match=f"has format {data_format}, which does not distinguish documents"):
        split(tokens, 0.5)


def test_documents_of_a_set_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(40)]
    for name in ("training", "set"):
        (tmp_path / name).mkdir()
    tokens = written(tmp_path / "training", [BREAK.join(texts)], 200)
    held_out = written(tmp_path / "set", [BREAK.join([*texts[:10], "another", "others"])], 70)
    assert trained_documents(tokens, held_out, 0.0) == 10
    left = sum(
        document in set(documents_in(split(tokens, 0.5).training)) for document in documents_in(held_out)
    )
    assert trained_documents(tokens, held_out, 0.5) == left
    assert 0 < left < 10


def test_what_is_kept_on_disk_is_what_was_in_memory_and_is_made_again_when_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = written(tmp_path, [f"document {number % 40}" for number in range(120)], 200)
    here = split(tokens, 0.3)
    monkeypatch.setattr(held_out_split, "MANY", 0)
    folder = Path(tokens.folder.uri) / "split"
    for damage in ("", "flipped", "cut", "gone", "facts"):
        files = sorted(folder.rglob("*.trained.starts"))
        if damage == "flipped":
            files[0].write_bytes(bytes([files[0].read_bytes()[0] ^ 1]) + files[0].read_bytes()[1:])
        elif damage == "cut":
            files[0].write_bytes(files[0].read_bytes()[:-8])
        elif damage == "gone":
            files[0].unlink()
        elif damage == "facts":
            next(folder.rglob("*.json")).write_text("{")
        there = split(tokens, 0.3)
        assert there.bytes == here.bytes
        for one, other in ((here.training, there.training), (here.held_out, there.held_out)):
            assert (one.tokens, one.documents, one.digest) == (other.tokens, other.documents, other.digest)
            assert np.array_equal(one.document_ends(0), other.document_ends(0))
            assert np.array_equal(one.window(0, 0, one.tokens), other.window(0, 0, other.tokens))
        assert there.training._ends[0].__class__ is np.memmap
    assert not list(folder.rglob("*.tmp"))
