"""The data of a job: sources, tokenizer, and held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.config.fields import columns_of
from orchestrator.config.inputs import Changes, Input
from orchestrator.config.object_reference import ObjectReference, users_code
from orchestrator.config.records import SAMPLES
from orchestrator.config.redact import bare_places
from orchestrator.config.strict import StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.clean.config import CleanStep
from orchestrator.data.encoding.config import Train, TrainBpe
from orchestrator.data.samples.mixture.config import MixtureSpec, adds_up
from workloads.own.object_reference import is_object_reference

MIXED = ("share", "max_passes")
"""Keys of a source for its part in a mixture. Runs of earlier versions lack them."""
OWN = ("own", "fingerprint")
"""Keys of a source whose rows a function of the user's own makes."""


def _files_or_own(schema: dict[str, Any]) -> None:
    """Adapt the JSON Schema: a source has files, or a function that makes its rows."""
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": [*OWN]}]


def own_rows(function: Any, fingerprint: Any) -> str:
    """Return where a function's rows are, as a pattern of files below data.cache."""
    call = {"use": function, "options": {}} if isinstance(function, str) else dict(function)
    named = json.dumps([call.get("use"), call.get("options") or {}, fingerprint], sort_keys=True)
    digest = blake2b(named.encode(), digest_size=6).hexdigest()
    return f"own-{str(call.get('use')).rpartition(':')[2]}-{digest}/*.parquet"


class Source(StrictModel):
    """Files of text or of records, and the number of passes over them in one epoch."""

    ADDED_LATER: ClassVar[tuple[str, ...]] = (*MIXED, "format", *OWN)
    model_config = ConfigDict(json_schema_extra=_files_or_own)

    uri: str | Annotated[list[str], Field(min_length=1)] = Field(
        description="files to read: a path, a glob (`**` enters folders), an fsspec URI, a folder, a file ending "
        "in .list with one name a line, or a list of these. Files ending in .jsonl, .parquet, .csv, "
        ".tsv, .arrow or .tar (WebDataset) have rows; other files are text. All but .parquet and "
        ".arrow may be compressed (.gz, .bz2, .xz, .zst). Also a folder written by Hugging Face's "
        "Dataset.save_to_disk"
    )
    weight: float = Field(default=1.0, gt=0.0, le=1e6, description="passes over this source in one epoch")
    field: str | tuple[str, str] | dict[str, str] = Field(
        default="text",
        description="for files with rows: the column of the text, a path into it such as a.b[0].text, or a "
        "template over several columns such as '{title}: {body}'. Two of these for pairs of source "
        "and target. For records, a column for each input of the objective, as in {text: review, "
        "label: stars}",
    )
    format: Literal["text", "jsonl", "parquet", "csv", "tsv", "arrow", "tar"] | None = Field(
        default=None, description="format of the files, if their names do not show it"
    )
    share: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="share of the training tokens that come from this source, instead of weight; give all "
        "sources a share, or none",
    )
    max_passes: float | None = Field(
        default=None,
        ge=1.0,
        description="maximum passes over this source in a mixture by shares; afterwards the other sources "
        "replace it",
    )

    own: ObjectReference | None = Field(
        default=None,
        description="your own pipeline as module:name, instead of uri: a function that returns a "
        "ray.data.Dataset. Its rows are written once, as Parquet files in data.cache; see the guide",
    )
    fingerprint: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="your name for the rows of `own`, such as news-2026-11. Another name makes them again; "
        "nothing else does",
    )

    @model_validator(mode="after")
    def own_rows_have_a_fingerprint(self) -> Source:
        if self.own is None and self.fingerprint is not None:
            raise ValueError("fingerprint is the name of the rows of own; leave it out, or give own")
        if self.own is None:
            return self
        if self.fingerprint is None:
            raise ValueError(
                "own needs fingerprint, your name for its rows, such as fingerprint: news-2026-11"
            )
        if not self.name.endswith(own_rows(self.own.model_dump(), self.fingerprint)):
            raise ValueError("own replaces uri, and is only for data.sources; leave uri out")
        return self

    @property
    def uris(self) -> list[str]:
        """Return the paths, globs and URIs of the source."""
        return [self.uri] if isinstance(self.uri, str) else self.uri

    @property
    def name(self) -> str:
        """Return the source's files or function as one text."""
        return ", ".join(self.uris)

    @field_validator("field")
    @classmethod
    def templates_are_of_columns(
        cls, field: str | tuple[str, str] | dict[str, str]
    ) -> str | tuple[str, str] | dict[str, str]:
        """Raise ValueError for an invalid template, or one without a column."""
        named = [field] if isinstance(field, str) else field.values() if isinstance(field, dict) else field
        for template in named:
            if not columns_of(template):
                raise ValueError(f"{template!r} names no column; give one in braces, as in {{text}}")
        return field


