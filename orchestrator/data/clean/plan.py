"""The cleaning steps of a job with their keys. Equal keys mean equal decisions on equal documents.

The key of a step covers all steps up to it. The key of a step that compares all documents covers all sources as well.
Before such a step, decisions depend on one part only, so added files do not invalidate decisions on other parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import cleaning_code
from orchestrator.data import sources
from orchestrator.data.clean import signatures
from orchestrator.data.clean.config import (
    TRAITS,
    CleanStep,
    Decontaminate,
    Language,
    Own,
    Url,
    columns_of_rule,
)
from orchestrator.data.clean.document_rules import language, needs_extra, unusable
from orchestrator.data.config import DataSpec, Source
from orchestrator.data.sources import SourceFile
from orchestrator.data.sources.identity import identity_of
from orchestrator.data.store import manifest
from orchestrator.storage.input_files import open_input

CORPUS = tuple(name for name, traits in TRAITS.items() if traits.compares_all)
"""Steps that compare all documents."""
CHANGE_TEXT = tuple(name for name, traits in TRAITS.items() if traits.changes_text)
"""Steps that may change a document's text."""
BY_DATATROVE = tuple(name for name, traits in TRAITS.items() if traits.by_datatrove)
"""Steps that datatrove decides."""
SIMPLIFIED = tuple(name for name, traits in TRAITS.items() if traits.simplifies)
"""Steps that compare texts as datatrove simplifies them."""
VERSION = 2
"""Increase it when a rule's decisions change, as they may with another version of datatrove."""


@dataclass(frozen=True)
class PlannedStep:
    """A step with its options as in the job file.

    Attributes:
        key: key of the step's decisions.
        compared: key of the comparison data of the documents; empty unless the step compares all documents.
        code: hash of the user's function; empty for other steps.
    """

    name: str
    options: dict[str, Any]
    key: str
    compared: str = ""
    code: str = ""

    @property
    def rule(self) -> Any:
        """The options as the job's configuration model."""
        return CleanStep.model_validate({self.name: self.options}).options


