"""The steps that clean the text of a job before tokenisation, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_serializer, model_validator

from orchestrator.config.strict import Positive, StrictModel

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Names = str | list[str]


@dataclass(frozen=True)
class Traits:
    """What the passes need to know of a step. Each class of options has them as `TRAITS`.

    Attributes:
        changes_text: whether the step may change a document's text, so that later passes apply it again.
        compares_all: whether it compares all documents.
        by_datatrove: whether datatrove decides.
        simplifies: whether it compares texts as datatrove simplifies them.
    """

    changes_text: bool
    compares_all: bool = False
    by_datatrove: bool = False
    simplifies: bool = False


class OtherText(StrictModel):
    """Files of text that is not trained on."""

    uri: str = Field(description="a path, glob or fsspec URI, as in data.sources")
    field: str = Field(default="text", description="the column of the text, a path into it or a template")
    format: Literal["text", "jsonl", "parquet", "csv", "tsv", "arrow", "tar"] | None = Field(
        default=None, description="format; unset: follows from the file's ending"
    )


class Normalize(StrictModel):
    """Rewrite text in one Unicode form."""

    TRAITS: ClassVar = Traits(changes_text=True)

    form: Literal["NFC", "NFKC", "NFD", "NFKD"] = Field(default="NFC", description="the Unicode form")
    fix: bool = Field(
        default=False,
        description="repair text that was decoded wrongly, such as â€™ (needs the extra `data`)",
    )


class Language(StrictModel):
    """Keep documents in certain languages."""

    TRAITS: ClassVar = Traits(changes_text=False)

    keep: list[str] = Field(min_length=1, description="ISO 639 codes, as in [en, de]")
    min_score: Share = Field(default=0.0, description="minimum probability of the detected language")
    characters: Positive = Field(default=2000, description="characters at a document's beginning to look at")


class GopherQuality(StrictModel):
    """The quality rules of Gopher (Rae et al., 2021, table A1). 0 or null disables a rule."""

    TRAITS: ClassVar = Traits(changes_text=False, by_datatrove=True)

    min_words: int | None = Field(default=50, ge=0, description="minimum words of a document")
    max_words: int | None = Field(default=100_000, ge=0, description="maximum words of a document")
    min_word_length: float | None = Field(default=3.0, ge=0, description="minimum mean word length")
    max_word_length: float | None = Field(default=10.0, ge=0, description="maximum mean word length")
    max_symbols: Share | None = Field(default=0.1, description="maximum # or ellipses per word")
    max_bullet_lines: Share | None = Field(
        default=0.9, description="maximum share of lines that begin with a bullet"
    )
    max_ellipsis_lines: Share | None = Field(
        default=0.3, description="maximum share of lines that end with an ellipsis"
    )
    min_alphabetic: Share | None = Field(default=0.8, description="minimum share of words with a letter")
    min_stop_words: int | None = Field(default=2, ge=0, description="minimum number of different stop_words")
    stop_words: list[str] = Field(
        default=["the", "be", "to", "of", "and", "that", "have", "with"],
        description="frequent words of running text in the text's language",
    )


Grams = list[tuple[Annotated[int, Field(ge=2, le=20)], Share]]


class GopherRepetition(StrictModel):
    """The repetition rules of Gopher (Rae et al., 2021, table A1): maximum shares. 0 or null disables a rule."""

    TRAITS: ClassVar = Traits(changes_text=False, by_datatrove=True)

    lines: Share | None = Field(default=0.3, description="share of lines that repeat an earlier line")
    paragraphs: Share | None = Field(
        default=0.3, description="share of paragraphs that repeat an earlier paragraph"
    )
    line_characters: Share | None = Field(default=0.2, description="share of characters in repeated lines")
    paragraph_characters: Share | None = Field(
        default=0.2, description="share of characters in repeated paragraphs"
    )
    top: Grams = Field(
        default=[(2, 0.2), (3, 0.18), (4, 0.16)],
        description="share of characters in the most frequent n-gram",
    )
    repeated: Grams = Field(
        default=[(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)],
        description="share of characters in repeated n-grams",
    )


class C4(StrictModel):
    """The rules of C4 (Raffel et al., 2020): drop lines that are not sentences, then documents with too few
    sentences.
    """

    TRAITS: ClassVar = Traits(changes_text=True, by_datatrove=True)

    citations: bool = Field(default=True, description="remove [1], [edit] and [citation needed]")
    terminal_punctuation: bool = Field(default=True, description="drop lines that do not end a sentence")
    min_sentences: int = Field(default=5, ge=0, description="minimum sentences of a document")
    min_words_per_line: int = Field(default=3, ge=0, description="drop lines with fewer words")
    max_word_length: int | None = Field(default=1000, ge=1, description="drop lines with a longer word")
    lorem_ipsum: bool = Field(default=True, description="remove documents that contain it")
    javascript: bool = Field(default=True, description="drop lines that mention it")
    curly_bracket: bool = Field(default=True, description="remove documents that contain one")
    policy: bool = Field(default=True, description="drop lines about cookies and terms of use")


class FineWeb(StrictModel):
    """The rules that FineWeb adds (Penedo et al., 2024)."""

    TRAITS: ClassVar = Traits(changes_text=False, by_datatrove=True)

    min_punctuated_lines: Share = Field(
        default=0.12, description="minimum share of lines that end a sentence"
    )
    max_short_lines: Share = Field(
        default=0.67, description="maximum share of lines with at most short_line characters"
    )
    short_line: int = Field(default=30, ge=0, description="length of a short line in characters")
    max_repeated: Share = Field(default=0.01, description="maximum share of characters in repeated lines")
    max_line_ends: float = Field(default=0.3, ge=0, description="maximum line ends per word")


class Url(StrictModel):
    """Remove documents by their address in a column. Lists are given here, or as a file with one entry a line."""

    TRAITS: ClassVar = Traits(changes_text=False)
    LISTS: ClassVar = ("domains", "urls", "words", "soft_words", "parts")

    column: str = Field(default="url", description="the column of the address")
    domains: Names = Field(default=[], description="hosts to remove, with their subdomains")
    urls: Names = Field(default=[], description="whole addresses")
    words: Names = Field(default=[], description="words in an address; one of them removes the document")
    soft_words: Names = Field(
        default=[], description="words in an address; soft_limit of them remove the document"
    )
    soft_limit: int = Field(default=2, ge=1, description="number of soft_words that removes a document")
    parts: Names = Field(
        default=[], description="texts to find anywhere in the letters and digits of an address"
    )


class Pii(StrictModel):
    """Personal data in the text."""

    TRAITS: ClassVar = Traits(changes_text=True, by_datatrove=True)

    kinds: list[Literal["email", "ip", "phone"]] = Field(
        default=["email", "ip"], min_length=1, description="what is looked for"
    )
    action: Literal["replace", "drop"] = Field(
        default="replace", description="replace what is found, or remove the document"
    )
    private_ips: bool = Field(default=False, description="also look for addresses that are not public")


class ExactDuplicates(StrictModel):
    """Keep the first of several documents with the same text, in the order of the sources."""

    TRAITS: ClassVar = Traits(changes_text=False, compares_all=True)

    against: list[OtherText] = Field(
        default_factory=list, description="text to keep out of training; data.validation is added"
    )


class NearDuplicates(StrictModel):
    """Keep one document of each cluster of similar documents (MinHash, Broder 1997) over all sources."""

    TRAITS: ClassVar = Traits(changes_text=False, compares_all=True, simplifies=True)

    threshold: float = Field(default=0.8, gt=0.0, lt=1.0, description="minimum Jaccard similarity of a pair")
    words: int = Field(default=5, ge=1, le=50, description="length of the word n-grams to compare")
    hashes: int = Field(default=128, ge=16, le=1024, description="number of hashes in a signature")
    keep: Literal["longest", "first"] = Field(
        default="longest",
        description="keep the longest document of a cluster, or the first in the order of the sources",
    )
    seed: int = Field(default=1, ge=0, lt=2**32, description="seed of the hash functions")
    against: list[OtherText] = Field(
        default_factory=list, description="text to keep out of training; data.validation is added"
    )


class Decontaminate(StrictModel):
    """Remove documents that share word n-grams with evaluation text."""

    TRAITS: ClassVar = Traits(changes_text=False, simplifies=True)

    sources: list[OtherText] = Field(min_length=1, description="the evaluation text")
    words: int = Field(default=12, ge=1, le=200, description="words in a row")


class Own(StrictModel):
    """A function `fn(text, row) -> text | None`: None removes the document."""

    TRAITS: ClassVar = Traits(changes_text=True)

    function: str = Field(pattern=r"^[\w.]+:\w+$", description="module:function")
    options: dict[str, Any] = Field(default_factory=dict, description="further keyword arguments")
    columns: list[str] = Field(
        default_factory=list,
        description="columns, or paths into them, to pass in the row, without nulls; empty: none",
    )


def columns_of_rule(rule: Any) -> list[str]:
    """Return the columns of a row that a step's options name."""
    return [rule.column] if isinstance(rule, Url) else rule.columns if isinstance(rule, Own) else []