def refuse_weights(sources: Sequence[Source]) -> None:
    """Raise ValueError if held-out text has weights or shares: all of it is evaluated, once."""
    for number, source in enumerate(sources):
        for key in ("weight", *MIXED):
            if not source.at_default(key):
                raise ValueError(
                    f"sources.{number}.{key} is {getattr(source, key):g}, but held-out text is read once; leave it out"
                )


class ValidationSpec(StrictModel):
    """The held-out text of the set `validation`: a share of the sources' documents, or a separate text."""

    share: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="share of the documents to hold out from training. A hash of the text decides, so equal "
        "documents stay together, and adding files never moves a document between training and "
        "validation",
    )
    sources: list[Source] = Field(
        default_factory=list, description="separate text that is not among data.sources"
    )

    @model_validator(mode="after")
    def is_either_a_share_or_sources(self) -> ValidationSpec:
        if (self.share is None) == (not self.sources):
            raise ValueError("set either share, as in 0.01, or separate sources")
        refuse_weights(self.sources)
        return self


def ceiling_of(value: int | str) -> tuple[int | None, float | None]:
    """Return a ceiling as a number of documents, or as a share of them. Raises ValueError."""
    problem = f"{value!r} is neither a number of documents, as in 100, nor a share, as in 1%"
    if isinstance(value, int):
        if value < 0:
            raise ValueError(problem)
        return value, None
    try:
        share = float(value.removesuffix("%")) / 100
    except ValueError:
        raise ValueError(problem) from None
    if not value.endswith("%") or not 0 <= share <= 1:
        raise ValueError(problem)
    return None, share


SHIPPED = "shipped:"
"""The prefix of `chat_template` for a template that ships with this project."""
OF_SAMPLES = {"sources": [], "tokenizer": "", "sequence_length": 1}
"""The values of the text keys if the samples are the user's own."""
SHORTEST = 8
"""Minimum length of a text sequence in tokens."""


def _placed(source: Any, cache: Any) -> Any:
    """Return a source as given, with the URI of its rows if a function makes them."""
    function = source.get("own") if isinstance(source, dict) else None
    if not isinstance(function, str | dict):
        return source
    rows = own_rows(function, source.get("fingerprint"))
    return {**source, "uri": f"{cache.rstrip('/')}/{rows}" if isinstance(cache, str) and cache else rows}


def _samples_or_text(schema: dict[str, Any]) -> None:
    """Adapt the JSON Schema: text needs keys that own samples do not."""
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["samples"]}]


