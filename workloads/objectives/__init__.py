"""Objectives: how a window of raw text, or a record, becomes model input, and what is predicted.

name                      paper                                               architectures
causal_lm                 GPT, Radford et al. 2018                            decoder
masked_lm                 BERT, Devlin et al. 2019; RoBERTa, Liu et al. 2019  encoder
whole_word_masking        BERT, release of May 2019; Cui et al. 2019          encoder
span_masking              SpanBERT, Joshi et al. 2020                         encoder
entity_masking            ERNIE, Sun et al. 2019                              encoder
next_sentence             BERT, Devlin et al. 2019                            encoder
sentence_order            ALBERT, Lan et al. 2020                             encoder
replaced_token_detection  ELECTRA, Clark et al. 2020                          encoder
translation_lm            XLM, Conneau and Lample 2019                        encoder
permuted_lm               XLNet, Yang et al. 2019                             encoder, prefix
unified_lm                UniLM, Dong et al. 2019                             encoder, prefix
blank_infilling           GLM, Du et al. 2022                                 prefix
span_corruption           T5, Raffel et al. 2020                              encoder-decoder
denoising                 BART, Lewis et al. 2020                             encoder-decoder
mass                      MASS, Song et al. 2019                              encoder-decoder
gap_sentences             PEGASUS, Zhang et al. 2020                          encoder-decoder
sequence_classification   GPT, Radford et al. 2018; BERT, Devlin et al. 2019  decoder, encoder, encoder-decoder
multi_label_classification  binary cross-entropy by label                     decoder, encoder, encoder-decoder
regression                STS-B in GLUE, Wang et al. 2019                     decoder, encoder, encoder-decoder
token_classification      BERT, Devlin et al. 2019, section 5.3               decoder, encoder, encoder-decoder
span_extraction           BERT, Devlin et al. 2019, section 4.2               decoder, encoder, encoder-decoder
sentence_embeddings       Sentence-BERT, Reimers and Gurevych 2019            encoder
seq2seq                   T5, Raffel et al. 2020                              encoder-decoder
conversation              InstructGPT, Ouyang et al. 2022                     decoder
dpo                       DPO, Rafailov et al. 2023                           decoder
ipo                       IPO, Azar et al. 2023                               decoder
orpo                      ORPO, Hong et al. 2024                              decoder
kto                       KTO, Ethayarajh et al. 2024                         decoder
reward                    InstructGPT, Ouyang et al. 2022                     decoder
grpo                      DeepSeekMath, Shao et al. 2024                      decoder
reinforce                 RLOO, Ahmadian et al. 2024                          decoder

Batch keys, B samples of L tokens, all of one shape for a given sequence length:
tokens [B, L], labels [B, L or decoder length] (aligned with what predicts them, -100 where nothing is),
token_types [B, L], positions [B, L] or [B, 2, L], padding bool [B, L] (True is real), attention bool [B, L,
L] (True may attend), decoder_tokens and decoder_padding [B, decoder length], sequence_labels [B], targets [B,
L], sample_seed [B]. Integers are int64. Each class says which it gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from workloads.errors import WorkloadError
from workloads.objectives.blank_infilling import BlankInfilling
from workloads.objectives.causal_lm import CausalLM
from workloads.objectives.conversation import Conversation
from workloads.objectives.denoising import Denoising
from workloads.objectives.gap_sentences import GapSentences
from workloads.objectives.masked_lm import (
    EntityMasking,
    MaskedLM,
    ReplacedTokenDetection,
    SpanMasking,
    WholeWordMasking,
)
from workloads.objectives.mass import Mass
from workloads.objectives.pairs import NextSentence, SentenceOrder
from workloads.objectives.permuted import PermutedLM
from workloads.objectives.preferences import Dpo, Ipo, Kto, Orpo, Reward
from workloads.objectives.rewarded import Grpo, Reinforce
from workloads.objectives.sampled import RULE, SampledObjective
from workloads.objectives.span_corruption import SpanCorruption
from workloads.objectives.supervised import (
    MultiLabelClassification,
    Regression,
    SentenceEmbeddings,
    Seq2Seq,
    SequenceClassification,
    SpanExtraction,
    TokenClassification,
)
from workloads.objectives.translation import TranslationLM
from workloads.objectives.unified import UnifiedLM
from workloads.own.object_reference import is_object_reference, load
from workloads.workload import Objective, Vocabulary

_CLASSES: Mapping[str, type[SampledObjective]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            CausalLM,
            MaskedLM,
            WholeWordMasking,
            SpanMasking,
            EntityMasking,
            NextSentence,
            SentenceOrder,
            ReplacedTokenDetection,
            TranslationLM,
            PermutedLM,
            UnifiedLM,
            BlankInfilling,
            SpanCorruption,
            Denoising,
            Mass,
            GapSentences,
            SequenceClassification,
            MultiLabelClassification,
            Regression,
            SentenceEmbeddings,
            TokenClassification,
            SpanExtraction,
            Seq2Seq,
            Conversation,
            Dpo,
            Ipo,
            Orpo,
            Kto,
            Reward,
            Grpo,
            Reinforce,
        )
    }
)

NAMES: tuple[str, ...] = tuple(_CLASSES)
OTHER_NAMES = {
    "clm": "causal_lm",
    "lm": "causal_lm",
    "pretrain": "causal_lm",
    "mlm": "masked_lm",
    "wwm": "whole_word_masking",
    "nsp": "next_sentence",
    "sop": "sentence_order",
    "rtd": "replaced_token_detection",
    "tlm": "translation_lm",
    "plm": "permuted_lm",
    "prefix_lm": "unified_lm",
    "gsg": "gap_sentences",
    "sft": "conversation",
    "chat": "conversation",
    "instruction_tuning": "conversation",
    "classification": "sequence_classification",
    "multi_label": "multi_label_classification",
    "multilabel": "multi_label_classification",
    "embeddings": "sentence_embeddings",
    "embedding": "sentence_embeddings",
    "sentence_transformers": "sentence_embeddings",
    "mnrl": "sentence_embeddings",
    "ner": "token_classification",
    "qa": "span_extraction",
    "question_answering": "span_extraction",
    "translation": "seq2seq",
    "summarization": "seq2seq",
    "summarisation": "seq2seq",
    "reward_model": "reward",
    "rlhf": "grpo",
    "rl": "grpo",
    "gspo": "grpo",
    "dapo": "grpo",
    "rloo": "reinforce",
}
"""Other names of objectives in papers and libraries."""
OF_MODELS = dict.fromkeys(("contrastive", "clip"), "ext:clip") | dict.fromkeys(
    ("masked_image", "masked_image_modeling", "masked_image_modelling", "mim", "mae"),
    "ext:mae",
)
"""Objectives that are part of a model here, by the model."""
OF_OWN_ANSWERS = ("ppo", "online_dpo")
"""Objectives over generated answers that are not supported."""
OF_TEXT: tuple[str, ...] = tuple(name for name in NAMES if not _CLASSES[name].unit.startswith("record"))
"""Objectives that read text, not records."""


def build(
    name: str,
    *,
    vocabulary: Vocabulary,
    sequence_length: int,
    seed: int,
    rule: int = RULE,
    labels: Sequence[str] = (),
    typed: bool = False,
    **options: Any,
) -> Objective:
    """Return the objective `name`.

    Args:
        name: the name, see `NAMES`.
        vocabulary: the vocabulary of the run.
        sequence_length: length of the model's inputs.
        seed: the run's seed.
        rule: the rule of the run's data, see `workloads.objectives.sampled.RULE`.
        labels: names of the labels, for supervised objectives.
        typed: whether the model has two token types.

    Further keyword arguments are the objective's options. Raises WorkloadError for an unknown name or option, an
    option out of range, or a vocabulary that lacks tokens or tables that the objective needs.
    """
    kind = _find(name)
    known = {f.name for f in fields(kind)} - {
        "vocabulary",
        "sequence_length",
        "seed",
        "rule",
        "labels",
        "typed",
    }
    if unknown := sorted(options.keys() - known):
        raise WorkloadError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return kind(
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        seed=seed,
        rule=rule,
        labels=tuple(labels),
        typed=typed,
        **options,
    )


def special_tokens(name: str) -> tuple[str, ...]:
    """Return the special tokens that a tokenizer for this objective needs beyond the standard set.

    The standard set is <|endoftext|>, <pad>, <bos>, <cls>, <sep>, <mask>, <unk>. Raises WorkloadError for an unknown
    name.
    """
    return tuple(f"<extra_id_{i}>" for i in range(_find(name).sentinels))


def architectures(name: str) -> frozenset[str]:
    """Return the architectures that the objective can train. Raises WorkloadError for an unknown name."""
    return _find(name).architectures


def reads_pairs(name: str) -> bool:
    """Return whether the objective reads a document as two texts. Raises WorkloadError for an unknown name."""
    return _find(name).unit == "documents"


def is_framed(name: str) -> bool:
    """Return whether the tokenizer's special tokens surround each text that the objective reads. Raises WorkloadError
    for an unknown name.
    """
    return _find(name).framed


def compares(name: str) -> bool:
    """Return whether a sample of the objective is two answers. Raises WorkloadError for an unknown name."""
    return _find(name).compares


def _find(name: str) -> type[SampledObjective]:
    if is_object_reference(name):
        kind = load(name)
        if not (isinstance(kind, type) and issubclass(kind, SampledObjective)) or not is_dataclass(kind):
            raise WorkloadError(
                f"{name} is not an objective; make it a frozen, keyword-only dataclass that inherits from "
                "workloads.objectives.sampled.SampledObjective"
            )
        return kind
    if name not in _CLASSES:
        raise WorkloadError(f"there is no objective {name!r}{_near(name)}")
    return _CLASSES[name]


def _near(name: str) -> str:
    """Return a hint for an unknown objective: the closest name, or all names."""
    normalised = name.lower().replace("-", "_")
    if normalised in OF_MODELS:
        return f"; the model has its own: set workload.model to {OF_MODELS[normalised]}"
    if normalised in OF_OWN_ANSWERS:
        explanation = "grpo and reinforce learn from answers that the model generates"
        return f"; {explanation}, and dpo, ipo, orpo and kto from given answers"
    # with short names, every other name is near
    long = [each for each in NAMES if len(each) > 6]
    near = (
        [OTHER_NAMES[normalised]]
        if normalised in OTHER_NAMES
        else get_close_matches(normalised, long, n=1, cutoff=0.7)
    )
    return f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(NAMES)}"
