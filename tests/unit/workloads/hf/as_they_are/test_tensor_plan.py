"""Which plans of transformers are followed, and what of a model they divide."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from workloads.hf.as_they_are.hf_class import HuggingFaceModel, describe_hf_class
from workloads.hf.as_they_are.tensor_plan import cut_size, is_stack, stacked, tensor_styles

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
MORE: dict[str, dict[str, Any]] = {
    "Ministral": GROUPED,
    "Glm": {**GROUPED, "pad_token_id": 1},
    "Phi3": {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 1},
    "Qwen3Moe": {"num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 16},
    "GraniteSWA": {"num_key_value_heads": 2, "intermediate_size": 48},
    "DeepseekV2": {
        "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "topk_method": "greedy", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "Bloom": {},
}  # fmt: skip


def described(folder: Path, kind: str) -> HuggingFaceModel:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MORE[kind])
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    return describe_hf_class(str(folder))


def test_the_plan_of_transformers_is_read(tmp_path: Path) -> None:
    model = described(tmp_path, "Ministral")
    styles, why = model.styles
    assert why == ""
    assert styles["model.layers.*.self_attn.q_proj"] == "column"
    assert styles["model.layers.*.mlp.down_proj"] == "row"
    assert "lm_head" not in styles  # is whole on every rank
    assert model.head_counts == (4, 2)
    assert model.cut == 16  # 32 columns of queries, 16 of keys, 48 of the feed-forward


@pytest.mark.parametrize(
    ("kind", "module", "style", "cut"),
    [
        ("Phi3", "self_attn.qkv_proj", "joined", 16),
        ("Glm", "mlp.gate_up_proj", "joined", 16),
        ("Qwen3Moe", "mlp.experts", "stack", 2),
        ("GraniteSWA", "self_attn", "own", 4),
        ("DeepseekV2", "self_attn.kv_a_proj_with_mqa", "latent", 4),
    ],
)
def test_fused_layers_experts_and_what_heads_share(
    kind: str, module: str, style: str, cut: int, tmp_path: Path
) -> None:
    model = described(tmp_path, kind)
    styles, why = model.styles
    assert why == ""
    assert styles[f"model.layers.*.{module}"] == style
    assert "lm_head" not in styles
    assert model.cut == cut
    assert not any("experts." in name and "shared" not in name for name in styles)  # each expert is whole


def test_without_a_plan_it_says_so(tmp_path: Path) -> None:
    assert described(tmp_path, "Bloom").styles == ({}, "transformers ships no plan for it")


class Odd(nn.Module):
    """A layer of another kind than the plan says."""

    def __init__(self, layer: nn.Module, plan: dict[str, str]) -> None:
        super().__init__()
        self.layers, self.tp_plan = nn.ModuleList([layer]), plan

    def get_output_embeddings(self) -> None:
        return None


class Experts(nn.Module):
    """A stack of four."""

    def __init__(self, sizes: tuple[int, ...] = (4, 4)) -> None:
        super().__init__()
        self.num_experts = 4
        for number, size in enumerate(sizes):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.empty(size, 2, 2)))

    def forward(self, hidden: Any, chosen: Any, weights: Any) -> None:
        pass


class Called(Experts):
    def forward(self, hidden: Any) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("layer", "plan", "why"),
    [
        (nn.Conv1d(4, 4, 1), {"layers.*": "rowwise"}, "layers.0 is a Conv1d"),
        (nn.Linear(4, 4), {"layers.*": "packed_colwise"}, "has packed_colwise, which is not known here"),
        (
            nn.Linear(4, 4),
            {"layers.*": "mla_kv_a_proj"},
            "it does not say which outputs of layers.0 all heads share",
        ),
        (nn.Linear(4, 4), {"layers.*": "local_params"}, "not clear about layers.0"),
        (nn.Linear(4, 4), {"layers.*": "colwise"}, "names none of its layers"),
        (Experts((4, 3)), {"layers.*": "moe_tp_experts"}, "layers.0 is not a plain stack of experts"),
        (Called(), {"layers.*": "moe_tp_experts"}, "layers.0 is not a plain stack of experts"),
        (Experts(), {"layers.*": "moe_tp_experts", "layers.*.weight0": "packed_colwise"}, ""),
    ],
)
def test_a_plan_for_layers_of_another_kind_is_not_used(
    layer: nn.Module, plan: dict[str, str], why: str
) -> None:
    styles, found = tensor_styles(Odd(layer, plan))
    assert found.endswith(why)
    assert bool(styles) == (why == "")
    assert is_stack(layer) == (why == "")


def test_stacks_are_what_experts_hold_a_slice_each_of() -> None:
    """Biases among them, and nothing of a router, which has a row for each expert."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GptOssConfig(
        **sizes, num_key_value_heads=1, head_dim=8, vocab_size=20, num_local_experts=4
    )
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(config)
    leaves = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    assert list(stacked(bare)) == [f"model.layers.0.mlp.experts.{leaf}" for leaf in leaves]


def test_without_styles_nothing_is_cut() -> None:
    assert cut_size(Experts(), {}) == 1
