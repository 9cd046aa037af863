"""Experts and virtual stages in files laid out as Megatron-LM's come back as the model that they were cut from."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from orchestrator.config.errors import InputError
from orchestrator.extensions.importers import megatron, megatron_unpickle
from orchestrator.extensions.importers.megatron import import_megatron
from workloads.load import load
from workloads.workload import Vocabulary

HEADS, SIZE, HIDDEN, LAYERS, FEEDFORWARD, VOCABULARY, EXPERTS = 4, 8, 32, 4, 24, 96, 4
ARGS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": 4 * FEEDFORWARD,
    "moe_ffn_hidden_size": FEEDFORWARD, "max_position_embeddings": 24, "swiglu": True, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    "rotary_base": 5000, "num_experts": EXPERTS, "moe_router_topk": 2, "norm_epsilon": 1e-5, "moe_layer_freq": [1] * 4,
}  # fmt: skip
WAYS = ("alone", "numbered", "together")
"""SequentialMLP, TEGroupedMLP and GroupedMLP."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read in this process, which takes less time than one of its own."""

    def ask(_: str, asked: dict[str, Any]) -> dict[str, Any]:
        answer = megatron_unpickle.answer(asked)
        if "refused" in answer:
            raise InputError(answer["refused"], asked["folder"], "")
        return answer

    monkeypatch.setattr(megatron, "ask", ask)


