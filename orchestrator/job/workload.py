"""What is trained: the model, its weights to begin with, and the objective."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from orchestrator.job.strict import StrictModel


class WorkloadSpec(StrictModel):
    """The model and the objective."""

    model: str = Field(description="a preset's name, or hf:<config or checkpoint folder>")
    changes: dict[str, Any] = Field(default_factory=dict, description="fields of the preset to change")
    objective: str = Field(default="causal_lm", description="the pre-training recipe")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the objective")
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="begin with the weights of an export's folder, or of another run's commit: the run directory, "
        "followed by @<step>, @last or @best",
    )
    mup: dict[str, Any] | None = Field(
        default=None,
        description="sizes of the base model that the learning rate was tuned for, as in changes; weights, learning "
        "rates and logits are scaled relative to it (maximal update parametrisation)",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="probability with which features of embeddings and of every sub-layer's output are zeroed in "
        "training; replaces the dropout of a configuration in hf:<folder>",
    )
