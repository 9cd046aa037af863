"""One pass over one part: the text is read once, and each step judges the documents that earlier steps kept."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import cleaning_code
from orchestrator.data.clean import decisions, decontaminate, document_rules, signatures
from orchestrator.data.clean.decisions import Decision
from orchestrator.data.clean.document_rules import Decide, Row, needs_extra
from orchestrator.data.clean.documents import texts
from orchestrator.data.clean.plan import BY_DATATROVE, CHANGE_TEXT, CORPUS, Cleaning, PlannedStep
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.words import plain_words
from orchestrator.data.sources import Part
from orchestrator.data.sources.identity import part_key
from orchestrator.data.store.data_folder import DataFolder

FOLDER = "clean"
"""The folder of all decisions in a cache."""
EMPTY = "nothing is left"


@lru_cache(maxsize=32)
def decide_of(uri: str, step: PlannedStepJson) -> Decide:
    """Return the function that judges documents for a step. Cached, because a model takes long to load.

    Raises InputError.
    """
    folder = DataFolder(uri)
    planned = PlannedStep(*json.loads(step))
    rule = planned.rule
    name = planned.name
    if name == "url":
        lists = json.loads(folder.read(f"{planned.key}/lists.json") or b"{}")
        return document_rules.url(rule, {key: frozenset(entries) for key, entries in lists.items()})
    if name == "decontaminate":
        return decontaminate.decontaminate(folder, planned)
    rules: Any = document_rules
    if name in BY_DATATROVE:
        needs_extra(name, "datatrove.utils.text", "clean")
        from orchestrator.data.clean import datatrove_rules as rules
    if planned.code and cleaning_code(rule) != planned.code:
        raise InputError(
            "is another on this node", f"data.clean.own {rule.function}", "install the same code everywhere"
        )
    made: Decide = getattr(rules, name)(rule)
    return made


PlannedStepJson = str
"""A step as JSON, which can be a key of the cache."""


def _decide(uri: str, step: PlannedStep) -> Decide:
    return decide_of(uri, json.dumps([step.name, step.options, step.key, step.compared, step.code]))


class _Comparing:
    """Collects the comparison data of a part, one kept document after another."""

    def __init__(self, step: PlannedStep) -> None:
        self.step = step
        self._documents: list[int] = []
        self._sizes: list[int] = []
        self._exact: list[bytes] = []
        self._keys: list[np.ndarray] = []
        self._signatures: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._waiting = 0
        self._words: list[bool] = []
        self._hashes = signatures.WordHashes()

    def add(self, number: int, text: str, size: int) -> None:
        """Add a document that all steps so far keep."""
        rows: Sequence[int] | np.ndarray = ()
        if self.step.name == "exact_duplicates":
            self._exact.append(xxhash.xxh3_128_digest(text.encode()))
        else:
            rows = self._hashes.of_ngrams(plain_words(text), self.step.options["words"])
            self._rows.append(rows)
            self._waiting += len(rows)
            if self._waiting >= signatures.BATCH:
                self._sign()
        self._words.append(self.step.name == "exact_duplicates" or len(rows) > 0)
        self._documents.append(number)
        self._sizes.append(min(size, 2**32 - 1))

    def _sign(self) -> None:
        rule = self.step.rule
        how = signatures.comparison(rule.threshold, rule.hashes)
        keys, signed = signatures.minhash(self._rows, rule.hashes, rule.seed, how.bands)
        self._keys.append(keys)
        self._signatures.append(signed)
        self._rows = []
        self._waiting = 0

    def write(self, folder: DataFolder, key: str, part: str) -> None:
        """Store the comparison data."""
        if self.step.name == "exact_duplicates":
            keys, signed = signatures.exact(self._exact)
        else:
            self._sign()
            keys = np.concatenate(self._keys)
            signed = np.concatenate(self._signatures)
        documents = np.array(self._documents, np.uint32)
        sizes = np.array(self._sizes, np.uint32)
        signatures.write(
            folder,
            compared_name(key, part),
            documents=documents,
            sizes=sizes,
            keys=keys,
            signatures=signed,
            words=np.array(self._words, bool),
        )


def compared_name(key: str, part: str) -> str:
    """Return the file name of a part's comparison data."""
    return f"{key}/{part}.bin"


