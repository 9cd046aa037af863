"""The sizes of a model that planning needs, and the parallelism that its architecture allows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from orchestrator.parallel.layout import ModelShape
from orchestrator.parallel.model_shape import Bias
from workloads.describe import Description, flops, parameters
from workloads.model.config import TransformerConfig
from workloads.predicted import ALL, Predicted

if TYPE_CHECKING:
    from workloads.hf.as_they_are.hf_class import HuggingFaceModel
    from workloads.own.model import OwnModel


def model_shape(
    config: Description, sequence_length: int, divides_classes: bool = True, predicted: Predicted = ALL
) -> ModelShape:
    """Return the sizes of a model that planning needs.

    Args:
        config: the model.
        sequence_length: tokens of a sample.
        divides_classes: whether a model that runs as a class of transformers may be divided. The planner never decides
            this by itself.
        predicted: the tokens that the objective predicts.
    """
    undeclared = "an own model that declares neither stages() nor sharding()"
    runner = undeclared if config.divided_by == "declaration" else "this model's Hugging Face class"
    shape = ModelShape(
        parameters=parameters(config),
        layers=config.layers + config.decoder_layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        feedforward=config.intermediate,
        vocabulary=config.vocab_size,
        sequence_length=sequence_length,
        flops_per_token=flops(config, sequence_length, predicted),
        stages=1,
        bare_ends=False,
        no_model_split=f"{runner} is run as it is",
        no_sequence_split=f"{runner} is run as it is",
        no_recompute="" if config.has_blocks else "its class has no repeated layer",
        chunked_head=config.ends_in_head,
    )
    if config.divided_by == "rules":
        return _transformer_splits(config, shape, predicted)
    if config.divided_by == "declaration":
        return _declared_splits(config, shape)
    return _hugging_face_splits(config, shape) if divides_classes else shape


def _hugging_face_splits(config: HuggingFaceModel, shape: ModelShape) -> ModelShape:
    """Return the shape with the ways in which a class of transformers can be divided."""
    if config.balanced:
        shape = dataclasses.replace(shape, even_shares="a part of its loss is a mean over micro-batches")
    (styles, no_tensors), (layers, no_layers) = config.styles, config.layer_list
    runs_as_is = "this model's Hugging Face class is run as it is"
    if not styles and layers is None:
        return dataclasses.replace(
            shape,
            no_tensor_split=f"{runs_as_is}: {no_tensors}",
            no_pipeline_split=f"{runs_as_is}: {no_layers}",
        )
    result = dataclasses.replace(
        shape,
        no_model_split="",
        no_tensor_split="" if styles else f"{runs_as_is}: {no_tensors}",
        no_pipeline_split="" if layers else f"{runs_as_is}: {no_layers}",
        no_context_split=runs_as_is,
        no_sequence_split=runs_as_is,
        layers=config.blocks if layers else shape.layers,
        stages=config.blocks if layers else 1,
    )
    if not styles:
        return result
    heads, kv_heads = config.head_counts
    return dataclasses.replace(result, heads=heads, kv_heads=kv_heads, feedforward=config.cut)


def _declared_splits(config: OwnModel, shape: ModelShape) -> ModelShape:
    """Return the shape with the ways in which an own model declares that it can be divided."""
    shape = dataclasses.replace(shape, embedded=config.embedded)
    if config.compares:
        shape = dataclasses.replace(shape, even_shares="its loss compares the samples of all ranks")
    if not config.stages and not config.is_sharded:
        return shape
    # as if it were a transformer, whose layers have about 12 hidden^2 parameters each
    hidden = round((shape.parameters / (12 * config.depth)) ** 0.5)
    return dataclasses.replace(
        shape,
        no_model_split="",
        no_tensor_split="" if config.is_sharded else "this own model has no sharding()",
        no_pipeline_split="" if config.stages else "this own model has no stages()",
        no_context_split="an own model is run on whole samples",
        no_sequence_split="an own model is run on whole samples",
        layers=config.depth,
        stages=config.stages or 1,
        hidden=max(hidden, 1),
        heads=config.whole_heads,
        kv_heads=config.whole_heads,
        feedforward=config.cut,
    )


def _transformer_splits(config: TransformerConfig, shape: ModelShape, predicted: Predicted) -> ModelShape:
    """Return the shape with the ways in which one of this project's models can be divided."""
    moe, stacks = config.moe, (config.layers, config.decoder_layers)
    is_undivided = bool(config.generator or config.shared_layers)
    experts = layers = 0
    if moe:
        layers = sum(map(moe.routed, stacks))
        # Parameters of all experts: two matrices each, three if the feed-forward block is gated.
        experts = layers * moe.experts * (3 if config.gated else 2) * config.hidden * moe.intermediate
    return dataclasses.replace(
        shape,
        no_model_split="",
        experts=moe.experts if moe else 0,
        stages=1 if is_undivided else shape.layers,
        # The stage where a decoder begins needs the embedding too, so each of its stages has a layer.
        bare_ends=not (is_undivided or config.decoder_layers),
        expert_feedforward=moe.intermediate if moe else 0,
        heads_split=config.latent is None,
        no_context_split=_no_context_split(config),
        no_sequence_split=_no_sequence_split(config),
        uneven_vocabulary=not config.generator,
        even_shares=_even_shares(config),
        generator=config.generator_config().hidden / config.hidden if config.generator else 0.0,
        generator_heads=config.generator_config().heads if config.generator else 0,
        generator_feedforward=config.generator_config().intermediate if config.generator else 0,
        head_share=_head_share(config, shape.sequence_length, predicted),
        expert_share=experts / shape.parameters,
        embedding=config.embedding_size,
        head_dim=config.head_dim,
        gated=config.gated,
        causal=config.causal,
        tied=config.tied,
        capped=bool(config.score_cap),
        biased=_bias(config),
        distances=2 * config.disentangled,
        score_share=_score_share(config, shape.sequence_length, predicted),
        capped_logits=bool(config.logit_cap),
        normed=2 * config.hidden if config.norm_position == "both" else 0,
        normed_heads=(shape.heads + shape.kv_heads) * config.head_dim if config.qk_norm else 0,
        experts_per_token=moe.top_k if moe else 0,
        shared_experts=moe.shared if moe else 0,
        expert_layers=layers,
    )


