"""The text of a job: sources, tokenizer, and what of it is held out from training."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from orchestrator.job.strict import StrictModel


class Source(StrictModel):
    """Files of text or of records, and how many passes over them one epoch makes."""

    uri: str = Field(
        description="a path, glob or fsspec URI of .txt, .jsonl, .parquet, .csv or .arrow files; or the folder of a "
        "dataset that Hugging Face's Dataset.save_to_disk wrote"
    )
    weight: float = Field(default=1.0, gt=0.0, description="passes over this source in one epoch")
    field: str | tuple[str, str] | dict[str, str] = Field(
        default="text",
        description="the key or column of the text in .jsonl, .parquet and .arrow; two keys for pairs of source and "
        "target; for records the column of each thing that the objective reads, as in {text: review, label: stars}",
    )


def refuse_weights(sources: Sequence[Source]) -> None:
    """Raise ValueError if held-out text has weights: all of it is evaluated, once."""
    for number, source in enumerate(sources):
        if source.weight != 1.0:
            raise ValueError(
                f"sources.{number}.weight is {source.weight:g}, and held-out text is read once; leave it out"
            )


class TrainBpe(StrictModel):
    """Train a byte-level BPE tokenizer on the sources."""

    train_bpe: int = Field(ge=300, le=1_000_000, description="entries in the vocabulary")


class ValidationSpec(StrictModel):
    """The held-out text of the set `validation`: a share of the sources' documents, or text of its own."""

    share: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="share of the documents that training never sees; their text alone says which, so that "
        "equal documents stay together, and more files move none across",
    )
    sources: list[Source] = Field(default_factory=list, description="text that is not among data.sources")

    @model_validator(mode="after")
    def is_either_a_share_or_sources(self) -> ValidationSpec:
        if (self.share is None) == (not self.sources):
            raise ValueError("give either share, as in 0.01, or sources of its own")
        refuse_weights(self.sources)
        return self


class DataSpec(StrictModel):
    """The text, and how it becomes token sequences."""

    sources: list[Source] = Field(min_length=1)
    tokenizer: TrainBpe | str = Field(description="train_bpe: N, or a tokenizer.json, or its folder")
    sequence_length: int = Field(ge=8, description="tokens in one sequence")
    labels: list[str] = Field(
        default_factory=list,
        description="the names of the labels, in the order of their numbers, for an objective that predicts labels",
    )
    chat_template: str | None = Field(
        default=None,
        description="a Jinja file that writes a conversation as text; that of the tokenizer's folder if unset",
    )
    validation: ValidationSpec | None = Field(default=None, description="text that is held out from training")
    cache: str | None = Field(
        default=None, description="folder of the token shards; beside the run directory if unset"
    )
