"""Low-rank adapters against peft: the same weights and batches, twenty steps of AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from adapter_steps import KNOWN, LENGTH, OURS, TOLERANCE, batch_of, trained_by_peft, trained_by_us
from base_run import save_experts

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.hf.export.adapter_folder import check_adapter
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.moe import Router
from workloads.transformer_workload import TransformerWorkload

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160, max_position_embeddings=64, num_key_value_heads=2, initializer_range=0.1, **SIZES
    )
    found = str(tmp_path_factory.mktemp("base"))
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    return found


def workload_of(folder: str, adapter: Adapter | None) -> TransformerWorkload:
    found = load(f"hf:{folder}", "causal_lm", KNOWN, sequence_length=LENGTH, adapter=adapter)
    assert isinstance(found, TransformerWorkload)
    return found


@pytest.mark.contract
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_peft(kind: str, folder: str) -> None:
    workload = workload_of(folder, Adapter(kind, 4, 8.0, ("*.attention.*", "*.feedforward.down")))
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    hf = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"], **KINDS[kind]
    )
    theirs = peft.get_peft_model(hf, config)
    pairs = {}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parts = name.split(".")
            layer, block, leaf = parts[4], parts[5], parts[6]
            room = "attention" if block == "self_attn" else "feedforward"
            part = next(ours for ours, theirs_ in OURS.items() if theirs_ == leaf)
            end = {"lora_A": "lora_a.weight", "lora_B": "lora_b.weight"}.get(parts[7], "magnitude.weight")
            pairs[f"layers.{layer}.{room}.{part}.{end}"] = parameter
    ours = dict(model.named_parameters())
    assert pairs.keys() == {name for name in ours if name not in workload.frozen}
    with torch.no_grad():
        for name, parameter in pairs.items():
            if name.endswith("magnitude.weight"):
                torch.testing.assert_close(parameter.flatten(), ours[name], rtol=1e-6, atol=0)
            parameter.copy_(ours[name].view_as(parameter))
    assert trained_by_us(workload, model) == pytest.approx(trained_by_peft(theirs), rel=TOLERANCE)
    for name, parameter in pairs.items():
        torch.testing.assert_close(ours[name], parameter.view_as(ours[name]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_merged(kind: str, folder: str, tmp_path: Path) -> None:
    workload = workload_of(folder, Adapter(kind, 4, 8.0, ("*.attention.*",)))
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    trained_by_us(workload, model)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    workload.to_hf(state.__getitem__, str(tmp_path))
    hf = transformers.LlamaForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    batch = batch_of(99)
    with torch.no_grad():
        ours, theirs = model.eval()(batch).logits, hf(input_ids=batch["tokens"]).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_before_the_first_step_the_model_is_the_base(folder: str) -> None:
    base = workload_of(folder, None)
    plain = with_weights(base, lambda name: base.initial(name, 3))
    for kind in KINDS:
        workload = workload_of(folder, Adapter(kind, 4, 8.0, ("*.attention.*",)))
        model = with_weights(workload, lambda name, w=workload: w.initial(name, 3))
        with torch.no_grad():
            torch.testing.assert_close(
                model(batch_of(0)).logits, plain(batch_of(0)).logits, rtol=0, atol=1e-5
            )


def test_a_new_head_is_trained_too(folder: str) -> None:
    found = load(
        f"hf:{folder}", "sequence_classification", KNOWN, sequence_length=LENGTH, labels=("bad", "good"),
        adapter=Adapter("lora", 4, 8.0, ("*.attention.query",)),
    )  # fmt: skip
    trained = set(found.shapes) - found.frozen
    assert "head.output.weight" in trained
    assert all("lora" in name or name.startswith("head.") for name in trained)


def test_bitfit_trains_the_biases() -> None:
    plain = load("gpt-tiny", "causal_lm", KNOWN, sequence_length=LENGTH)
    assert isinstance(plain, TransformerWorkload)
    found = replace(plain).with_adapter(Adapter("bitfit", 16, 32.0, ()))
    assert {name for name in found.shapes if name not in found.frozen} == {
        name for name in plain.shapes if name.endswith("bias")
    }


def test_a_rank_by_pattern_changes_peft_s_scale_and_here_all_have_one(folder: str) -> None:
    """peft divides `lora_alpha` by the rank of the pattern, unless `alpha_pattern` has one for it too."""
    hf = transformers.LlamaForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2}
    )
    attention = peft.get_peft_model(hf, config).base_model.model.model.layers[0].self_attn
    assert (attention.q_proj.scaling["default"], attention.v_proj.scaling["default"]) == (2.0, 8.0)
    workload = workload_of(folder, Adapter("lora", 8, 16.0, ("*.attention.query", "*.attention.value")))
    trained = workload.shapes.keys() - workload.frozen
    assert {workload.shapes[name][0] for name in trained if name.endswith("lora_a.weight")} == {8}
    assert workload.adapter is not None
    assert workload.adapter.scale == 2.0


def test_a_merge_of_a_tied_head_moves_peft_s_embedding_and_a_head_is_refused_here(tmp_path: Path) -> None:
    """peft adds the head's product to the one tensor that both are, so that the merged model is another one."""
    config = transformers.LlamaConfig(
        vocab_size=160, initializer_range=0.2, tie_word_embeddings=True, **SIZES
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokens = batch_of(0)["tokens"]

    def after_a_merge(**options: list[str]) -> tuple[float, bool]:
        hf = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        options = {"target_modules": ["q_proj"], **options}
        theirs = peft.get_peft_model(hf, peft.LoraConfig(**options)).eval()  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.1 * parameter.requires_grad)
            before = theirs(input_ids=tokens).logits
            whole = theirs.merge_and_unload()
            moved = float((whole(input_ids=tokens).logits - before).abs().max())
        return moved, whole.config.tie_word_embeddings

    moved, tied = after_a_merge(target_modules=["q_proj", "lm_head"])
    assert moved > 1.0
    assert tied
    moved, tied = after_a_merge(modules_to_save=["lm_head"])
    assert moved < 1e-4
    assert not tied
    with pytest.raises(WorkloadError, match=r"'head\*' matches no linear layer; the nearest are layers"):
        workload_of(str(tmp_path), Adapter("lora", 4, 8.0, ("head*",)))
    workload = workload_of(str(tmp_path), Adapter("lora", 4, 8.0, ("*",)))
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    trained_by_us(workload, model)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    workload.to_hf(state.__getitem__, str(tmp_path / "out"))
    out = transformers.LlamaForCausalLM.from_pretrained(str(tmp_path / "out"), dtype=torch.float32)
    assert out.lm_head.weight is out.model.embed_tokens.weight
    with torch.no_grad():
        ours, theirs = model.eval()(batch_of(0)).logits, out(input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_experts_have_a_pair_each_and_are_merged(tmp_path: Path) -> None:
    folder = save_experts(tmp_path / "base", 160)
    adapter = Adapter("lora", 4, 8.0, ("*.experts.*",))
    workload = load(f"hf:{folder}", "causal_lm", KNOWN, sequence_length=LENGTH, adapter=adapter)
    assert isinstance(workload, TransformerWorkload)
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    trained = {name for name, _ in model.named_parameters()} - workload.frozen
    assert len(trained) == 2 * 3 * 2
    assert all(name.endswith(("_lora_a", "_lora_b")) for name in trained)
    before = model(batch_of(99)).logits.detach()
    trained_by_us(workload, model)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    workload.to_hf(state.__getitem__, str(tmp_path))
    hf = transformers.MixtralForCausalLM.from_pretrained(
        str(tmp_path), dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        ours, theirs = model.eval()(batch_of(99)).logits, hf(input_ids=batch_of(99)["tokens"]).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert (ours - before).abs().max() > 1e-2
    with pytest.raises(WorkloadError, match="stacked experts are not written for peft"):
        check_adapter(workload)
    with pytest.raises(WorkloadError, match="dora does not support stacked experts"):
        load(
            f"hf:{folder}", "causal_lm", KNOWN, sequence_length=LENGTH, adapter=replace(adapter, kind="dora")
        )


@pytest.mark.slow
def test_twenty_steps_of_experts_are_those_of_peft(tmp_path: Path) -> None:
    folder = save_experts(tmp_path, 160)
    workload = load(
        f"hf:{folder}",
        "causal_lm",
        KNOWN,
        sequence_length=LENGTH,
        adapter=Adapter("lora", 4, 8.0, ("*.experts.down",)),
    )
    assert isinstance(workload, TransformerWorkload)
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    hf = transformers.MixtralForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_router_logits=False
    )
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[], target_parameters=["mlp.experts.down_proj"], lora_dropout=0.0
    )
    theirs = peft.get_peft_model(hf, config)
    ours = dict(model.named_parameters())
    pairs = {}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            layer = name.split("layers.")[1].split(".")[0]
            pairs[f"layers.{layer}.feedforward.experts.down_{'lora_a' if 'lora_A' in name else 'lora_b'}"] = (
                parameter
            )

    def as_theirs(name: str) -> torch.Tensor:  # [experts * rank, in] and [out, rank * experts]
        tensor = ours[name].detach()
        return tensor.flatten(0, 1) if name.endswith("a") else tensor.permute(1, 2, 0).flatten(1)

    assert pairs.keys() == {name for name in ours if name not in workload.frozen}
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameter.copy_(as_theirs(name))
    router = [module for module in model.modules() if isinstance(module, Router)]
    for module in router:
        module.moe = replace(module.moe, auxiliary=0.0, z_loss=0.0)
    assert trained_by_us(workload, model) == pytest.approx(trained_by_peft(theirs), rel=TOLERANCE)
    for name, parameter in pairs.items():
        torch.testing.assert_close(as_theirs(name), parameter, rtol=0, atol=TOLERANCE)
