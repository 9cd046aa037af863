"""Published models by name, and a tiny one of every class for tests and the quickstart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import sqrt
from types import MappingProxyType

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig
from workloads.model.parts import LatentAttention, MoE, RopeScaling

_GPT2 = TransformerConfig(
    family="gpt2", architecture="decoder", vocab_size=50257, hidden=768, layers=12, heads=12,
    intermediate=3072, max_positions=1024, activation="gelu_tanh", residual_scaling=True,
)  # fmt: skip
_LLAMA3 = TransformerConfig(
    family="llama", architecture="decoder", vocab_size=128256, hidden=4096, layers=32, heads=32, kv_heads=8,
    intermediate=14336, max_positions=8192, positions="rotary", rope_theta=500000.0, norm="rms", tied=False,
    activation="silu", gated=True, attention_bias=False, output_bias=False, feedforward_bias=False,
)  # fmt: skip
_QWEN3 = replace(
    _LLAMA3, family="qwen3", vocab_size=151936, hidden=4096, layers=36, intermediate=12288, head_dim=128,
    max_positions=40960, rope_theta=1000000.0, norm_eps=1e-6, qk_norm=True,
)  # fmt: skip
_QWEN2 = replace(
    _LLAMA3, family="qwen2", vocab_size=152064, hidden=3584, embedding_size=0, layers=28, heads=28, kv_heads=4,
    head_dim=128, intermediate=18944, max_positions=131072, rope_theta=1000000.0, norm_eps=1e-6, attention_bias=True,
)  # fmt: skip
_MISTRAL = replace(
    _LLAMA3, family="mistral", vocab_size=32000, max_positions=32768, rope_theta=10000.0, window=4096,
)  # fmt: skip
_PHI3 = replace(
    _MISTRAL, family="phi3", vocab_size=32064, hidden=3072, kv_heads=32, head_dim=96, intermediate=8192,
    max_positions=4096, embedding_size=0, window=2047,
)  # fmt: skip
_OLMO2 = replace(
    _LLAMA3, family="olmo2", vocab_size=100352, kv_heads=32, intermediate=11008, max_positions=4096,
    norm_eps=1e-6, norm_position="branch", qk_norm=True, qk_norm_whole=True,
)  # fmt: skip
_GEMMA2 = replace(
    _LLAMA3, family="gemma2", vocab_size=256000, hidden=2304, layers=26, heads=8, kv_heads=4, head_dim=256,
    intermediate=9216, max_positions=8192, embedding_size=0, rope_theta=10000.0, tied=True, norm="rms_offset",
    norm_eps=1e-6, norm_position="both", scaled_embedding=True, activation="gelu_tanh", attention_scale=256**-0.5,
    score_cap=50.0, logit_cap=30.0, window=4096, full_every=2,
)  # fmt: skip
_GEMMA3 = replace(
    _GEMMA2, family="gemma3", vocab_size=262144, hidden=1152, heads=4, kv_heads=1, intermediate=6912,
    max_positions=32768, embedding_size=0, rope_theta=1000000.0, window_theta=10000.0, qk_norm=True, score_cap=0.0,
    logit_cap=0.0, window=512, full_every=6,
)  # fmt: skip
_BERT = TransformerConfig(
    family="bert", architecture="encoder", vocab_size=30522, hidden=768, layers=12, heads=12,
    intermediate=3072, max_positions=512, token_types=2, norm_eps=1e-12, norm_position="post",
    embedding_norm=True, final_norm=False, head="masked", sentence_head=True, initial="truncated",
)  # fmt: skip
_ROBERTA = replace(
    _BERT, family="roberta", vocab_size=50265, token_types=1, position_offset=2, norm_eps=1e-5,
    sentence_head=False, initial="normal", counted_positions=True, head_activation="gelu",
)  # fmt: skip
_XLM_ROBERTA = replace(_ROBERTA, family="xlm-roberta", vocab_size=250002)
_MPNET = replace(
    _ROBERTA, family="mpnet", vocab_size=30527, token_types=0, relative_bias=True,
)  # fmt: skip
_DEBERTA_V3 = replace(
    _BERT, family="deberta-v2", vocab_size=128100, token_types=0, norm_eps=1e-7, sentence_head=False, positions="none",
    disentangled=256, relative_distance=512, pooler="gelu", initial="normal",
)  # fmt: skip
_XLNET = replace(
    _BERT, family="xlnet", vocab_size=32000, token_types=0, sentence_head=False, positions="relative_keys",
    head="language", head_bias=True, embedding_norm=False, attention_bias=False, output_bias=False, initial="normal",
)  # fmt: skip
_DISTILBERT = replace(
    _BERT, family="distilbert", layers=6, token_types=0, sentence_head=False, pooler="relu", initial="normal",
)  # fmt: skip
_ERNIE = replace(
    _BERT, family="ernie", vocab_size=18000, max_positions=513, activation="relu", norm_eps=1e-5,
)  # fmt: skip
_ALBERT = replace(
    _BERT, family="albert", vocab_size=30000, embedding_size=128, activation="gelu_tanh", shared_layers=True,
)  # fmt: skip
_ELECTRA = replace(
    _BERT, family="electra", head="discriminator", sentence_head=False, generator=256, pooler="gelu",
    head_activation="gelu",
)  # fmt: skip
_UNILM = replace(_BERT, architecture="prefix", sentence_head=False)
_GLM = replace(
    _GPT2, family="glm", architecture="prefix", vocab_size=30522, max_positions=512, block_positions=True,
    residual_scaling=False,
)  # fmt: skip
_T5 = TransformerConfig(
    family="t5", architecture="encoder-decoder", vocab_size=32128, hidden=768, layers=12, heads=12,
    intermediate=3072, max_positions=512, positions="relative", norm="rms", norm_eps=1e-6, activation="relu",
    attention_bias=False, output_bias=False, feedforward_bias=False, attention_scale=1.0,
    scaled_head=True, initial="fan_in", initial_std=1.0,
)  # fmt: skip
_T5_V1_1 = replace(_T5, intermediate=2048, activation="gelu_tanh", gated=True, tied=False, scaled_head=False)
_MT5 = replace(
    _T5_V1_1, family="mt5", vocab_size=250112, hidden=512, layers=8, decoder_layers=8, heads=6, kv_heads=6, head_dim=64,
    embedding_size=0, intermediate=1024,
)  # fmt: skip
_BART = TransformerConfig(
    family="bart", architecture="encoder-decoder", vocab_size=50265, hidden=768, layers=6, heads=12,
    intermediate=3072, max_positions=1024, position_offset=2, norm_position="post", embedding_norm=True,
    final_norm=False,
)  # fmt: skip
_MBART = replace(
    _BART, family="mbart", vocab_size=250027, hidden=1024, embedding_size=0, layers=12, decoder_layers=12, heads=16,
    kv_heads=16, head_dim=64, intermediate=4096, norm_position="pre", final_norm=True, scaled_embedding=True,
)  # fmt: skip
_PEGASUS = replace(
    _MBART, family="pegasus", vocab_size=96103, layers=16, decoder_layers=16, positions="sinusoidal", position_offset=0,
    embedding_norm=False, activation="relu",
)  # fmt: skip
# Switch scales the variance of every weight by 0.1 (section 2.4), hence the root.
_SWITCH = replace(
    _T5, family="switch", initial_std=sqrt(0.1),
    moe=MoE(experts=8, top_k=1, intermediate=3072, every=2, first=1, capacity_factor=1.25, auxiliary=0.01,
            z_loss=0.001),
)  # fmt: skip
_MIXTRAL = replace(
    _LLAMA3, family="mixtral", vocab_size=32000, max_positions=32768, rope_theta=1000000.0,
    moe=MoE(experts=8, top_k=2, intermediate=14336, normalise=True, auxiliary=0.02),
)  # fmt: skip
_QWEN2_MOE = replace(
    _QWEN2, family="qwen2-moe", vocab_size=151936, hidden=2048, layers=24, heads=16, kv_heads=16, intermediate=5632,
    embedding_size=0, max_positions=8192,
    moe=MoE(experts=60, top_k=4, intermediate=1408, shared=4, shared_gate=True, auxiliary=0.001),
)  # fmt: skip
_QWEN3_MOE = replace(
    _QWEN3, family="qwen3-moe", hidden=2048, layers=48, heads=32, kv_heads=4, embedding_size=0, intermediate=6144,
    moe=MoE(experts=128, top_k=8, intermediate=768, normalise=True, auxiliary=0.001),
)  # fmt: skip
_GPT_OSS = replace(
    _LLAMA3, family="gpt-oss", vocab_size=201088, hidden=2880, layers=24, heads=64, kv_heads=8, head_dim=64,
    intermediate=2880, embedding_size=0, max_positions=131072, rope_theta=150000.0,
    rope_scaling=RopeScaling("yarn", 32.0, 4096, truncate=False), attention_bias=True, output_bias=True, sinks=True,
    window=128, full_every=2, swiglu_limit=7.0, swiglu_alpha=1.702,
    moe=MoE(experts=32, top_k=4, intermediate=2880, bias=True, normalise=True, auxiliary=0.001),
)  # fmt: skip
_DEEPSEEK_V3 = TransformerConfig(
    family="deepseek-v3", architecture="decoder", vocab_size=129280, hidden=7168, layers=61, heads=128,
    head_dim=192, intermediate=18432, max_positions=163840, positions="rotary", rope_theta=10000.0,
    rope_scaling=RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all=1.0), norm="rms", norm_eps=1e-6,
    tied=False, activation="silu", gated=True, attention_bias=False, output_bias=False,
    feedforward_bias=False,
    latent=LatentAttention(query_rank=1536, key_value_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    moe=MoE(experts=256, top_k=8, intermediate=2048, first=3, shared=1, gate="sigmoid", normalise=True,
            scale=2.5, groups=8, top_groups=4, auxiliary=0.0001, bias_rate=0.001),
    initial_std=0.006,
)  # fmt: skip


def _but(base: TransformerConfig, **changes: object) -> TransformerConfig:
    """Return `base` with other sizes. Sizes that follow from a changed one are derived again."""
    return base.changed(changes)


def _tiny(base: TransformerConfig, **changes: object) -> TransformerConfig:
    """Return a miniature of the class: a few hundred thousand parameters, milliseconds per step on one core."""
    small = {"vocab_size": 4096, "hidden": 64, "layers": 2, "heads": 4, "intermediate": 128,
             "max_positions": 512, "kv_heads": 4}  # fmt: skip
    return base.changed({**small, **changes})


PRESETS: Mapping[str, TransformerConfig] = MappingProxyType({
    "gpt2": _GPT2,
    "gpt2-medium": _but(_GPT2, hidden=1024, layers=24, heads=16, intermediate=4096),
    "gpt2-large": _but(_GPT2, hidden=1280, layers=36, heads=20, intermediate=5120),
    "gpt2-xl": _but(_GPT2, hidden=1600, layers=48, heads=25, intermediate=6400),
    "llama-3-8b": _LLAMA3,
    "llama-3-70b": _but(_LLAMA3, hidden=8192, layers=80, heads=64, intermediate=28672),
    "llama-3.2-1b": _but(_LLAMA3, hidden=2048, layers=16, intermediate=8192, tied=True, max_positions=131072,
                         rope_scaling=RopeScaling("llama3", 32.0, 8192)),
    "qwen3-0.6b": _but(_QWEN3, hidden=1024, layers=28, heads=16, head_dim=128, intermediate=3072, tied=True),
    "qwen3-8b": _QWEN3,
    "qwen2-7b": _QWEN2,
    "qwen2.5-0.5b": _but(_QWEN2, vocab_size=151936, hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864,
                         tied=True, max_positions=32768),
    "mistral-7b": _MISTRAL,
    "phi-3-mini": _PHI3,
    "olmo-2-7b": _OLMO2,
    "gemma-2-2b": _GEMMA2,
    "gemma-2-9b": _but(_GEMMA2, hidden=3584, layers=42, heads=16, kv_heads=8, intermediate=14336),
    "gemma-3-1b": _GEMMA3,
    "bert-base": _BERT,
    "bert-large": _but(_BERT, hidden=1024, layers=24, heads=16, intermediate=4096),
    "roberta-base": _ROBERTA,
    "xlm-roberta-base": _XLM_ROBERTA,
    "distilbert-base": _DISTILBERT,
    "ernie-1.0-base": _ERNIE,
    "mpnet-base": _MPNET,
    "deberta-v3-base": _DEBERTA_V3,
    "xlnet-base": _XLNET,
    "albert-base": _ALBERT,
    "electra-base": _ELECTRA,
    "electra-small": _but(_ELECTRA, hidden=256, heads=4, embedding_size=128, intermediate=1024, generator=64),
    "unilm-base": _UNILM,
    "glm-base": _GLM,
    "t5-small": _but(_T5, hidden=512, layers=6, heads=8, intermediate=2048),
    "t5-base": _T5,
    "t5-v1.1-base": _T5_V1_1,
    "mt5-small": _MT5,
    "bart-base": _BART,
    "mbart-large": _MBART,
    "pegasus-large": _PEGASUS,
    "switch-base-8": _SWITCH,
    "qwen1.5-moe-a2.7b": _QWEN2_MOE,
    "qwen3-30b-a3b": _QWEN3_MOE,
    "mixtral-8x7b": _MIXTRAL,
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _but(_GPT_OSS, layers=36, moe={"experts": 128}),
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-tiny": _tiny(_GPT2, hidden=128, layers=4, intermediate=512),
    "llama-tiny": _tiny(_LLAMA3, kv_heads=2),
    "qwen3-tiny": _tiny(_QWEN3, kv_heads=2, tied=True),
    "bert-tiny": _tiny(_BERT),
    "roberta-tiny": _tiny(_ROBERTA),
    "albert-tiny": _tiny(_ALBERT, embedding_size=32),
    "electra-tiny": _tiny(_ELECTRA, embedding_size=32, generator=32),
    "unilm-tiny": _tiny(_UNILM),
    "glm-tiny": _tiny(_GLM),
    "t5-tiny": _tiny(_T5),
    "t5-v1.1-tiny": _tiny(_T5_V1_1),
    "bart-tiny": _tiny(_BART),
    "switch-tiny": _tiny(_SWITCH, moe={"experts": 4, "intermediate": 128}),
    "mixtral-tiny": _tiny(_MIXTRAL, kv_heads=2, intermediate=64, moe={"experts": 4, "intermediate": 64}),
    "deepseek-v3-tiny": _tiny(_DEEPSEEK_V3, head_dim=24, rope_scaling=None,
                              latent=LatentAttention(32, 32, 16, 8, 16),
                              moe={"experts": 8, "top_k": 2, "intermediate": 32, "first": 1, "groups": 2,
                                   "top_groups": 1}),
})  # fmt: skip


PUBLISHED_DROPOUT: Mapping[str, float] = MappingProxyType(
    dict.fromkeys(
        (
            *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "bert-base", "bert-large", "roberta-base"),
            *("xlm-roberta-base", "distilbert-base", "ernie-1.0-base", "electra-base", "electra-small"),
            *("unilm-base", "t5-small", "t5-base", "bart-base", "switch-base-8"),
        ),
        0.1,
    )
)
"""The dropout rate with which a preset was pre-trained, for hidden states and attention alike (Devlin et al. 2018,
appendix A.2; Liu et al. 2019, table 9; Raffel et al. 2020, section 3.1.2; others as in the released folders).
"""


def published_dropout(model: object) -> float:
    """Return the dropout rate with which the preset `model` was pre-trained; 0 for a preset without dropout and for
    other models.
    """
    return PUBLISHED_DROPOUT.get(model, 0.0) if isinstance(model, str) else 0.0


def preset(name: str) -> TransformerConfig:
    """Return the configuration `name`. Raises WorkloadError with the closest names."""
    if name in PRESETS:
        return PRESETS[name]
    near = get_close_matches(name, PRESETS, n=3, cutoff=0.3) or sorted(PRESETS)[:3]
    raise WorkloadError(f"unknown model {name!r}; nearest are {', '.join(near)}, or give hf:<folder>")
