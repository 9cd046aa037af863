"""Run cleaning with Ray Data: part by part within a pass, and over all documents between passes.

    <cache>/clean/<key of a step>/<key of a part>.json    the step's decision on the part
    <cache>/clean/<key>/<key of a part>.bin               comparison data of the part's documents
    <cache>/clean/<key>/<band>-<first>-<last>.pairs       similar documents, by the keys of one slice

Each file is written once. Existing work is reused, whichever run did it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import ray
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean import decisions, decontaminate, signatures, similar_documents
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.clean.config import Url
from orchestrator.data.clean.decisions import Decision
from orchestrator.data.clean.documents import aligned, texts
from orchestrator.data.clean.passes import FOLDER, compare_part, compared_name, decide_part, kept_of
from orchestrator.data.clean.plan import CORPUS, VERSION, Cleaning, PlannedStep, lists_of, others
from orchestrator.data.clean.signatures import EXACT, Compared, Comparison
from orchestrator.data.clean.similar_documents import PAIR, Clusters, Slice
from orchestrator.data.prepare.part_tasks import run_alone, run_tasks, together
from orchestrator.data.progress import Progress
from orchestrator.data.samples.order import mix
from orchestrator.data.sources import Part, from_json, to_json
from orchestrator.data.sources.identity import part_key
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.read_at_once import read_at_once

SAMPLES = 8
"""Samples of removed duplicates. Each takes another read of two parts."""
SUM = 8


@dataclass(frozen=True)
class Corpus:
    """All parts, by the files of their comparison data. Training parts, which have `keys`, come first.

    `before` is the key of the previous step; empty for the first one.
    """

    uri: str
    keys: Sequence[str]
    files: Sequence[str]
    before: str

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.files)

    @property
    def folder(self) -> DataFolder:
        """The folder of the files."""
        return DataFolder(self.uri)

    def documents(self) -> int:
        """Return the number of documents in all parts."""
        return sum(self.compared(number).rows for number in range(self.count))

    def compared(self, number: int) -> Compared:
        """See `similar_documents.Parts`. Raises InputError if it is damaged."""
        return signatures.opened(self.folder, self.files[number])

    def alive(self, number: int) -> np.ndarray | None:
        """See `similar_documents.Parts`."""
        if number >= len(self.keys) or not self.before:
            return None
        return kept_of(self.folder, self.before, self.keys[number])


def comparison_of(step: PlannedStep) -> Comparison:
    """Return how a step compares documents."""
    if step.name == "exact_duplicates":
        return EXACT
    return signatures.comparison(step.options["threshold"], step.options["hashes"])


def other_key(step: PlannedStep, before: Sequence[PlannedStep]) -> str:
    """Return the key of the comparison data of text that is not trained on, after the steps `before` changed it."""
    how = [step.options.get(name) for name in ("threshold", "words", "hashes", "seed")]
    algorithm = signatures.algorithm() if step.name == "near_duplicates" else ""
    changes = [[each.name, each.options] for each in before]
    return xxhash.xxh3_128_hexdigest(f"others {VERSION} {step.name} {how} {algorithm} {changes}".encode())


def pairs_name(piece: Slice) -> str:
    """Return the file name of a slice's pairs, below the step's key."""
    return f"{piece.band}-{piece.first}-{piece.last}.pairs"


def write_pairs(corpus: Corpus, step: PlannedStep, piece: Slice) -> None:
    """Find the pairs of a slice and store them."""
    data = similar_documents.pairs(corpus, piece, comparison_of(step)).tobytes()
    corpus.folder.write(f"{step.key}/{pairs_name(piece)}", data + xxhash.xxh3_64_digest(data))


def _read_pairs(folder: DataFolder, name: str) -> np.ndarray:
    data = folder.read(name) or b""
    if len(data) < SUM or xxhash.xxh3_64_digest(data[:-SUM]) != data[-SUM:]:
        raise signatures.damaged(folder, name)
    return np.frombuffer(data[:-SUM], PAIR)


def decide_alike(corpus: Corpus, step: PlannedStep, pieces: Sequence[Slice], parts: Sequence[Part]) -> None:
    """Decide which documents are kept, and store the decision for each part. Raises InputError."""
    folder = corpus.folder
    found = [_read_pairs(folder, f"{step.key}/{pairs_name(piece)}") for piece in pieces]
    longest = step.options.get("keep") == "longest"
    chosen = similar_documents.clusters(found, corpus, len(parts), longest)
    samples = _samples(chosen, parts)
    for number, key in enumerate(corpus.keys):
        decisions.write(folder, step.key, key, _decision(corpus, chosen, number, samples.get(number, [])))


def _decision(corpus: Corpus, chosen: Clusters, number: int, samples: list[list[str]]) -> Decision:
    """Return the decision on part `number`: which documents stay after removing all but one of each cluster."""
    documents, sizes = corpus.compared(number).sizes()
    alive = corpus.alive(number)
    given = np.zeros(len(documents) if alive is None else len(alive), np.int64)
    given[documents] = sizes
    kept = np.ones(len(given), bool) if alive is None else alive.copy()
    total = int(given[kept].sum())
    removed, instead = chosen.of_part(number)
    held_out = int(np.count_nonzero((instead >> np.uint64(32)) >= len(corpus.keys)))
    gone = int(given[removed].sum())
    found = Decision(
        kept,
        int(kept.sum()),
        bytes=total,
        removed=len(removed),
        removed_bytes=gone,
        changed=0,
        bytes_after=total - gone,
        samples=samples,
    )
    kept[removed] = False
    if held_out:
        found.reasons["held-out text"] = held_out
    if len(removed) > held_out:
        found.reasons["another document"] = len(removed) - held_out
    return found


def _samples(chosen: Clusters, parts: Sequence[Part]) -> dict[int, list[list[str]]]:
    """Return samples of removed documents by the number of their part, each with the document that is kept instead."""
    mask = chosen.document != chosen.kept
    removed = chosen.document[mask]
    kept = chosen.kept[mask]
    # Drawn by a hash of the number, so that every run shows the same samples.
    drawn = np.argsort(mix(removed), kind="stable")[:SAMPLES]
    wanted = {int(n) for n in (*removed[drawn], *kept[drawn]) if int(n) >> 32 < len(parts)}
    text = {number: _text(parts[number >> 32], number & 0xFFFFFFFF) for number in sorted(wanted)}
    found: dict[int, list[list[str]]] = {}
    for one, instead in zip(removed[drawn].tolist(), kept[drawn].tolist(), strict=True):
        beside = f"kept: {text[instead][: decisions.SHOWN]}" if instead in text else "held-out text"
        found.setdefault(one >> 32, []).append(decisions.sample_of(text[one], beside))
    return found


def _text(part: Part, number: int) -> str:
    return next(islice((text for text, _ in texts(part)), number, None), "")


OTHER_PART_BYTES = 2**25


@dataclass(frozen=True)
class Work:
    """The parts to clean and the folder of the decisions. Each part ends with a document."""

    folder: DataFolder
    cleaning: Cleaning
    parts: Sequence[Part]
    progress: Progress

    def keys(self) -> list[str]:
        """Return the keys of the parts."""
        return [part_key(part) for part in self.parts]


def clean(cleaning: Cleaning, parts: Sequence[Part], cache: str, progress: Progress) -> CleanedText:
    """Make all missing decisions on the documents of `parts`, and return the cleaned text. Ray must be initialised.

    Raises InputError as reading the text does, and for unusable steps.
    """
    work = Work(DataFolder(f"{DataFolder(cache).uri}/{FOLDER}"), cleaning, parts, progress)
    work.folder.remove_old_drafts()
    for number, steps in enumerate(cleaning.passes()):
        _prepare_steps(work, steps)
        _decide_parts(work, number, steps)
        before = [step for step in steps if step.name not in CORPUS]
        last = before[-1].key if before else cleaning.passes()[number - 1][-1].key if number else ""
        for step in steps:
            if step.name in CORPUS:
                _compare(work, step, last)
                last = step.key
    return CleanedText(cleaning, work.folder.uri)


def _prepare_steps(work: Work, steps: Sequence[PlannedStep]) -> None:
    """Store what tasks need from files that the steps read."""
    for step in steps:
        rule = step.rule
        if isinstance(rule, Url):
            _refuse_text_files(work.parts)
            lists = json.dumps(lists_of(rule)).encode()
            if work.folder.read(f"{step.key}/lists.json") != lists:
                work.folder.write(f"{step.key}/lists.json", lists)
        if step.name == "decontaminate":
            run_alone(_write_index, work.folder.uri, work.folder.uri, step)


def _refuse_text_files(parts: Sequence[Part]) -> None:
    if found := next((span.file.uri for part in parts for span in part if span.file.kind == ".txt"), None):
        what = f"needs a column with an address, and text files have no columns: {found}"
        raise InputError(what, "data.clean.url", "clean these sources in a separate job")


def _write_index(uri: str, step: PlannedStep) -> None:
    decontaminate.write_index(DataFolder(uri), step)


def _decide_parts(work: Work, number: int, steps: Sequence[PlannedStep]) -> None:
    """Run pass `number` on all parts that lack one of its decisions."""
    keys = work.keys()
    lacking = [False] * len(keys)
    for step in steps:
        if step.name in CORPUS:
            there = work.folder.sizes(step.compared)
            lacking = [yes or f"{key}.bin" not in there for yes, key in zip(lacking, keys, strict=True)]
        else:
            there_too = undecided(work.folder, step.key, keys)
            lacking = [yes or key in there_too for yes, key in zip(lacking, keys, strict=True)]
    todo = [n for n, yes in enumerate(lacking) if yes]
    uri = work.folder.uri
    plan = work.cleaning.to_json()
    what = f"cleaning, pass {number + 1} of {len(work.cleaning.passes())}"
    work.progress(what, len(keys) - len(todo), len(keys))

    def task(row: dict[str, Any]) -> None:
        decide_part(uri, Cleaning.from_json(plan), number, from_json(row["part"]))

    rows = [{"part": to_json(work.parts[n])} for n in todo]
    most = together(max(sum(span.bytes for span in part) for part in work.parts))
    for done in run_tasks(task, rows, uri, together=most):
        work.progress(what, len(keys) - len(todo) + done, len(keys))


def undecided(folder: DataFolder, key: str, parts: Sequence[str]) -> set[str]:
    """Return the parts without a sound decision of a step."""
    there = folder.sizes(key)
    found = {part for part in parts if f"{part}.json" not in there}
    asked = sorted(set(parts) - found)
    read = read_at_once(partial(decisions.read, folder, key), asked)
    return found | {part for part, decision in zip(asked, read, strict=True) if decision is None}


def _compare(work: Work, step: PlannedStep, before: str) -> None:
    """Decide on all documents at once. `before` is the key of the previous step; empty for the first one."""
    keys = work.keys()
    if not undecided(work.folder, step.key, keys):
        return
    names = [*(compared_name(step.compared, key) for key in keys), *_compare_others(work, step)]
    corpus = Corpus(work.folder.uri, keys, names, before)
    pieces = similar_documents.slices(corpus.documents(), comparison_of(step))
    there = work.folder.sizes(step.key)
    todo = [piece for piece in pieces if pairs_name(piece) not in there]
    told = f"comparing documents, {step.name}"
    work.progress(told, len(pieces) - len(todo), len(pieces) + 1)
    given = ray.put(corpus)
    uri = work.folder.uri

    def task(row: dict[str, Any]) -> None:
        write_pairs(ray.get(given), step, similar_documents.Slice(*row["piece"]))

    rows = [{"piece": list(piece)} for piece in todo]
    for done in run_tasks(task, rows, uri):
        work.progress(told, len(pieces) - len(todo) + done, len(pieces) + 1)
    parts = [to_json(part) for part in work.parts]
    run_alone(_choose, uri, given, step, (pieces, parts))
    work.progress(told, len(pieces) + 1, len(pieces) + 1)


def _choose(
    corpus: Corpus, step: PlannedStep, of_text: tuple[list[similar_documents.Slice], list[str]]
) -> None:
    """Decide about the texts of these pieces, which consist of these parts."""
    pieces, parts = of_text
    decide_alike(corpus, step, pieces, [from_json(part) for part in parts])


def _compare_others(work: Work, step: PlannedStep) -> list[str]:
    """Write the comparison data of text that is not trained on, and return its files."""
    texts = others(step.rule, work.cleaning.held_out)
    if not texts:
        return []
    files = sources.resolve(texts, f"data.clean.{step.name}.against", work.cleaning.on_error)
    parts = aligned(sources.cut(files, OTHER_PART_BYTES))
    before = work.cleaning.changing(step)
    uri = work.folder.uri
    key = other_key(step, before)
    there = work.folder.sizes(key)
    rows = [{"part": to_json(part)} for part in parts if f"{part_key(part)}.bin" not in there]

    def task(row: dict[str, Any]) -> None:
        compare_part(uri, step, before, key, from_json(row["part"]))

    for _ in run_tasks(task, rows, uri):
        pass
    return [compared_name(key, part_key(part)) for part in parts]