class DataSpec(StrictModel):
    """The text and how it becomes token sequences; or the user's own samples."""

    model_config = ConfigDict(json_schema_extra=_samples_or_text)
    CHANGES: ClassVar[Changes] = {
        Input.TEXT: (
            *("sources", "tokenizer", "add_tokens", "labels", "special_tokens", "chat_template", "chat_date"),
            *("on_error", "validation", "shuffle", "streaming", "clean"),
        ),
        Input.SAMPLES: ("samples", "validation"),
    }
    # encode_with changes no id, and streaming no order.
    NO_IDENTITY: ClassVar[tuple[str, ...]] = (
        *("cache", "encode_with", "max_rejected", "streaming", "node_cache"),
    )
    ADDED_LATER: ClassVar[tuple[str, ...]] = (
        *("samples", "mixture", "packing", "on_error", "shuffle", "add_tokens", "clean", "chat_date"),
        "special_tokens",
    )

    samples: ObjectReference | None = Field(
        default=None,
        description="your own dataset as module:name, instead of sources, tokenizer and sequence_length, for "
        "your own model; see the guide",
    )
    sources: list[Source] = Field(description="the training text, in files of any supported format")
    tokenizer: TrainBpe | Train | str = Field(
        description="train_bpe: N, or train: with a recipe, or a tokenizer.json, its folder, a .tiktoken file, "
        "or a .model of SentencePiece"
    )
    add_tokens: list[str] = Field(
        default_factory=list,
        description="tokens to add to an existing tokenizer; the model gets an embedding row for each",
    )
    encode_with: Literal["fastest", "tokenizers"] = Field(
        default="fastest",
        description="the tokenizer engine: fastest uses the fastest engine that returns the same ids as the "
        "tokenizers library, checked on a share of the text; tokenizers uses that library",
    )
    sequence_length: int = Field(ge=1, description="tokens in one sequence, at least 8")
    labels: list[str] = Field(
        default_factory=list,
        description="names of the labels, in the order of their numbers, for an objective that predicts labels",
    )
    special_tokens: Literal["text", "parse"] = Field(
        default="text",
        description="how to read the name of a special token in the text, such as <|im_end|>: text reads it as "
        "characters, parse as the token, as transformers' tokenizers do",
    )
    chat_template: str | None = Field(
        default=None,
        description="a Jinja file that writes a conversation as text, or shipped:FAMILY such as shipped:qwen3; "
        "unset: the template in the tokenizer's folder",
    )
    chat_date: date | None = Field(
        default=None,
        description="the date to give a chat template that asks for today's date, such as 2026-11-28; required "
        "for such a template, because prepared data must not depend on the day",
    )
    on_error: Literal["fail", "skip", "repair"] = Field(
        default="fail",
        description="what to do with input that cannot be used: fail ends the command, skip leaves it out, repair "
        "fixes what it can (U+FFFD for invalid UTF-8, NULs removed) and leaves out the rest. "
        "rejected.jsonl next to the prepared data lists everything",
    )
    max_rejected: int | str | None = Field(
        default=None,
        description="how much may be left out: a number of documents, or a share of them such as 1%; unset: no "
        "limit",
    )
    validation: ValidationSpec | None = Field(default=None, description="text to hold out from training")
    mixture: MixtureSpec | None = Field(
        default=None,
        description="proportions of the sources that follow from their sizes, or that change during the run",
    )
    packing: Literal["cut", "best_fit"] = Field(
        default="cut",
        description="how a causal language model's documents become sequences: cut cuts one stream at equal "
        "distances; best_fit packs whole documents and cuts only those longer than a sequence",
    )
    shuffle: Literal["epoch", "sections"] = Field(
        default="epoch",
        description="what to shuffle together: epoch, all samples of an epoch; sections, the samples of each "
        "consecutive section of the text, one section after the other",
    )
    streaming: bool = Field(
        default=False,
        description="start training when the first section of the text is prepared, with the same samples in the "
        "same order as with all text prepared; sets shuffle to sections",
    )
    clean: list[CleanStep] = Field(
        default_factory=list,
        description="steps that change or remove documents before tokenisation, in order; each is a name with "
        "options, as in [gopher_quality, {near_duplicates: {threshold: 0.8}}]",
    )
    cache: str | None = Field(
        default=None, description="folder of the token shards; unset: next to the run directory"
    )

    node_cache: float | None = Field(
        default=None,
        gt=0.0,
        description="GiB that local copies of remote token shards may take on a node's disk; larger data is read "
        "block by block; unset: half of the free space",
    )

    @property
    def own_code(self) -> dict[str, str]:
        """The user's samples with their key. Cleaning steps are part of the data instead."""
        return users_code(("data.samples", self.samples))

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the samples.

        Only the share of `validation` counts, since its documents are missing from training. URIs are without
        credentials, which may be renewed, and which others would read.
        """
        identity = super().identity()
        held_out = self.validation and self.validation.share
        identity["validation"] = {"share": held_out} if held_out else None
        identity["sources"] = [source.identity() for source in self.sources]
        bare: dict[str, Any] = bare_places(identity)
        return bare

    def problem(self, workload: WorkloadSpec) -> str:
        """Return what of a job's model does not go with its data; empty if everything does."""
        if (self.samples is not None) != (workload.objective == SAMPLES):
            return (
                "data.samples are for a model that has its own loss, and workload.objective is "
                f"{workload.objective}; leave one of them out"
            )
        if self.samples is not None and not is_object_reference(workload.model):
            return f"data.samples are for an own model, and workload.model is {workload.model}; name one as module:name"
        if self.packing != "cut" and workload.objective != "causal_lm":
            return (
                f"data.packing {self.packing} is of causal_lm, and the objective is {workload.objective}; leave it "
                "out"
            )
        return ""

    @property
    def node_cache_bytes(self) -> int | None:
        """Return `node_cache` in bytes."""
        return None if self.node_cache is None else int(self.node_cache * 2**30)

    @model_validator(mode="before")
    @classmethod
    def samples_take_the_place_of_text(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("samples") is None:
            return values
        text_keys = sorted(key for key, value in OF_SAMPLES.items() if values.get(key, value) != value)
        if text_keys:
            raise ValueError(f"{text_keys[0]} is for text, which data.samples replaces; leave it out")
        return {**OF_SAMPLES, **values}

    @model_validator(mode="before")
    @classmethod
    def own_rows_are_in_the_cache(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(sources := values.get("sources"), list):
            return values
        return {**values, "sources": [_placed(source, values.get("cache")) for source in sources]}

    @model_validator(mode="before")
    @classmethod
    def streaming_goes_by_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("streaming") is not True:
            return values
        return {"shuffle": "sections", **values}

    @model_validator(mode="after")
    def what_streams_goes_by_sections(self) -> DataSpec:
        if self.streaming and self.shuffle == "epoch":
            raise ValueError(
                "streaming needs shuffle: sections, since an epoch is shuffled whole; leave out shuffle"
            )
        return self

    @model_validator(mode="after")
    def tokens_are_added_to_a_tokenizer_that_is_there(self) -> DataSpec:
        if self.add_tokens and not (self.tokenizer and isinstance(self.tokenizer, str)):
            raise ValueError(
                "add_tokens is for a tokenizer that is given, but this one is trained; leave it out"
            )
        if len({*self.add_tokens} - {""}) < len(self.add_tokens):
            raise ValueError("add_tokens names a token twice, or an empty one; name each once")
        return self

    @field_validator("sources")
    @classmethod
    def text_has_a_source(cls, sources: list[Source], info: ValidationInfo) -> list[Source]:
        if not sources and not info.data.get("samples"):
            raise PydanticCustomError(
                "too_short", "List should have at least 1 item, or data.samples be given"
            )
        return sources

    @field_validator("sequence_length")
    @classmethod
    def text_is_long_enough(cls, length: int, info: ValidationInfo) -> int:
        if length < SHORTEST and not info.data.get("samples"):
            raise PydanticCustomError("greater_than_equal", "Input should be greater than or equal to 8")
        return length

    @model_validator(mode="after")
    def what_is_of_text_is_left_out_of_samples(self) -> DataSpec:
        if self.samples is None:
            return self
        allowed = {"samples", "cache", "node_cache", "validation", *OF_SAMPLES}
        text_keys = type(self).model_fields.keys() - allowed
        # streaming sets shuffle
        if keys := sorted(text_keys - self.at_default(*text_keys), key=lambda key: (key != "streaming", key)):
            raise ValueError(f"{keys[0]} is for text, which data.samples replaces; leave it out")
        if self.validation is not None and self.validation.share is None:
            raise ValueError("validation of own samples is a share of them; give validation.share")
        return self

    @field_validator("chat_date", mode="before")
    @classmethod
    def a_day_is_no_number(cls, value: Any) -> Any:
        """Refuse a number, which pydantic reads as seconds since 1970."""
        if isinstance(value, int | float):
            raise ValueError(f"{value} is not a day; write it as in 2026-11-28")
        return value

    @field_validator("max_rejected")
    @classmethod
    def ceiling_is_a_count_or_a_share(cls, value: int | str | None) -> int | str | None:
        """Raise ValueError for a value that is neither a number of documents nor a share."""
        if value is not None:
            ceiling_of(value)
        return value

    @model_validator(mode="after")
    def ceiling_is_of_what_is_left_out(self) -> DataSpec:
        if self.max_rejected is not None and self.on_error == "fail":
            raise ValueError(
                "max_rejected needs a policy that leaves something out; set on_error to skip or repair"
            )
        return self

    @property
    def is_mixed(self) -> bool:
        """Whether sources are mixed by proportions, instead of passes in an epoch."""
        return self.mixture is not None or any(source.share is not None for source in self.sources)

    @model_validator(mode="after")
    def proportions_are_of_all_sources(self) -> DataSpec:
        shares = [source.share for source in self.sources]
        if self.mixture is not None and any(share is not None for share in shares):
            raise ValueError("mixture says the proportions of all sources; leave out mixture, or the shares")
        if self.mixture is not None:
            self.mixture.check_sources(len(self.sources))
        elif any(share is not None for share in shares):
            lacking = [number for number, share in enumerate(shares) if share is None]
            if lacking:
                raise ValueError(f"sources.{lacking[0]} has no share, but others have; give all sources one")
            if not adds_up([share or 0.0 for share in shares]):
                raise ValueError(
                    f"the shares of the sources add up to {sum(filter(None, shares)):g}; make it 1"
                )
        for number, source in enumerate(self.sources):
            if self.is_mixed and source.weight != 1.0:
                raise ValueError(
                    f"sources.{number}.weight counts passes of an epoch, but a mixture by shares has no epochs; "
                    f"leave it out"
                )
            if source.max_passes is not None and not self.is_mixed:
                raise ValueError(
                    f"sources.{number}.max_passes needs a mixture by shares; give all sources a share, or a mixture"
                )
        return self


def with_objective(document: Any) -> Any:
    """Return a job's document with the objective of own samples, if its samples are the user's own."""
    if not isinstance(document, dict):
        return document
    data = document.get("data")
    workload = document.get("workload")
    has_own_samples = isinstance(data, dict) and data.get("samples") is not None
    if has_own_samples and isinstance(workload, dict) and "objective" not in workload:
        return {**document, "workload": {**workload, "objective": SAMPLES}}
    return document
