"""The model to train, its initial weights, and the objective."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.config.inputs import Changes, Input
from orchestrator.config.object_reference import users_code
from orchestrator.config.records import COLUMNS, REFERENCED, REWARDED, SAMPLES
from orchestrator.config.strict import Count, Positive, StrictModel
from workloads.model.presets import published_dropout
from workloads.own.object_reference import is_object_reference

ELSEWHERE = {
    "qlora": "set kind to lora, and quantize to nf4",
    "prompt_tuning": "it is called prompt here",
    "p_tuning_v1": "it is called p_tuning here",
    "prefix_tuning": "it is called prefix here",
    "p_tuning_v2": "it is called prefix here",
    "adapter": "the bottlenecks behind sub-layers are called houlsby here",
}
"""Kinds of adapters that are missing here or have another name, with a hint."""


class AdapterSpec(StrictModel):
    """A small set of parameters that is trained next to a frozen base.

    lora, rslora and dora are low-rank matrices. prefix adds keys and values before the tokens in every layer. prompt
    adds vectors at the input; with p_tuning a small network computes them. houlsby adds bottlenecks after sub-layers.
    bitfit trains the biases. Heads that the base lacks are trained too.
    """

    kind: Literal["lora", "rslora", "dora", "prefix", "prompt", "p_tuning", "houlsby", "bitfit"] = Field(
        description="the small set of parameters to train"
    )
    rank: Positive = Field(
        default=16,
        description="rank of A and B; width of a bottleneck; length of a prefix or prompt",
    )
    alpha: float = Field(
        default=32.0,
        gt=0.0,
        description="scale: B A is multiplied by alpha / rank, for rslora by alpha / sqrt(rank)",
    )
    targets: list[str] = Field(
        default=["*.attention.*"],
        min_length=1,
        description="patterns, as for file names, of the linear layers that get low-rank matrices",
    )

    quantize: Literal["none", "nf4"] = Field(
        default="none",
        description="nf4: store the linear layers of the base's blocks in 4 bits (QLoRA)",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def one_target_may_stand_alone(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("kind", mode="before")
    @classmethod
    def known_by_another_name(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() in ELSEWHERE:
            raise ValueError(f"{value} is not supported: {ELSEWHERE[value.lower()]}")
        return value

    @model_validator(mode="after")
    def nothing_is_said_that_does_not_count(self) -> AdapterSpec:
        narrow = ("alpha", "targets", "quantize")
        none = ("rank", "alpha", "targets", "quantize")
        unused = none if self.kind == "bitfit" else () if self.kind in ("lora", "rslora", "dora") else narrow
        fields = type(self).model_fields
        unused_keys = [key for key in unused if getattr(self, key) != fields[key].default]
        if unused_keys:
            raise ValueError(f"{self.kind} has no {', '.join(unused_keys)}; leave it out")
        return self


class ShrinkSpec(StrictModel):
    """How a model that is smaller than its base gets its weights: which parts of the base it keeps.

    The model says how many: `changes` of layers, decoder_layers, intermediate (columns of feed-forward networks), heads
    and kv_heads. Every layer keeps equally many columns and heads, so that transformers has a class for it.
    """

    layers: Literal["uniform", "first", "last"] | list[Count] = Field(
        default="uniform",
        description="the layers of the base to keep: evenly spread, the first, the last, or these numbers from 0",
    )
    decoder_layers: Literal["uniform", "first", "last"] | list[Count] | None = Field(
        default=None, description="those of an encoder-decoder's decoder; unset: as layers says"
    )
    importance: Literal["magnitude", "gradient"] = Field(
        default="magnitude",
        description="columns and heads are kept by the norm of their weights, or by how much the loss of training "
        "samples reacts to them (the mean of |dL/dm|, Michel et al., 2019), which is measured before the first step",
    )
    samples: Positive = Field(default=256, description="training samples by which the gradient is measured")


class WorkloadSpec(StrictModel):
    """The model and the objective."""

    CHANGES: ClassVar[Changes] = {
        Input.TEXT: ("objective",),
        Input.WEIGHTS: ("model", "init_from"),
        Input.FOLDER: ("model", "changes"),
    }
    # The names of committed weights tell the implementation. `identity` adds the rate of attention dropout.
    NO_IDENTITY: ClassVar[tuple[str, ...]] = ("implementation", "attention_dropout")
    ADDED_LATER: ClassVar[tuple[str, ...]] = (
        "layer_drop",
        "embedding_noise",
        "head_penalty",
        "grow",
        "adapter",
        "shrink",
    )

    model: str = Field(
        description="a preset's name, hf:<config or checkpoint folder>, or your own as module:name"
    )
    changes: dict[str, Any] = Field(default_factory=dict, description="fields of the preset to change")
    objective: str = Field(
        default="causal_lm", description="what to learn: pre-training, a fine-tuning task, or preferences"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the objective")
    implementation: Literal["auto", "transformers"] = Field(
        default="auto",
        description="the code that computes a model of hf:<folder>: auto uses this project's own if it has the "
        "class, else transformers'; transformers always uses transformers'",
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="start with the weights of an export's folder, or of another run's commit: the run directory, "
        "followed by @<step>, @last or @best",
    )
    grow: Literal["stack"] | None = Field(
        default=None,
        description="stack: init_from is a run with fewer layers, which are copied on top of each other",
    )
    shrink: ShrinkSpec | None = Field(
        default=None,
        description="begin as a part of a larger base, in init_from or hf:<folder>; changes give the smaller sizes",
    )
    mup: dict[str, Any] | None = Field(
        default=None,
        description="sizes of the base model for which the learning rate was tuned, as in changes; weights, "
        "learning rates and logits are scaled relative to it (maximal update parametrisation)",
    )
    dropout: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="dropout probability of embeddings and sub-layer outputs in training; if this and "
        "attention_dropout are unset, that of the published preset, else 0; replaces the dropout of a "
        "configuration in hf:<folder>",
    )
    attention_dropout: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="dropout probability of attention weights in training; fused kernels do not support it",
    )
    layer_drop: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="probability that a sample skips a layer in training (LayerDrop, stochastic depth)",
    )
    embedding_noise: float = Field(
        default=0.0,
        ge=0.0,
        description="NEFTune: alpha of the uniform noise that is added to token embeddings in training",
    )
    head_penalty: float = Field(
        default=0.0,
        ge=0.0,
        description="train a gate for each attention head, and add this to the loss for each one that is open (L0 "
        "penalty, Voita et al., 2019)",
    )
    adapter: AdapterSpec | None = Field(
        default=None, description="train an adapter and freeze the initial weights"
    )

    @property
    def draws(self) -> bool:
        """Return whether training draws random numbers, for which batches carry keys."""
        return any(self.dropouts) or bool(self.layer_drop or self.embedding_noise or self.head_penalty)

    @property
    def dropouts(self) -> tuple[float, float]:
        """Return the rates of `dropout` and `attention_dropout`: the job's, or the published preset's if the job sets
        neither.
        """
        if self.dropout is None and self.attention_dropout is None:
            rate = published_dropout(self.model)
            return rate, rate
        return self.dropout or 0.0, self.attention_dropout or 0.0

    @property
    def metrics_objective(self) -> str:
        """The objective that names the metrics; an own model's loss counts as its objective."""
        return SAMPLES if is_object_reference(self.model) else self.objective

    @property
    def reads_records(self) -> bool:
        """Whether a sample is a record, and not a part of a text."""
        return self.objective in COLUMNS

    @property
    def own_code(self) -> dict[str, str]:
        """The user's model and objective, each with its key."""
        return users_code(("workload.model", self.model), ("workload.objective", self.objective))

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the weights. Rates of dropout count as they are applied."""
        identity = super().identity()
        identity["dropout"], of_attention = self.dropouts
        if of_attention:
            identity["attention_dropout"] = of_attention
        if self.adapter and self.adapter.quantize == "none":
            del identity["adapter"]["quantize"]
        return identity

    @model_validator(mode="after")
    def an_own_model_has_no_parts_of_ours(self) -> WorkloadSpec:
        for key in (
            "mup",
            "dropout",
            "attention_dropout",
            "layer_drop",
            "embedding_noise",
            "head_penalty",
            "grow",
        ):
            if is_object_reference(self.model) and getattr(self, key) not in (None, 0.0):
                raise ValueError(
                    f"{key} is for models of this project, and {self.model} is an own one; leave it out"
                )
        return self

    @model_validator(mode="after")
    def only_a_folder_has_another_implementation(self) -> WorkloadSpec:
        if self.implementation == "transformers" and not self.model.startswith("hf:"):
            raise ValueError(
                f"implementation transformers needs a model in hf:<folder>, but this is {self.model}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def what_grows_has_a_base_that_is_trained_on(self) -> WorkloadSpec:
        if self.grow and (self.init_from is None or self.adapter is not None):
            raise ValueError(
                "grow copies the layers of a run that is trained on; give init_from, and no adapter, or leave grow out"
            )
        return self

    @model_validator(mode="after")
    def what_shrinks_has_a_base_that_is_trained_on(self) -> WorkloadSpec:
        if self.shrink is None:
            return self
        if self.init_from is None and not self.model.startswith("hf:"):
            raise ValueError(
                "shrink keeps parts of a base model, but this job names no base; set init_from, or model to hf:<folder>"
            )
        for key in ("grow", "adapter", "mup"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"shrink and {key} do not go together; make the smaller model by a separate run, and start "
                    "another run from it"
                )
        if self.implementation == "transformers":
            raise ValueError(
                "shrink works only on this project's layers; set implementation to auto, or leave shrink out"
            )
        if self.shrink.importance == "gradient" and self.objective in (*REFERENCED, *REWARDED):
            raise ValueError(
                f"shrink.importance gradient needs a loss of the samples alone, but {self.objective} compares with a "
                "reference or generates; use magnitude"
            )
        return self

    @model_validator(mode="after")
    def gates_are_folded_into_trained_weights(self) -> WorkloadSpec:
        if self.head_penalty and self.adapter is not None:
            raise ValueError(
                "an export folds the gates of head_penalty into the base's weights, and an adapter leaves them as "
                "they are; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def an_adapter_has_a_base(self) -> WorkloadSpec:
        if self.adapter is None:
            return self
        if self.init_from is None and not self.model.startswith("hf:"):
            raise ValueError(
                f"an adapter needs a model with weights, and {self.model} starts from random values; set "
                f"init_from, or model to "
                "hf:<folder>"
            )
        if self.objective in REFERENCED and self.adapter.kind in ("prefix", "prompt", "p_tuning", "houlsby"):
            raise ValueError(
                f"{self.objective} compares with the base, but with adapter.kind {self.adapter.kind} the run begins as "
                "another model; use lora"
            )
        if self.mup is not None:
            raise ValueError("mup does not define the learning rate of an adapter; set one of them to null")
        return self