def decide_part(uri: str, cleaning: Cleaning, number: int, part: Part) -> None:
    """Make the missing decisions of pass `number` on one part, and store them in the folder `uri`.

    Raises InputError.
    """
    os.environ["RAYON_NUM_THREADS"] = "1"  # a task has one CPU
    folder = DataFolder(uri)
    name = part_key(part)
    passes = cleaning.passes()
    steps = [step for step in passes[number] if step.name not in CORPUS]
    comparing = [_Comparing(step) for step in passes[number] if step.name in CORPUS]
    mask = kept_of(folder, passes[number - 1][-1].key, name) if number else None
    while steps and (stored := decisions.read(folder, steps[0].key, name)) is not None:
        mask = stored.kept
        steps = steps[1:]
    decided = _decide_all(uri, cleaning, steps=steps, comparing=comparing, mask=mask, part=part)
    for step, decision in zip(steps, decided, strict=True):
        decisions.write(folder, step.key, name, decision)
    for compared in comparing:
        compared.write(folder, compared.step.compared, name)


def _decide_all(
    uri: str,
    cleaning: Cleaning,
    steps: Sequence[PlannedStep],
    comparing: Sequence[_Comparing],
    mask: np.ndarray | None,
    part: Part,
) -> list[Decision]:
    """Return the decisions of `steps` on the documents in `mask`. Earlier steps of the pass are already decided."""
    todo = [(_decide(uri, step), Decision(np.zeros(0, bool))) for step in steps]
    first = steps[0] if steps else comparing[0].step if comparing else None
    before = changes(uri, cleaning, first)
    count = 0
    kept_numbers: list[list[int]] = [[] for _ in todo]
    for count, (text, row) in enumerate(texts(part, cleaning.columns), 1):
        if mask is not None and not mask[count - 1]:
            continue
        text = changed(text, row, before, part)
        size = len(text.encode())
        for (decide, decision), numbers in zip(todo, kept_numbers, strict=True):
            decision.documents += 1
            decision.bytes += size
            after = decide(text, row)
            after = after or Removed(EMPTY)
            if isinstance(after, Removed):
                decision.remove(text, size, after.reason)
                break
            if after is not text and after != text:
                decision.changed += 1
                text = after
                size = len(after.encode())
            decision.bytes_after += size
            numbers.append(count - 1)
        else:
            for compared in comparing:
                compared.add(count - 1, text, size)
    for (_, decision), numbers in zip(todo, kept_numbers, strict=True):
        decision.kept = np.zeros(count, bool)
        decision.kept[numbers] = True
    return [decision for _, decision in todo]


def changes(uri: str, cleaning: Cleaning, until: PlannedStep | None) -> list[Decide]:
    """Return the steps before `until` that change text; all such steps if it is None."""
    result = []
    for step in cleaning.steps:
        if step == until:
            break
        if step.name in CHANGE_TEXT:
            result.append(_decide(uri, step))
    return result


def changed(text: str, row: Row, steps: Sequence[Decide], part: Part) -> str:
    """Return a document after these steps, which keep it. Raises InputError if a step now removes it."""
    for decide in steps:
        after = decide(text, row)
        if isinstance(after, Removed):
            problem = "a step of data.clean keeps a document and removes it when it is asked again"
            raise InputError(problem, part[0].file.uri, "make the function depend on its arguments alone")
        text = after
    return text


def compare_part(uri: str, step: PlannedStep, before: Sequence[PlannedStep], key: str, part: Part) -> None:
    """Store the comparison data of a part of text that is not trained on under `key`, after the steps `before` changed
    it.

    A document that one of these steps would remove is compared in its form before that step.
    """
    os.environ["RAYON_NUM_THREADS"] = "1"
    comparing = _Comparing(step)
    steps = [_decide(uri, earlier) for earlier in before]
    for number, (text, row) in enumerate(texts(part)):
        for decide in steps:
            after = decide(text, row)
            if isinstance(after, Removed) or not after:
                break
            text = after
        comparing.add(number, text, len(text.encode()))
    comparing.write(DataFolder(uri), key, part_key(part))


def kept_of(folder: DataFolder, key: str, part: str) -> np.ndarray:
    """Return which documents of a part are left after a step. Raises InputError if the decision is gone."""
    decision = decisions.read(folder, key, part)
    if decision is None:
        raise InputError(
            "is missing or damaged", folder.at(decisions.name(key, part)), "run the same command again"
        )
    return decision.kept
