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
"""What may divide the text for each kind, the usual one first."""


class TokenizerRecipe(StrictModel):
    """How a tokenizer is trained."""

    kind: Literal["bpe", "wordpiece", "unigram"] = Field(
        default="bpe",
        description="byte pair encoding (Sennrich et al., 2016), WordPiece as BERT's, or a unigram language model "
        "(Kudo, 2018)",
    )
    vocabulary: int = Field(ge=300, le=1_000_000, description="entries in the vocabulary")
    pre_tokenizer: Literal["gpt2", "gpt4", "metaspace", "bert"] | None = Field(
        default=None,
        description="what divides the text first: the pattern of GPT-2 or of GPT-4 over bytes, spaces as in "
        "SentencePiece (metaspace), or white space and punctuation (bert); that usual for the kind if unset",
    )
    digits: Literal["together", "single", "triples"] = Field(
        default="together", description="how many digits one token may have: any number, one, or three"
    )
    byte_fallback: bool = Field(
        default=False,
        description="characters without a token of their own become the bytes <0x00> to <0xFF> instead of <unk>; "
        "for metaspace, since the patterns work on bytes anyway",
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
        """What divides the text: `pre_tokenizer`, or what is usual for the kind."""
        return self.pre_tokenizer or PRE_TOKENIZERS[self.kind][0]

    def to_json(self) -> dict[str, Any]:
        """What the fingerprint has of it, all choices made; empty for the byte-level BPE of `train_bpe`."""
        found = {**self.model_dump(exclude={"vocabulary"}), "pre_tokenizer": self.divided_by}
        plain = {"kind": "bpe", "pre_tokenizer": "gpt2", "digits": "together", "byte_fallback": False}
        return {} if found == plain else found


class TrainBpe(StrictModel):
    """Train a byte-level BPE tokenizer on the sources."""

    train_bpe: int = Field(ge=300, le=1_000_000, description="entries in the vocabulary")

    @property
    def recipe(self) -> TokenizerRecipe:
        """How."""
        return TokenizerRecipe(vocabulary=self.train_bpe)


class Train(StrictModel):
    """Train a tokenizer on a sample of the sources."""

    train: TokenizerRecipe

    @property
    def recipe(self) -> TokenizerRecipe:
        """How."""
        return self.train


TrainedTokenizer = TrainBpe | Train
"""A tokenizer that is trained on the sources."""
