"""Deciding on all documents of the sources, with Ray Data: part by part, and between passes on all documents at once.

    <cache>/clean/<key of a step>/<key of a part>.json    what the step decided of the part
    <cache>/clean/<key>/<key of a part>.bin               what its documents are compared by
    <cache>/clean/<key>/<band>-<first>.pairs              documents that are alike, by keys in one slice

Each file is written once; what is there is not done again, whoever made it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from orchestrator.config.clean import Url
from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean import clusters, decisions, grams
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.clean.dedup_decisions import (
    Corpus,
    comparison_of,
    decide_alike,
    other_key,
    pairs_name,
    write_pairs,
)
from orchestrator.data.clean.documents import aligned
from orchestrator.data.clean.passes import FOLDER, compare_part, compared_name, decide_part
from orchestrator.data.clean.plan import CORPUS, Cleaning, PlannedStep, lists_of, others
from orchestrator.data.prepare.part_tasks import run_alone, run_tasks, together
from orchestrator.data.progress import Progress
from orchestrator.data.sources import Part, from_json, to_json
from orchestrator.data.sources.identity import part_key
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.read_at_once import read_at_once

OTHER_PART_BYTES = 2**25


@dataclass(frozen=True)
class Work:
    """What is to be cleaned: parts that end with a document, and where decisions are."""

    folder: DataFolder
    cleaning: Cleaning
    parts: Sequence[Part]
    progress: Progress

    def keys(self) -> list[str]:
        """The keys of the parts."""
        return [part_key(part) for part in self.parts]


def clean(cleaning: Cleaning, parts: Sequence[Part], cache: str, progress: Progress) -> CleanedText:
    """Decide on all documents of `parts`, as far as it is not decided; returns what is left. Ray must be initialised.

    Raises InputError as reading the text does, and for steps that cannot be used.
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
    """Store what tasks need of steps that read other files."""
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
        what = f"goes by a column with an address, which a text file has not: {found}"
        raise InputError(what, "data.clean.url", "clean these sources in a job of their own")


def _write_index(uri: str, step: PlannedStep) -> None:
    grams.write_index(DataFolder(uri), step)


def _decide_parts(work: Work, number: int, steps: Sequence[PlannedStep]) -> None:
    """Pass `number` of all parts that lack a decision of it."""
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
    uri, plan = work.folder.uri, work.cleaning.to_json()
    what = f"cleaning, pass {number + 1} of {len(work.cleaning.passes())}"
    work.progress(what, len(keys) - len(todo), len(keys))

    def task(row: dict[str, Any]) -> None:
        decide_part(uri, Cleaning.from_json(plan), number, from_json(row["part"]))

    rows = [{"part": to_json(work.parts[n])} for n in todo]
    most = together(max(sum(span.bytes for span in part) for part in work.parts))
    for done in run_tasks(task, rows, uri, together=most):
        work.progress(what, len(keys) - len(todo) + done, len(keys))


def undecided(folder: DataFolder, key: str, parts: Sequence[str]) -> set[str]:
    """Those of the parts that have no sound decision of a step."""
    there = folder.sizes(key)
    found = {part for part in parts if f"{part}.json" not in there}
    asked = sorted(set(parts) - found)
    read = read_at_once(partial(decisions.read, folder, key), asked)
    return found | {part for part, decision in zip(asked, read, strict=True) if decision is None}


def _compare(work: Work, step: PlannedStep, before: str) -> None:
    """Decide on all documents at once. `before` is the key of the step before, empty if there is none."""
    keys = work.keys()
    if not undecided(work.folder, step.key, keys):
        return
    names = [*(compared_name(step.compared, key) for key in keys), *_compare_others(work, step)]
    corpus = Corpus(work.folder.uri, keys, names, before)
    pieces = clusters.slices(corpus.documents(), comparison_of(step))
    there = work.folder.sizes(step.key)
    todo = [piece for piece in pieces if pairs_name(piece) not in there]
    told = f"comparing documents, {step.name}"
    work.progress(told, len(pieces) - len(todo), len(pieces) + 1)
    given = ray.put(corpus)
    uri = work.folder.uri

    def task(row: dict[str, Any]) -> None:
        write_pairs(ray.get(given), step, clusters.Slice(*row["piece"]))

    rows = [{"piece": list(piece)} for piece in todo]
    for done in run_tasks(task, rows, uri):
        work.progress(told, len(pieces) - len(todo) + done, len(pieces) + 1)
    parts = [to_json(part) for part in work.parts]
    run_alone(_choose, uri, given, step, pieces, parts)
    work.progress(told, len(pieces) + 1, len(pieces) + 1)


def _choose(corpus: Corpus, step: PlannedStep, pieces: list[clusters.Slice], parts: list[str]) -> None:
    decide_alike(corpus, step, pieces, [from_json(part) for part in parts])


def _compare_others(work: Work, step: PlannedStep) -> list[str]:
    """Make what the documents of other text are compared by; returns the files."""
    texts = others(step.rule, work.cleaning.held_out)
    if not texts:
        return []
    files = sources.resolve(texts, f"data.clean.{step.name}.against", work.cleaning.on_error)
    parts, before, uri = (
        aligned(sources.cut(files, OTHER_PART_BYTES)),
        work.cleaning.changing(step),
        work.folder.uri,
    )
    key = other_key(step, before)
    there = work.folder.sizes(key)
    rows = [{"part": to_json(part)} for part in parts if f"{part_key(part)}.bin" not in there]

    def task(row: dict[str, Any]) -> None:
        compare_part(uri, step, before, key, from_json(row["part"]))

    for _ in run_tasks(task, rows, uri):
        pass
    return [compared_name(key, part_key(part)) for part in parts]
