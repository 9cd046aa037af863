"""The text of a job: sources, tokenizer, and what of it is held out from training."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from orchestrator.job.mixture import MixtureSpec, adds_up
from orchestrator.job.strict import StrictModel

MIXED = ("share", "max_passes")
"""Keys of a source that runs of earlier versions do not have."""


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
    share: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="its share of the tokens of training, in place of weight; all sources have one, or none",
    )
    max_passes: float | None = Field(
        default=None,
        ge=1.0,
        description="passes after which it comes no more, and the others share its places; of a mixture by shares",
    )


def refuse_weights(sources: Sequence[Source]) -> None:
    """Raise ValueError if held-out text has weights or shares: all of it is evaluated, once."""
    for number, source in enumerate(sources):
        for key in ("weight", *MIXED):
            if not source.at_default(key):
                raise ValueError(
                    f"sources.{number}.{key} is {getattr(source, key):g}, and held-out text is read once; leave it out"
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
    mixture: MixtureSpec | None = Field(
        default=None,
        description="proportions of the sources by their sizes, or that change in the course of the run",
    )
    cache: str | None = Field(
        default=None, description="folder of the token shards; beside the run directory if unset"
    )

    @property
    def is_mixed(self) -> bool:
        """Whether sources come in proportions, and not in passes of an epoch."""
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
                raise ValueError(f"sources.{lacking[0]} has no share, and others have; give all sources one")
            if not adds_up([share or 0.0 for share in shares]):
                raise ValueError(
                    f"the shares of the sources add up to {sum(filter(None, shares)):g}; make it 1"
                )
        for number, source in enumerate(self.sources):
            if self.is_mixed and source.weight != 1.0:
                raise ValueError(
                    f"sources.{number}.weight is of an epoch, and a mixture by shares has none; leave it out"
                )
            if source.max_passes is not None and not self.is_mixed:
                raise ValueError(
                    f"sources.{number}.max_passes is of a mixture by shares; give all sources a share, or a mixture"
                )
        return self
