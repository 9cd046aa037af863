"""A tokenizer that is trained on the text of the job."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from orchestrator.config.strict import StrictModel

PRE_TOKENIZERS = {
    "bpe": ("gpt2", "gpt4", "metaspace"),
    "wordpiece": ("bert",),
    "unigram": ("metaspace", "gpt2", "gpt4"),
}
"""The possible pre-tokenizers of each kind, the default first."""


class TokenizerRecipe(StrictModel):
    """How to train a tokenizer."""

    kind: Literal["bpe", "wordpiece", "unigram"] = Field(
        default="bpe",
        description="bpe, byte pair encoding (Sennrich et al., 2016); wordpiece, as for BERT; or unigram, a "
        "unigram language model (Kudo, 2018)",
    )
    vocabulary: int = Field(ge=300, le=1_000_000, description="number of entries in the vocabulary")
    pre_tokenizer: Literal["gpt2", "gpt4", "metaspace", "bert"] | None = Field(
        default=None,
        description="how to split the text first: the pattern of GPT-2 or of GPT-4 over bytes, spaces as in "
        "SentencePiece (metaspace), or white space and punctuation (bert); unset: the kind's default",
    )
    digits: Literal["together", "single", "triples"] = Field(
        default="together", description="how many digits a token may have: any number, one, or three"
    )
    byte_fallback: bool = Field(
        default=False,
        description="encode characters without a token as the bytes <0x00> to <0xFF> instead of <unk>; for "
        "metaspace only, because the patterns work on bytes anyway",
    )

    @model_validator(mode="after")
    def is_a_combination_that_exists(self) -> TokenizerRecipe:
        possible = PRE_TOKENIZERS[self.kind]
        if self.pre_tokenizer and self.pre_tokenizer not in possible:
            raise ValueError(
                f"pre_tokenizer of {self.kind} is {' or '.join(possible)}, not {self.pre_tokenizer}"
            )
        if self.byte_fallback and self.divided_by != "metaspace":
            raise ValueError(f"byte_fallback goes with pre_tokenizer: metaspace, not {self.divided_by}")
        return self

    @property
    def divided_by(self) -> str:
        """Return how the text is split: `pre_tokenizer`, or the kind's default."""
        return self.pre_tokenizer or PRE_TOKENIZERS[self.kind][0]

    def to_json(self) -> dict[str, Any]:
        """Return the recipe's part of the fingerprint, with all defaults filled in; empty for the byte-level BPE of
        `train_bpe`.
        """
        fields = {**self.model_dump(exclude={"vocabulary"}), "pre_tokenizer": self.divided_by}
        plain = {"kind": "bpe", "pre_tokenizer": "gpt2", "digits": "together", "byte_fallback": False}
        return {} if fields == plain else fields


class TrainBpe(StrictModel):
    """Train a byte-level BPE tokenizer on the sources."""

    train_bpe: int = Field(ge=300, le=1_000_000, description="number of entries in the vocabulary")

    @property
    def recipe(self) -> TokenizerRecipe:
        """Return the recipe."""
        return TokenizerRecipe(vocabulary=self.train_bpe)


class Train(StrictModel):
    """Train a tokenizer on a sample of the sources."""

    train: TokenizerRecipe

    @property
    def recipe(self) -> TokenizerRecipe:
        """Return the recipe."""
        return self.train


TrainedTokenizer = TrainBpe | Train
"""A tokenizer that is trained on the sources."""
