"""The options of a run of Megatron-LM (its `args`) that decide the layout of its tensors, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workloads.errors import WorkloadError


@dataclass(frozen=True)
class Options:
    """The options of a run that decide the layout of its tensors and their computation. groups: key-value heads;
    experts: of a layer, 0 for none, of which `chosen` compute a token, divided over `expert_parallel` ranks."""

    version: float
    tensor: int
    pipeline: int
    layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    feedforward: int
    positions: int
    eps: float
    gated: bool
    rotary: bool
    theta: float
    tied: bool
    activation: str
    experts: int
    chosen: int
    expert_parallel: int


def options_of(args: Mapping[str, Any], version: float) -> Options:
    """Those of a run. Raises WorkloadError for a model that neither GPT-2 nor Llama computes."""

    def said(name: str, missing: Any) -> Any:
        result = args.get(name, missing)
        return missing if result is None else result

    rotary = (
        bool(said("use_rotary_position_embeddings", False)) or said("position_embedding_type", "") == "rope"
    )
    gated, rms = bool(said("swiglu", False)), said("normalization", "LayerNorm") == "RMSNorm"
    biases = bool(said("add_bias_linear", True)) or bool(said("add_qkv_bias", False))
    for name, value, wanted in (
        ("apply_layernorm_1p", bool(said("apply_layernorm_1p", False)), False),
        ("apply_residual_connection_post_layernorm",
         bool(said("apply_residual_connection_post_layernorm", False)), False),
        ("rotary_interleaved", bool(said("rotary_interleaved", False)), False),
        ("rotary_percent", said("rotary_percent", 1.0), 1.0),
        ("rotary_seq_len_interpolation_factor", said("rotary_seq_len_interpolation_factor", 1), 1),
        ("use_rope_scaling", bool(said("use_rope_scaling", False)), False),
        ("qk_layernorm", bool(said("qk_layernorm", False)), False),
        ("squared_relu", bool(said("squared_relu", False)), False),
        ("window_size", said("window_size", None), None),
        ("softmax_type", said("softmax_type", "vanilla"), "vanilla"),
        ("softmax_scale", said("softmax_scale", None), None),
        ("no_rope_freq", said("no_rope_freq", None), None),
        ("activation_func_clamp_value", said("activation_func_clamp_value", None), None),
        ("multi_latent_attention", bool(said("multi_latent_attention", False)), False),
        *(_of_experts(said) if said("num_experts", 0) else ()),
    ):  # fmt: skip
        if value != wanted:
            raise WorkloadError(f"{name} {str(value)[:40]} is not imported, only {wanted}")
    if not (rotary == gated == rms != biases):
        kinds = f"rotary positions {rotary}, swiglu {gated}, RMSNorm {rms} and biases {biases}"
        raise WorkloadError(
            f"{kinds} are neither GPT-2's (none except biases) nor Llama's (all except biases); only these two "
            f"are imported"
        )

    if said("num_experts", 0) and not gated:
        raise WorkloadError(
            f"num_experts {said('num_experts', 0)} is imported with Llama's layers, not with GPT-2's"
        )

    def size(name: str, missing: Any = None) -> int:
        return int(number(args, name, missing, 1))

    hidden, heads, tensor = (
        size("hidden_size"),
        size("num_attention_heads"),
        size("tensor_model_parallel_size", 1),
    )
    groups = size("num_query_groups", heads) if said("group_query_attention", False) else heads
    if heads % groups or heads % tensor or groups % tensor:
        raise WorkloadError(f"{heads} heads in {groups} groups cannot be divided over {tensor} ranks")
    experts = size("num_experts") if said("num_experts", 0) else 0
    expert_parallel = size("expert_model_parallel_size", 1)
    if experts % expert_parallel or (expert_parallel > 1 and not experts):
        raise WorkloadError(f"{experts} experts cannot be divided over {expert_parallel} ranks")
    feedforward = size("ffn_hidden_size", 4 * hidden)
    tanh = bool(said("bias_gelu_fusion", False)) or bool(said("openai_gelu", False))
    return Options(
        version=version,
        tensor=tensor,
        pipeline=size("pipeline_model_parallel_size", 1),
        layers=size("num_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_size=size("kv_channels", hidden // heads),
        feedforward=size("moe_ffn_hidden_size", feedforward) if experts else feedforward,
        positions=size("max_position_embeddings", said("seq_length", None)),
        eps=float(number(args, "norm_epsilon", said("layernorm_epsilon", 1e-5))),
        gated=gated,
        rotary=rotary,
        theta=float(number(args, "rotary_base", 10000)),
        tied=not said("untie_embeddings_and_output_weights", False),
        activation="gelu_new" if tanh else "gelu",
        experts=experts,
        chosen=size("moe_router_topk", 2) if experts else 0,
        expert_parallel=expert_parallel,
    )


def _of_experts(option: Callable[[str, Any], Any]) -> Iterator[tuple[str, Any, Any]]:
    """Options by which experts are computed as Mixtral's are: name, value, and the value that it must have."""
    often = option("moe_layer_freq", 1)
    yield "moe_layer_freq", 1 if isinstance(often, list) and set(often) == {1} else often, 1
    tensor = option("tensor_model_parallel_size", 1)
    yield "expert_tensor_parallel_size", option("expert_tensor_parallel_size", tensor), tensor
    yield "moe_router_score_function", option("moe_router_score_function", "softmax"), "softmax"
    for name in (
        "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias",
        "moe_expert_capacity_factor", "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_apply_probs_on_input", "moe_latent_size",
    ):  # fmt: skip
        yield name, option(name, None) or None, None


def number(options: Mapping[str, Any], name: str, missing: Any, minimum: int | None = None) -> float:
    """Return the value of an option that is a number.

    Args:
        options: the options of the checkpoint.
        name: the name of the option.
        missing: the value if the option is missing or None.
        minimum: the smallest allowed value, for options that are whole numbers.

    Raises:
        WorkloadError: it is not such a number.
    """
    result = options.get(name)
    result = missing if result is None else result
    if type(result) is not int and (minimum is not None or type(result) is not float):
        raise WorkloadError(f"its {name} is {str(result)[:40]!r}, which is not a number")
    if minimum is not None and result < minimum:
        raise WorkloadError(f"its {name} is {result}, which is less than {minimum}")
    return result