@pytest.fixture(scope="module")
def mixtral() -> Any:
    torch.manual_seed(2)
    config: Any = transformers.MixtralConfig(
        vocab_size=VOCABULARY, max_position_embeddings=24, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=FEEDFORWARD, rms_norm_eps=1e-5,
        num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def of_layer(block: nn.Module, tensor: int, tp: int, expert: int, ep: int, way: str) -> dict[str, Tensor]:
    """What a rank has of a layer."""
    one: Any = block

    def cut(whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(tensor, dim)[tp]

    attention, experts = one.self_attn, one.mlp.experts
    each = EXPERTS // expert
    mine = range(ep * each, (ep + 1) * each)
    heads = [
        cut(p.weight, 0).view(-1, SIZE, HIDDEN)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    up = [torch.cat([cut(half, 0) for half in experts.gate_up_proj[n].chunk(2)]) for n in mine]
    down = [cut(experts.down_proj[n], 1) for n in mine]
    found = {
        "self_attention.linear_qkv.weight": torch.cat(heads, 1).reshape(-1, HIDDEN),
        "self_attention.linear_proj.weight": cut(attention.o_proj.weight, 1),
        "self_attention.linear_qkv.layer_norm_weight": one.input_layernorm.weight,
        "pre_mlp_layernorm.weight": one.post_attention_layernorm.weight,
        "mlp.router.weight": one.mlp.gate.weight,
    }
    if way == "together":
        sides = torch.stack([w.T for w in up]), torch.stack([w.T for w in down])
        return found | {"mlp.experts.weight1": sides[0].reshape(HIDDEN, -1),
                        "mlp.experts.weight2": sides[1].reshape(-1, HIDDEN)}  # fmt: skip
    for number, pair in enumerate(zip(up, down, strict=True)):
        for fc, weight in zip("12", pair, strict=True):
            alone = f"mlp.experts.local_experts.{number}.linear_fc{fc}.weight"
            found[alone if way == "alone" else f"mlp.experts.linear_fc{fc}.weight{number}"] = weight
    return found


def save(
    folder: Path, model: Any, degrees: tuple[int, int, int], virtual: int, way: str, **more: Any
) -> Path:
    """The files of all ranks of tensor, pipeline and expert parallelism."""
    tensor, pipeline, expert = degrees
    args = ARGS | {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
                   "expert_model_parallel_size": expert} | more  # fmt: skip
    each = LAYERS // (pipeline * virtual)
    for tp, pp, ep in itertools.product(*map(range, degrees)):
        chunks = []
        for number in range(virtual):
            stage = number * pipeline + pp
            found: dict[str, Tensor] = {}
            for layer in range(each):
                block = model.model.layers[stage * each + layer]
                parts = of_layer(block, tensor, tp, expert, ep, way)
                found |= {f"decoder.layers.{layer}.{name}": part for name, part in parts.items()}
            if stage == 0:
                found["embedding.word_embeddings.weight"] = model.model.embed_tokens.weight.chunk(tensor)[tp]
            if stage == pipeline * virtual - 1:
                found["decoder.final_layernorm.weight"] = model.model.norm.weight
                found["output_layer.weight"] = model.lm_head.weight.chunk(tensor)[tp]
            chunks.append({name: each.detach().clone() for name, each in found.items()})
        models = (
            {"model": chunks[0]} if virtual == 1 else {f"model{n}": chunk for n, chunk in enumerate(chunks)}
        )
        name = (
            f"mp_rank_{tp:02d}"
            + (f"_{pp:03d}" if pipeline > 1 else "")
            + (f"_{ep:03d}" if expert > 1 else "")
        )
        place = folder / "iter_0000007" / name
        place.mkdir(parents=True)
        stored = {"args": argparse.Namespace(**args), "iteration": 7, "checkpoint_version": 3.0, **models}
        torch.save(stored, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.mark.parametrize(
    ("degrees", "virtual", "way"),
    [((1, 1, 1), 1, "alone"), ((1, 1, 2), 1, "together"), ((2, 1, 4), 1, "numbered"), ((2, 2, 2), 2, "alone"),
     ((1, 2, 1), 2, "together")],
)  # fmt: skip
def test_experts_and_virtual_stages_come_back_as_the_model(
    mixtral: Any, degrees: tuple[int, int, int], virtual: int, way: str, tmp_path: Path
) -> None:
    found = import_megatron(
        str(save(tmp_path / "theirs", mixtral, degrees, virtual, way)), str(tmp_path / "ours")
    )
    assert (found["tensor_parallel"], found["pipeline_parallel"], found["model_type"]) == (
        *degrees[:2],
        "mixtral",
    )
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    wanted = dict(mixtral.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    tokens = torch.arange(20)[None]
    workload: Any = load(
        f"hf:{tmp_path / 'ours'}", "causal_lm", Vocabulary(VOCABULARY, eos=0), sequence_length=20
    )
    ours = workload.build()
    ours.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    assert torch.allclose(ours.eval()({"tokens": tokens}).logits, mixtral(tokens).logits, atol=1e-5)


def edited(source: Path, place: str, edit: Any) -> None:
    path = source / "iter_0000007" / place / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    edit(stored)
    torch.save(stored, path)


ROUTER, LAST = (
    "decoder.layers.0.mlp.router.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight",
)


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (lambda s: s["model0"][ROUTER].add_(1), "differs between expert-parallel ranks"),
        (lambda s: s["model0"].pop(LAST.replace("s.1.m", "s.0.m")), "layers.0.experts.3.down.weight is missing"),
        (lambda s: s["model0"].update({LAST.replace("ts.1.", "ts.2."): torch.ones(1)}), "2 experts per rank"),
        (lambda s: s.pop("model1"), "has other options or another iteration"),
        (lambda s: (s.pop("model0"), s.pop("model1")), "has no model"),
        (lambda s: s.update(model0=s["model1"], model1=s["model0"]), "differs between expert-parallel ranks"),
    ],
)  # fmt: skip
def test_files_of_experts_that_do_not_go_together(
    mixtral: Any, edit: Any, wanted: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "theirs", mixtral, (1, 2, 2), 2, "alone")
    edited(source, "mp_rank_00_000_001", edit)
    with pytest.raises(InputError, match=wanted):
        import_megatron(str(source), str(tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax True is not imported"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function sigmoid"),
        ({"moe_shared_expert_intermediate_size": 48}, "moe_shared_expert_intermediate_size 48"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size 2"),
        ({"expert_model_parallel_size": 3}, "4 experts cannot be divided over 3 ranks"),
        ({"expert_model_parallel_size": 4}, "expert-parallel rank 2 is missing, of 4"),
        ({"expert_model_parallel_size": 1}, "belongs to more ranks than its options say"),
        ({"num_experts": None}, "0 experts cannot be divided over 2 ranks"),
        ({"moe_ffn_hidden_size": 48}, "its options make it"),
    ],
)
def test_options_of_experts_that_are_not_imported(
    mixtral: Any, more: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "theirs", mixtral, (1, 1, 2), 1, "alone", **more)
    with pytest.raises(InputError, match=wanted):
        import_megatron(str(source), str(tmp_path / "ours"))