@dataclass(frozen=True)
class Cleaning:
    """The steps in order; `held_out` is text that must not be trained on."""

    steps: tuple[PlannedStep, ...]
    held_out: tuple[Source, ...] = ()
    on_error: str = "fail"

    @property
    def key(self) -> str:
        """The key of all steps, which is part of the fingerprint of prepared data."""
        return self.steps[-1].key

    @property
    def code(self) -> dict[str, str]:
        """The hashes of the user's functions, by `module:name`."""
        return {step.options["function"]: step.code for step in self.steps if step.code}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a row that the steps need besides the text."""
        return tuple(dict.fromkeys(column for step in self.steps for column in columns_of_rule(step.rule)))

    def changing(self, until: PlannedStep) -> tuple[PlannedStep, ...]:
        """Return the steps before `until` that change a text independently of its row. Other text is compared after
        them.
        """
        before = self.steps[: self.steps.index(until)]
        return tuple(step for step in before if step.name in CHANGE_TEXT and step.name != "own")

    def passes(self) -> list[tuple[PlannedStep, ...]]:
        """Return the steps divided into passes. A pass reads the text once, and ends after steps that compare all
        documents.
        """
        result: list[tuple[PlannedStep, ...]] = []
        current: tuple[PlannedStep, ...] = ()
        for step in self.steps:
            if current and current[-1].name in CORPUS and step.name not in CORPUS:
                result = [*result, current]
                current = ()
            current = (*current, step)
        return [*result, current] if current else result

    def to_json(self) -> str:
        """Serialise the plan, for a task on any node."""
        held_out = [text.model_dump() for text in self.held_out]
        return json.dumps([[asdict(step) for step in self.steps], held_out, self.on_error])

    @classmethod
    def from_json(cls, text: str) -> Cleaning:
        """Restore a plan; the inverse of `to_json`."""
        steps, held_out, on_error = json.loads(text)
        return cls(tuple(PlannedStep(**s) for s in steps), tuple(Source(**s) for s in held_out), on_error)


def cleaning_of(data: DataSpec, files: Sequence[SourceFile], part_bytes: int) -> Cleaning | None:
    """Return the steps of a job over these files; None without any. Raises InputError for unusable steps."""
    if not data.clean:
        return None
    validation = data.validation.sources if data.validation else []
    held_out = tuple(source for source in validation if isinstance(source.field, str))
    corpus_key = [part_bytes, _in_order(files)]
    key = _hash([VERSION, manifest.FORMAT])
    steps = []
    local = key
    for step in data.clean:
        options = step.options.model_dump(mode="json")
        shown = [step.name, _without_places(options), _dependencies(step, held_out, data.on_error)]
        if step.name in CORPUS:
            # comparison data depends on earlier steps that judge one document, not on earlier comparisons
            compared = _hash([local, step.name, _how(step), "compared"])
            key = _hash([key, shown, corpus_key])
            steps.append(PlannedStep(step.name, options, key, compared))
        else:
            key = local = _hash([key, shown])
            code = cleaning_code(step.options) if isinstance(step.options, Own) else ""
            steps.append(PlannedStep(step.name, options, key, code=code))
    return Cleaning(tuple(steps), held_out, data.on_error)


def check_steps(data: DataSpec) -> None:
    """Raise InputError if a step lacks a library, file, function or column that it needs."""
    for number, source in enumerate(data.sources if data.clean else ()):
        if not isinstance(source.field, str):
            hint = "leave it out, and clean the pairs before"
            raise InputError(f"cleans text, but data.sources.{number} holds pairs", "data.clean", hint)
    for step in data.clean:
        if isinstance(step.options, Language):
            language(step.options)
        if step.name in (*BY_DATATROVE, *SIMPLIFIED):
            needs_extra(step.name, "datatrove.utils.text", "clean")
    cleaning_of(data, [], 0)


def lists_of(rule: Url) -> dict[str, list[str]]:
    """Return the lists of the step `url`; a list that is given as a file is read. Raises InputError."""
    result: dict[str, list[str]] = {}
    for name in Url.LISTS:
        listed: str | list[str] = getattr(rule, name)
        if isinstance(listed, str):
            lines = _read(listed, f"data.clean.url.{name}").splitlines()
            listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        for entry in listed:
            if why := unusable(name, entry):
                raise InputError(f"{entry!r} {why}", f"data.clean.url.{name}", "change it or leave it out")
        result[name] = sorted(set(listed))
    if not any(result.values()):
        raise InputError("names nothing to remove", "data.clean.url", "give domains, urls, words or parts")
    return result


def _read(uri: str, where: str) -> str:
    try:
        with open_input(uri) as file:
            return file.read().decode("utf-8-sig")
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot be read ({error})", f"{where} {uri}", "give a file of UTF-8 text") from None


def comparison_sources(rule: Any, held_out: Sequence[Source]) -> list[Source]:
    """Return the text that documents are compared with besides the sources."""
    comparison_texts = rule.sources if isinstance(rule, Decontaminate) else rule.against
    named = [Source(uri=text.uri, field=text.field, format=text.format) for text in comparison_texts]
    if isinstance(rule, Decontaminate):
        return named
    return [*named, *(text for text in held_out if text not in named)]


def _dependencies(step: CleanStep, held_out: Sequence[Source], on_error: str) -> Any:
    """Return what a step depends on besides its options. Raises InputError if something is missing."""
    rule = step.options
    if step.name in CORPUS or isinstance(rule, Decontaminate):
        files = sources.resolve(comparison_sources(rule, held_out), f"data.clean.{step.name}", on_error)
        return [_how(step), _in_order(files)]
    if isinstance(rule, Url):
        return _hash(lists_of(rule))
    if isinstance(rule, Own):
        return cleaning_code(rule)
    if step.name == "language":
        return needs_extra("language", "py3langid").__version__
    if step.name == "normalize" and rule.fix:
        return needs_extra("normalize with fix", "ftfy").__version__
    return None


def _in_order(files: Sequence[SourceFile]) -> list[Any]:
    """Return what determines the numbers of parts and documents. A part never spans two sources."""
    return [[file.source, identity_of(file)] for file in files]


def _without_places(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without the locations of files: only their content counts."""
    result = {key: None if key in Url.LISTS else value for key, value in options.items()}
    for key in ("against", "sources"):
        if key in options:
            result[key] = [text["field"] for text in options[key]]
    return result


def _how(step: CleanStep) -> Any:
    """Return what a signature depends on; None for a step without signatures."""
    if step.name != "near_duplicates":
        return None
    rule = step.options
    return [rule.threshold, rule.words, rule.hashes, rule.seed, signatures.algorithm()]


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
