"""The steps that clean the text of a job before it is tokenised, in the order in which they are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from orchestrator.config.strict import Positive, StrictModel

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Names = str | list[str]


class OtherText(StrictModel):
    """Files of text that is not trained on."""

    uri: str = Field(description="a path, glob or fsspec URI, as in data.sources")
    field: str = Field(default="text", description="the column of the text, a path into it or a template")
    format: Literal["text", "jsonl", "parquet", "csv", "tsv", "arrow", "tar"] | None = Field(
        default=None, description="told by the file's ending if it is not said"
    )


class Normalize(StrictModel):
    """Rewrite text in one Unicode form."""

    form: Literal["NFC", "NFKC", "NFD", "NFKD"] = Field(default="NFC", description="the Unicode form")
    fix: bool = Field(
        default=False,
        description="repair text that was decoded wrongly, such as â€™ (needs the extra `data`)",
    )


class Language(StrictModel):
    """Keep documents in some languages."""

    keep: list[str] = Field(min_length=1, description="ISO 639 codes, as in [en, de]")
    min_score: Share = Field(default=0.0, description="least probability of the language that is found")
    characters: Positive = Field(default=2000, description="how much of a document's beginning is looked at")


class GopherQuality(StrictModel):
    """The quality rules of Gopher (Rae et al., 2021, table A1); 0 or null turns one off."""

    min_words: int | None = Field(default=50, ge=0, description="fewest words of a document")
    max_words: int | None = Field(default=100_000, ge=0, description="most words of a document")
    min_word_length: float | None = Field(default=3.0, ge=0, description="least mean length of a word")
    max_word_length: float | None = Field(default=10.0, ge=0, description="largest mean length of a word")
    max_symbols: Share | None = Field(default=0.1, description="# or ellipses for each word")
    max_bullet_lines: Share | None = Field(default=0.9, description="lines that begin with a bullet")
    max_ellipsis_lines: Share | None = Field(default=0.3, description="lines that end with an ellipsis")
    min_alphabetic: Share | None = Field(default=0.8, description="words with a letter")
    min_stop_words: int | None = Field(default=2, ge=0, description="so many different ones of stop_words")
    stop_words: list[str] = Field(
        default=["the", "be", "to", "of", "and", "that", "have", "with"],
        description="words that running text has, in the language of the text",
    )


Grams = list[tuple[Annotated[int, Field(ge=2, le=20)], Share]]


class GopherRepetition(StrictModel):
    """The repetition rules of Gopher (Rae et al., 2021, table A1): largest shares that are kept; 0 or null turns one
    off."""

    lines: Share | None = Field(default=0.3, description="lines that came before")
    paragraphs: Share | None = Field(default=0.3, description="paragraphs that came before")
    line_characters: Share | None = Field(default=0.2, description="characters of lines that came before")
    paragraph_characters: Share | None = Field(
        default=0.2, description="characters of paragraphs that came before"
    )
    top: Grams = Field(
        default=[(2, 0.2), (3, 0.18), (4, 0.16)], description="characters of the most frequent n words"
    )
    repeated: Grams = Field(
        default=[(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)],
        description="characters of all n words that came before",
    )


class C4(StrictModel):
    """The rules of C4 (Raffel et al., 2020): lines that are no sentences are dropped, then documents of too few."""

    citations: bool = Field(default=True, description="take [1], [edit] and [citation needed] out")
    terminal_punctuation: bool = Field(default=True, description="drop lines that do not end a sentence")
    min_sentences: int = Field(default=5, ge=0, description="fewest sentences of a document")
    min_words_per_line: int = Field(default=3, ge=0, description="drop lines with fewer words")
    max_word_length: int | None = Field(default=1000, ge=1, description="drop lines with a longer word")
    lorem_ipsum: bool = Field(default=True, description="remove documents that have it")
    javascript: bool = Field(default=True, description="drop lines that name it")
    curly_bracket: bool = Field(default=True, description="remove documents that have one")
    policy: bool = Field(default=True, description="drop lines on cookies and terms of use")


class FineWeb(StrictModel):
    """The rules that FineWeb adds (Penedo et al., 2024)."""

    min_punctuated_lines: Share = Field(default=0.12, description="lines that end a sentence")
    max_short_lines: Share = Field(default=0.67, description="lines of at most short_line characters")
    short_line: int = Field(default=30, ge=0, description="characters of a line that counts as short")
    max_repeated: Share = Field(default=0.01, description="characters of lines that came before")
    max_line_ends: float = Field(default=0.3, ge=0, description="line ends for each word")


class Url(StrictModel):
    """Remove documents by a column with their address. A list is given here, or as a file with one entry a line."""

    LISTS: ClassVar = ("domains", "urls", "words", "soft_words", "parts")

    column: str = Field(default="url", description="where a record has its address")
    domains: Names = Field(default=[], description="hosts; those below them are meant too")
    urls: Names = Field(default=[], description="whole addresses")
    words: Names = Field(default=[], description="words of an address, one of which is enough")
    soft_words: Names = Field(default=[], description="words of which soft_limit are enough")
    soft_limit: int = Field(default=2, ge=1, description="so many of soft_words are too many")
    parts: Names = Field(default=[], description="texts anywhere in the letters and digits of an address")


class Pii(StrictModel):
    """Personal data in the text."""

    kinds: list[Literal["email", "ip", "phone"]] = Field(
        default=["email", "ip"], min_length=1, description="what is looked for"
    )
    action: Literal["replace", "drop"] = Field(
        default="replace", description="replace what is found, or remove the document"
    )
    private_ips: bool = Field(default=False, description="also addresses that are not public")


class ExactDuplicates(StrictModel):
    """Keep the first of documents with the same text, in the order of the sources."""

    against: list[OtherText] = Field(
        default_factory=list, description="text that training must not have; that of data.validation is added"
    )


class NearDuplicates(StrictModel):
    """Keep one document of each cluster of similar ones (MinHash, Broder 1997) in all sources."""

    threshold: float = Field(default=0.8, gt=0.0, lt=1.0, description="least similarity (Jaccard) of a pair")
    words: int = Field(default=5, ge=1, le=50, description="words in a row that are compared")
    hashes: int = Field(default=128, ge=16, le=1024, description="numbers in a signature")
    keep: Literal["longest", "first"] = Field(
        default="longest", description="the longest of a cluster, or the first in the order of the sources"
    )
    seed: int = Field(default=1, ge=0, lt=2**32, description="of the hash functions")
    against: list[OtherText] = Field(
        default_factory=list, description="text that training must not have; that of data.validation is added"
    )


class Decontaminate(StrictModel):
    """Remove documents with words in a row that stand in evaluation text too."""

    sources: list[OtherText] = Field(min_length=1, description="the evaluation text")
    words: int = Field(default=12, ge=1, le=200, description="words in a row")


class Own(StrictModel):
    """A function `fn(text, row) -> text | None`: None removes the document."""

    function: str = Field(pattern=r"^[\w.]+:\w+$", description="module:function")
    options: dict[str, Any] = Field(default_factory=dict, description="more arguments, by name")
    columns: list[str] = Field(
        default_factory=list,
        description="columns that the row has, and paths into them, where they are not null; none if empty",
    )


class CleanStep(StrictModel):
    """One step, by its name, with its options."""

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
        """A step with no options may be its name alone, or have nothing after it."""
        if isinstance(value, str):
            return {value: {}}
        if isinstance(value, dict):
            return {
                key: {} if options is None and len(value) == 1 else options for key, options in value.items()
            }
        return value

    @model_validator(mode="after")
    def is_one_step(self) -> CleanStep:
        """Exactly one step is named."""
        named = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"give one step with its options, and not {', '.join(named) or 'none'}")
        return self

    @model_serializer(mode="plain")
    def named(self) -> dict[str, Any]:
        """The step as a job file has it, with all its options."""
        return {self.name: self.options.model_dump(mode="json")}

    def located(self, place: Callable[[str], str]) -> CleanStep:
        """The step with each path that it names as `place` makes it."""
        changes: dict[str, Any] = {}
        for key in ("against", "sources"):
            if texts := getattr(self.options, key, None):
                changes[key] = [text.model_copy(update={"uri": place(text.uri)}) for text in texts]
        if isinstance(self.options, Url):
            given = {key: getattr(self.options, key) for key in Url.LISTS}
            changes |= {key: place(path) for key, path in given.items() if isinstance(path, str)}
        return self.model_copy(update={self.name: self.options.model_copy(update=changes)})

    @property
    def name(self) -> str:
        """The step's name in the job file."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def options(self) -> Any:
        """The step's options."""
        return getattr(self, self.name)