def _bias(config: TransformerConfig) -> Bias:
    """Return what positions add to attention scores."""
    if config.disentangled:
        return "disentangled"
    if config.positions == "relative_keys":
        return "relative_keys"
    return "distance" if config.biased_by_distance else ""


def _score_share(config: TransformerConfig, sequence_length: int, predicted: Predicted) -> float:
    """Return the attention scores of a mean layer, as a share of those of all pairs of tokens in a sequence.

    With w the length of the target as a share of the source, a decoder layer has w^2 scores of its own and w with the
    encoder's output.
    """
    if not config.decoder_layers:
        return 1.0
    target_share = (predicted.target_length or sequence_length) / sequence_length
    decoder_scores = config.decoder_layers * target_share * (1.0 + target_share)
    return (config.layers + decoder_scores) / (config.layers + config.decoder_layers)


def _head_share(config: TransformerConfig, sequence_length: int, predicted: Predicted) -> float:
    """Return the share of a sequence's tokens whose logits over the vocabulary are computed."""
    if config.head not in ("language", "masked") and not config.generator:
        return 0.0
    if config.architecture == "encoder-decoder":
        return predicted.share * (predicted.target_length or sequence_length) / sequence_length
    return predicted.share if config.architecture == "encoder" else 1.0


def _no_context_split(config: TransformerConfig) -> str:
    """Return why context parallelism cannot split the sequence; empty if it can."""
    if config.decoder_layers:
        return "the decoder attends to the full encoder output"
    if config.biased_by_distance or config.disentangled or config.positions == "relative_keys":
        return "relative positions need every distance on every rank"
    if config.sentence_head or config.head == "sequence":
        return "a sentence head reads one token of the full sequence"
    if config.head == "span":
        return "a span is chosen among all tokens of the full sequence"
    return (
        "the discriminator's loss is a mean over the full sequence" if config.head == "discriminator" else ""
    )


def _no_sequence_split(config: TransformerConfig) -> str:
    """Return why sequence parallelism cannot split the residuals over tensor-parallel ranks; empty if it can."""
    if config.decoder_layers:
        return "the decoder attends to the full encoder output"
    if config.generator:
        return "a generator and its discriminator work on single positions"
    return "layers that share weights have no last one" if config.shared_layers else ""


def _even_shares(config: TransformerConfig) -> str:
    """Return why all data-parallel ranks must compute equally many samples; empty if they need not."""
    if config.moe:
        return "experts are balanced over the micro-batches that all ranks compute at the same time"
    return (
        "a part of its loss is a mean over micro-batches" if config.generator or config.sentence_head else ""
    )
