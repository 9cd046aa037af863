"""Near duplicates beside those of datasketch, on documents of known similarity."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH

from orchestrator.config.errors import InputError
from orchestrator.data.clean import signatures, similar_documents
from orchestrator.data.clean.signatures import Compared, Comparison, WordHashes, comparison
from orchestrator.data.clean.similar_documents import PAIR, Clusters
from orchestrator.data.store.data_folder import DataFolder

HASHES = 128


@dataclass
class Stored:
    """Parts of which each was written to a file."""

    folder: DataFolder
    files: list[str]
    dead: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return len(self.files)

    def compared(self, number: int) -> Compared:
        return signatures.opened(self.folder, self.files[number])

    def alive(self, number: int) -> np.ndarray | None:
        return np.array([n not in self.dead for n in range(self.compared(number).rows)])


def rows_of(documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
    hashes = WordHashes()
    return [hashes.of_ngrams(words, 5) for words in documents]


def stored(
    folder: Path, documents: Sequence[Sequence[str]], threshold: float, parts: int
) -> tuple[Stored, list[int]]:
    how, found, begins = comparison(threshold, HASHES), [], []
    rows = rows_of(documents)
    keys, signed = signatures.minhash(rows, HASHES, 1, how.bands)
    sizes = np.array([sum(map(len, words)) for words in documents])
    cuts = np.linspace(0, len(documents), parts + 1).astype(int)
    target = DataFolder(str(folder))
    for begin, end in pairwise(cuts.tolist()):
        has = np.array([len(row) > 0 for row in rows[begin:end]])
        name = f"{threshold}-{parts}-{begin}.bin"
        signatures.write(
            target, name, np.arange(end - begin), sizes[begin:end], keys[begin:end], signed[begin:end], has
        )
        found.append(name)
        begins.append(int(begin))
    return Stored(target, found), begins


def clustered(parts: Stored, how: Comparison, documents: int, held_out: int | None = None) -> Clusters:
    found = [similar_documents.pairs(parts, piece, how) for piece in similar_documents.slices(documents, how)]
    return similar_documents.clusters(
        found, parts, parts.count if held_out is None else held_out, longest=True
    )


def removed(found: Clusters, begins: Sequence[int]) -> set[int]:
    return {int(n) + begin for part, begin in enumerate(begins) for n in found.removed_of_part(part)[0]}


def planted(pairs: int = 1500) -> Iterator[list[str]]:
    """Documents, and after each a copy with some words replaced."""
    draw = random.Random(5)
    words = [f"w{n}" for n in range(4000)]
    for _ in range(pairs):
        text = draw.choices(words, k=draw.randint(40, 300))
        other = list(text)
        for at in draw.sample(
            range(len(text)), int(len(text) * draw.choice([0, 0.005, 0.01, 0.02, 0.03, 0.06]))
        ):
            other[at] = f"x{at}"
        yield text
        yield other


def test_pairs_are_found_as_well_as_by_datasketch_and_fewer_that_are_none(tmp_path: Path) -> None:
    documents, threshold = list(planted()), 0.8
    rows = [set(row.tolist()) for row in rows_of(documents)]
    truth = np.array([len(a & b) / len(a | b) for a, b in zip(rows[::2], rows[1::2], strict=True)])
    how = comparison(threshold, HASHES)
    parts, begins = stored(tmp_path, documents, threshold, 3)
    gone = removed(clustered(parts, how, len(documents)), begins)
    ours = np.array([2 * n in gone or 2 * n + 1 in gone for n in range(len(truth))])

    index = MinHashLSH(threshold=threshold, num_perm=HASHES)
    theirs = []
    for n in range(len(truth)):
        first, second = MinHash(HASHES), MinHash(HASHES)
        first.update_batch([int(value).to_bytes(8, "little") for value in rows[2 * n]])
        second.update_batch([int(value).to_bytes(8, "little") for value in rows[2 * n + 1]])
        index.insert(n, first)
        theirs.append(n in index.query(second))
    real = truth >= threshold
    assert 200 < real.sum() < len(real) - 200
    our_recall, their_recall = ours[real].mean(), np.array(theirs)[real].mean()
    our_precision, their_precision = real[ours].mean(), real[np.array(theirs)].mean()
    print(f"recall {our_recall:.3f} {their_recall:.3f}, precision {our_precision:.3f} {their_precision:.3f}")
    assert our_recall > 0.93
    assert our_recall > their_recall - 0.02
    assert our_precision > their_precision
    assert ours[truth > threshold + 0.08].all()
    assert not ours[truth < threshold - 0.12].any()


def test_the_same_documents_are_kept_whatever_the_parts_and_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = list(planted(300))
    how, found = comparison(0.7, HASHES), []
    for parts, records in ((1, 2**21), (3, 150)):
        monkeypatch.setattr(similar_documents, "RECORDS", records)
        made, begins = stored(tmp_path, documents, 0.7, parts)
        found.append(removed(clustered(made, how, len(documents)), begins))
    assert found[0] == found[1]
    assert len(found[0]) > 100


def test_the_longest_is_kept_and_held_out_text_before_all(tmp_path: Path) -> None:
    draw = random.Random(1)
    text = [f"w{n}" for n in draw.choices(range(999), k=300)]
    other = [f"v{n}" for n in draw.choices(range(999), k=200)]
    documents = [text, [*text, "longer"], ["short"], other, [], [], ["short"], text[:-1]]
    parts, begins = stored(tmp_path, documents, 0.8, 2)
    how = comparison(0.8, HASHES)
    assert removed(clustered(parts, how, 8), begins) == {0, 6, 7}
    assert removed(clustered(parts, how, 8, held_out=1), begins) == {0, 1, 2}
    parts.dead = frozenset({1})  # by a step before: of each part
    assert removed(clustered(parts, how, 8), begins) == {7 if len(documents[7]) < len(documents[0]) else 0, 6}


def test_copies_in_one_key_need_one_comparison_each(tmp_path: Path) -> None:
    text = [f"w{n}" for n in range(50)]
    parts, begins = stored(tmp_path, [text] * 5000, 0.9, 2)
    how = comparison(0.9, HASHES)
    found = similar_documents.pairs(parts, similar_documents.slices(5000, how)[0], how)
    assert len(found) == 4999
    assert removed(clustered(parts, how, 5000), begins) == set(range(1, 5000))


def test_a_damaged_file_is_noticed(tmp_path: Path) -> None:
    parts, _ = stored(tmp_path, list(planted(20)), 0.8, 1)
    path = tmp_path / parts.files[0]
    whole = path.read_bytes()
    how = comparison(0.8, HASHES)
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        with pytest.raises(InputError, match="is damaged"):
            clustered(parts, how, 40)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="is damaged"):
        clustered(parts, how, 40)


def test_no_pairs_are_no_clusters(tmp_path: Path) -> None:
    parts, begins = stored(tmp_path, [["one"], ["two", "three"]], 0.8, 1)
    assert removed(clustered(parts, comparison(0.8, HASHES), 2), begins) == set()
    assert len(similar_documents.clusters([np.zeros(0, PAIR)], parts, 1, longest=False).document) == 0