def columns_of_steps(steps: Sequence[CleanStep]) -> dict[str, str]:
    """Return the columns of a row that the steps name, each with its key in the job file."""
    keys = {"url": "data.clean.url.column", "own": "data.clean.own.columns"}
    return {column: keys[step.name] for step in steps for column in columns_of_rule(step.options)}


class CleanStep(StrictModel):
    """One step: its name and its options."""

    normalize: Normalize | None = None
    language: Language | None = None
    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None
    c4: C4 | None = None
    fineweb: FineWeb | None = None
    url: Url | None = None
    pii: Pii | None = None
    exact_duplicates: ExactDuplicates | None = None
    near_duplicates: NearDuplicates | None = None
    decontaminate: Decontaminate | None = None
    own: Own | None = None

    @model_validator(mode="before")
    @classmethod
    def may_be_a_name(cls, value: Any) -> Any:
        """A step without options may be given as its name alone."""
        if isinstance(value, str):
            return {value: {}}
        if isinstance(value, dict):
            return {
                key: {} if options is None and len(value) == 1 else options for key, options in value.items()
            }
        return value

    @model_validator(mode="after")
    def is_one_step(self) -> CleanStep:
        """Check that exactly one step is named."""
        named = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"give one step with its options, and not {', '.join(named) or 'none'}")
        return self

    @model_serializer(mode="plain")
    def named(self) -> dict[str, Any]:
        """Return the step as in a job file, with all its options."""
        return {self.name: self.options.model_dump(mode="json")}

    def located(self, relocated: Callable[[str], str]) -> CleanStep:
        """Return the step with each path replaced by the result of `relocated`."""
        changes: dict[str, Any] = {}
        for key in ("against", "sources"):
            if texts := getattr(self.options, key, None):
                changes[key] = [text.model_copy(update={"uri": relocated(text.uri)}) for text in texts]
        if isinstance(self.options, Url):
            path_options = {key: getattr(self.options, key) for key in Url.LISTS}
            changes |= {key: relocated(path) for key, path in path_options.items() if isinstance(path, str)}
        return self.model_copy(update={self.name: self.options.model_copy(update=changes)})

    @property
    def name(self) -> str:
        """Return the step's name in the job file."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def options(self) -> Any:
        """Return the step's options."""
        return getattr(self, self.name)


TRAITS: dict[str, Traits] = {
    name: get_args(field.annotation)[0].TRAITS for name, field in CleanStep.model_fields.items()
}
"""The traits of each step by its name in the job file."""
