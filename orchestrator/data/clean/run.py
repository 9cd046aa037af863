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
from typing import Any

import ray

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean import decisions, decontaminate, similar_documents
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.clean.config import Url
from orchestrator.data.clean.documents import aligned
from orchestrator.data.clean.passes import FOLDER, compare_part, compared_name, decide_part
from orchestrator.data.clean.plan import CORPUS, Cleaning, PlannedStep, comparison_sources, lists_of
from orchestrator.data.clean.similar_decisions import (
    Corpus,
    comparison_of,
    decide_alike,
    other_key,
    pairs_name,
    write_pairs,
)
from orchestrator.data.clean.totals import TOTALS, totals
from orchestrator.data.prepare.part_tasks import run_alone, run_tasks, together
from orchestrator.data.progress import Progress
from orchestrator.data.sources import Part, from_json, to_json
from orchestrator.data.sources.identity import part_key
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.read_at_once import read_at_once

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


def clean_for(
    folder: DataFolder, cleaning: Cleaning, parts: Sequence[Part], sources: int, progress: Progress
) -> tuple[list[Part], CleanedText]:
    """Clean the text of data that is being prepared, and write the totals into its folder.

    Args:
        folder: the prepared data. The decisions are stored next to it.
        cleaning: the steps.
        parts: the parts of the text.
        sources: number of the job's sources.
        progress: see `prepare`.

    Returns:
        The parts, each with whole documents, and their cleaned text.
    """
    whole_documents = aligned(parts)
    text = clean(cleaning, whole_documents, folder.uri.rsplit("/", 1)[0], progress)
    folder.write_json(TOTALS, totals(text, whole_documents, sources))
    return whole_documents, text


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
    if text_file := next(
        (span.file.uri for part in parts for span in part if span.file.kind == ".txt"), None
    ):
        problem = f"needs a column with an address, and text files have no columns: {text_file}"
        raise InputError(problem, "data.clean.url", "clean these sources in a separate job")


def _write_index(uri: str, step: PlannedStep) -> None:
    decontaminate.write_index(DataFolder(uri), step)


def _decide_parts(work: Work, number: int, steps: Sequence[PlannedStep]) -> None:
    """Run pass `number` on all parts that lack one of its decisions."""
    keys = work.keys()
    lacking = [False] * len(keys)
    for step in steps:
        if step.name in CORPUS:
            sizes = work.folder.sizes(step.compared)
            lacking = [yes or f"{key}.bin" not in sizes for yes, key in zip(lacking, keys, strict=True)]
        else:
            undecided_keys = undecided(work.folder, step.key, keys)
            lacking = [yes or key in undecided_keys for yes, key in zip(lacking, keys, strict=True)]
    todo = [n for n, yes in enumerate(lacking) if yes]
    uri = work.folder.uri
    plan = work.cleaning.to_json()
    stage = f"cleaning, pass {number + 1} of {len(work.cleaning.passes())}"
    work.progress(stage, len(keys) - len(todo), len(keys))

    def task(row: dict[str, Any]) -> None:
        decide_part(uri, Cleaning.from_json(plan), number, from_json(row["part"]))

    rows = [{"part": to_json(work.parts[n])} for n in todo]
    max_tasks = together(max(sum(span.bytes for span in part) for part in work.parts))
    for done in run_tasks(task, rows, uri, together=max_tasks):
        work.progress(stage, len(keys) - len(todo) + done, len(keys))


def undecided(folder: DataFolder, key: str, parts: Sequence[str]) -> set[str]:
    """Return the parts without a sound decision of a step."""
    sizes = folder.sizes(key)
    result = {part for part in parts if f"{part}.json" not in sizes}
    missing = sorted(set(parts) - result)
    read = read_at_once(partial(decisions.read, folder, key), missing)
    return result | {part for part, decision in zip(missing, read, strict=True) if decision is None}


def _compare(work: Work, step: PlannedStep, before: str) -> None:
    """Decide on all documents at once. `before` is the key of the previous step; empty for the first one."""
    keys = work.keys()
    if not undecided(work.folder, step.key, keys):
        return
    names = [*(compared_name(step.compared, key) for key in keys), *_compare_others(work, step)]
    corpus = Corpus(work.folder.uri, keys, names, before)
    pieces = similar_documents.slices(corpus.documents(), comparison_of(step))
    sizes = work.folder.sizes(step.key)
    todo = [piece for piece in pieces if pairs_name(piece) not in sizes]
    note = f"comparing documents, {step.name}"
    work.progress(note, len(pieces) - len(todo), len(pieces) + 1)
    corpus_ref = ray.put(corpus)
    uri = work.folder.uri

    def task(row: dict[str, Any]) -> None:
        write_pairs(ray.get(corpus_ref), step, similar_documents.Slice(*row["piece"]))

    rows = [{"piece": list(piece)} for piece in todo]
    for done in run_tasks(task, rows, uri):
        work.progress(note, len(pieces) - len(todo) + done, len(pieces) + 1)
    parts = [to_json(part) for part in work.parts]
    run_alone(_choose, uri, corpus_ref, step, (pieces, parts))
    work.progress(note, len(pieces) + 1, len(pieces) + 1)


def _choose(
    corpus: Corpus, step: PlannedStep, signature_pieces: tuple[list[similar_documents.Slice], list[str]]
) -> None:
    """Decide about the texts of these pieces, which consist of these parts."""
    pieces, parts = signature_pieces
    decide_alike(corpus, step, pieces, [from_json(part) for part in parts])


def _compare_others(work: Work, step: PlannedStep) -> list[str]:
    """Write the comparison data of text that is not trained on, and return its files."""
    texts = comparison_sources(step.rule, work.cleaning.held_out)
    if not texts:
        return []
    files = sources.resolve(texts, f"data.clean.{step.name}.against", work.cleaning.on_error)
    parts = aligned(sources.cut(files, OTHER_PART_BYTES))
    before = work.cleaning.changing(step)
    uri = work.folder.uri
    key = other_key(step, before)
    sizes = work.folder.sizes(key)
    rows = [{"part": to_json(part)} for part in parts if f"{part_key(part)}.bin" not in sizes]

    def task(row: dict[str, Any]) -> None:
        compare_part(uri, step, before, key, from_json(row["part"]))

    for _ in run_tasks(task, rows, uri):
        pass
    return [compared_name(key, part_key(part)) for part in parts]
