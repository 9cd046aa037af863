"""Names of other projects: a network with torchtitan's modules computes what transformers computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.errors import WorkloadError
from workloads.hf.export.dcp_export import export_dcp
from workloads.hf.files.weight_files import Weights
from workloads.load import load
from workloads.workload import Vocabulary

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Projections(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.Linear(hidden, n * head, bias=False) for n in (heads, kv_heads, kv_heads)
        )


class Attention(nn.Module):
    """With Meta's rotary positions: neighbouring numbers of a head are one complex number."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.theta = config.rope_parameters["rope_theta"]
        self.qkv_linear = Projections(config.hidden_size, self.heads, self.kv_heads, self.head)
        self.wo = nn.Linear(self.heads * self.head, config.hidden_size, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        rates = 1 / self.theta ** (torch.arange(0, self.head, 2) / self.head)
        angles = torch.outer(torch.arange(x.shape[1]), rates)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(
            pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
        ).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            getattr(self.qkv_linear, name)(x).unflatten(-1, (-1, self.head)) for name in ("wq", "wk", "wv")
        )
        q, k, v = (t.transpose(1, 2) for t in (self.turned(q), self.turned(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size)
        self.attention_norm, self.ffn_norm = (
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(n): Layer(config) for n in range(config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_goes_to_torchtitan_and_back(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "titan").mkdir()
    export_dcp(str(tmp_path / "hf"), str(tmp_path / "titan"), "torchtitan")
    titan = Titan(config)
    state = titan.state_dict()
    assert set(dcp.FileSystemReader(tmp_path / "titan").read_metadata().state_dict_metadata) == set(state)
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    titan.load_state_dict(state)
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        assert torch.allclose(titan(tokens), model(tokens).logits, atol=1e-5)
    workload = load(f"hf:{tmp_path / 'titan'}", "causal_lm", Vocabulary(61, eos=2, pad=1), sequence_length=16)
    stored = workload.stored("layers.1.attention.key.weight", 0)
    assert stored is not None
    part = (slice(3, 13), slice(2, 5))
    assert torch.equal(stored[part], model.model.layers[1].self_attn.k_proj.weight[part])


@pytest.mark.parametrize("older", [False, True])
def test_experts_are_one_tensor_in_torchtitan(tmp_path: Path, older: bool) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    plain, target = Weights(str(tmp_path / "hf")), tmp_path / "titan"
    target.mkdir()
    export_dcp(str(tmp_path / "hf"), str(target), "torchtitan")
    stacks = "layers.0.moe.routed_experts.inner_experts."
    found = {f"{stacks}{name}": torch.empty(shape) for name, shape in
             (("w1_EFD", (4, 24, 32)), ("w3_EFD", (4, 24, 32)), ("w2_EDF", (4, 32, 24)))}  # fmt: skip
    dcp.load(found, checkpoint_id=target, no_dist=True)
    for ours, theirs in (("w1_EFD", "gate"), ("w3_EFD", "up"), ("w2_EDF", "down")):
        for number in range(4):
            expert = plain.read(f"model.layers.0.mlp.experts.{number}.{theirs}_proj.weight")
            assert torch.equal(found[f"{stacks}{ours}"][number], expert)
    about = set(dcp.FileSystemReader(target).read_metadata().state_dict_metadata)
    assert "layers.1.moe.router.gate.weight" in about
    if older:
        state = whole(target, about)
        renamed = {
            name.replace("routed_experts.inner_experts", "experts")
            .replace("_EFD", "")
            .replace("_EDF", ""): tensor
            for name, tensor in state.items()
        }
        dcp.save(renamed, checkpoint_id=tmp_path / "older", no_dist=True)
        shutil.copyfile(target / "config.json", tmp_path / "older" / "config.json")
        target = tmp_path / "older"
    read = Weights(str(target))
    assert sorted(read.names) == sorted(plain.names)
    workload = load(f"hf:{target}", "causal_lm", Vocabulary(61, eos=2, pad=1), sequence_length=16)
    ours = workload.build().eval()
    ours.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        assert torch.allclose(ours({"tokens": tokens}).logits, model(tokens).logits, atol=1e-5)
    stored = workload.stored("layers.0.feedforward.experts.down", 0)
    assert stored is not None
    part = (slice(1, 3), slice(3, 13), slice(2, 5))
    wanted = torch.stack([plain.read(f"model.layers.0.mlp.experts.{n}.down_proj.weight") for n in (1, 2)])
    assert torch.equal(stored[part], wanted[(slice(None), *part[1:])])


def whole(folder: Path, names: set[str]) -> dict[str, Tensor]:
    """All tensors of a folder."""
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: torch.empty(about[name].size) for name in names}  # type: ignore[union-attr]
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def test_older_names_and_what_a_trainer_saves_beside_the_weights_are_read(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    config.save_pretrained(tmp_path)
    state = {
        n.replace("qkv_linear.", "").replace("lm_head", "output"): t
        for n, t in Titan(config).state_dict().items()
    }
    optimizer = {
        f"optimizer.state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in state.items()
    }
    dcp.save(
        state | optimizer | {"freqs_cis": torch.ones(3), "train_state": {"step": 5}}, checkpoint_id=tmp_path
    )
    model = transformers.LlamaForCausalLM(config)
    assert set(Weights(str(tmp_path)).names) == set(model.state_dict())


@pytest.mark.parametrize(
    ("kind", "norms"),
    [
        ("llama", {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}),
        (
            "olmo2",
            {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "feed_forward_norm"},
        ),
    ],
)
def test_olmo_names(tmp_path: Path, kind: str, norms: dict[str, str]) -> None:
    """The names are those that OLMo-core's convert.py lists."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **HEADS)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "olmo").mkdir()
    export_dcp(str(tmp_path / "hf"), str(tmp_path / "olmo"), "olmo")
    stored = set(dcp.FileSystemReader(tmp_path / "olmo").read_metadata().state_dict_metadata)
    of_layer = {"attention.w_q", "attention.w_k", "attention.w_v", "attention.w_out"}
    of_layer |= {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3", *norms.values()}
    of_layer |= {"attention.q_norm", "attention.k_norm"} if kind == "olmo2" else set()
    expected = {f"model.blocks.{n}.{name}.weight" for n in range(2) for name in of_layer}
    assert stored == expected | {f"model.{n}.weight" for n in ("embeddings", "lm_head.norm", "lm_head.w_out")}
    found = Weights(str(tmp_path / "olmo"))
    for theirs, ours in norms.items():
        part = found.part(f"model.layers.1.{theirs}.weight", (slice(0, 32),))
        assert torch.equal(part, model.state_dict()[f"model.layers.1.{theirs}.weight"]), ours


def test_a_class_that_a_project_lacks_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    with pytest.raises(
        WorkloadError,
        match="names of torchtitan are known for llama, qwen3, qwen3_moe, but this model is gpt2",
    ):
        export_dcp(str(tmp_path / "hf"), str(tmp_path / "out"), "torchtitan")
    dcp.save({"tok_embeddings.weight": torch.ones(2, 2)}, checkpoint_id=tmp_path / "in")
    config.save_pretrained(tmp_path / "in")
    with pytest.raises(WorkloadError, match="names of torchtitan are known for"):
        Weights(str(tmp_path / "in"))
