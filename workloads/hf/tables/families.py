"""The conversion tables by family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from workloads.errors import WorkloadError
from workloads.hf.tables import (
    deberta,
    decoders,
    encoders,
    experts,
    gpt_oss,
    qwen_experts,
    seq2seq,
    windowed,
    xlnet,
)
from workloads.hf.tables.family import Family
from workloads.model.config import TransformerConfig

FAMILIES: Mapping[str, Family] = MappingProxyType({
    "gpt2": decoders.GPT2,
    "llama": decoders.LLAMA,
    "qwen3": decoders.QWEN3,
    "qwen2": windowed.QWEN2,
    "mistral": windowed.MISTRAL,
    "phi3": windowed.PHI3,
    "olmo2": windowed.OLMO2,
    "gemma2": windowed.GEMMA2,
    "gemma3": windowed.GEMMA3,
    "qwen2-moe": qwen_experts.QWEN2_MOE,
    "qwen3-moe": qwen_experts.QWEN3_MOE,
    "mixtral": experts.MIXTRAL,
    "gpt-oss": gpt_oss.GPT_OSS,
    "deepseek-v3": experts.DEEPSEEK_V3,
    "bert": encoders.BERT,
    "roberta": encoders.ROBERTA,
    "xlm-roberta": encoders.XLM_ROBERTA,
    "distilbert": encoders.DISTILBERT,
    "ernie": encoders.ERNIE,
    "mpnet": encoders.MPNET,
    "deberta-v2": deberta.DEBERTA_V2,
    "xlnet": xlnet.XLNET,
    "albert": encoders.ALBERT,
    "electra": encoders.ELECTRA,
    "t5": seq2seq.T5,
    "mt5": seq2seq.MT5,
    "bart": seq2seq.BART,
    "mbart": seq2seq.MBART,
    "pegasus": seq2seq.PEGASUS,
    "switch": seq2seq.SWITCH,
})  # fmt: skip


def family_of(config: TransformerConfig) -> Family:
    """Return the table for `config`. Raises WorkloadError if transformers has no such class."""
    if config.family not in FAMILIES:
        raise WorkloadError(
            f"transformers has no class for {config.family}; export one of {', '.join(FAMILIES)}"
            " or set checkpoint.export to null"
        )
    family = FAMILIES[config.family]
    return seq2seq.T5_GATED if family is seq2seq.T5 and config.gated else family


def by_model_type(model_type: str) -> Family | None:
    """Return the table for a model_type of transformers; None if there is none here."""
    return next((f for f in FAMILIES.values() if f.model_type == model_type), None)
