"""Folders of transformers with random values of every key: read as they compute, or refused in one line."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from thin import every

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.check.compare import TOLERANCE, difference, probes
from workloads.hf.convert.folder import HARMLESS, check, describe_folder
from workloads.hf.convert.write_folder import structure
from workloads.hf.files.hf_config import read_hf_config
from workloads.hf.tables.families import by_model_type
from workloads.load import load
from workloads.model.presets import preset
from workloads.workload import Vocabulary

SIZE, LENGTH, ROUNDS = 97, 24, 12
KNOWN = Vocabulary(SIZE, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 97)))
SENTENCES = dataclasses.replace(KNOWN, sentence_end=np.arange(SIZE) % 7 == 0)
ENCODER = {
    "vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "pad_token_id": 1,
}  # fmt: skip
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {
    "vocab_size": SIZE,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 1,
}
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "rope_parameters": {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False}}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": "p2c|c2p", "share_att_key": True, "position_buckets": 6,
           "norm_rel_ebd": "layer_norm", "max_relative_positions": 16}  # fmt: skip
SIDES = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in
         {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
             "causal_lm"),
    "llama": ("LlamaForCausalLM", DECODER, "causal_lm"),
    "qwen3": ("Qwen3ForCausalLM", DECODER, "causal_lm"),
    "mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 4}, "causal_lm"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", ENCODER | DEEPSEEK, "causal_lm"),
    "bert": ("BertForMaskedLM", ENCODER, "masked_lm"),
    "roberta": ("RobertaForMaskedLM", ENCODER, "masked_lm"),
    "ernie": ("ErnieForMaskedLM", ENCODER | {"use_task_id": True}, "masked_lm"),
    "mpnet": ("MPNetForMaskedLM", ENCODER, "masked_lm"),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": SIZE, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
              "permuted_lm"),
    "deberta-v2": ("DebertaV2ForMaskedLM", ENCODER | DEBERTA, "masked_lm"),
    "albert": ("AlbertForMaskedLM", ENCODER | {"embedding_size": 16}, "masked_lm"),
    "electra": ("ElectraForMaskedLM", ENCODER | {"embedding_size": 16}, "masked_lm"),
    "t5": ("T5ForConditionalGeneration", T5, "mass"),
    "bart": ("BartForConditionalGeneration",
             {"vocab_size": SIZE, "d_model": 32, "max_position_embeddings": 32, "pad_token_id": 1} | SIDES, "mass"),
    "gpt_oss": ("GptOssForCausalLM", DECODER | GPT_OSS, "causal_lm"),
    "pegasus": ("PegasusForConditionalGeneration",
                {"vocab_size": SIZE, "d_model": 32, "max_position_embeddings": 32, "pad_token_id": 1} | SIDES, "mass"),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration",
                            T5 | {"num_experts": 4, "expert_capacity": 5, "num_sparse_encoder_layers": 1,
                                  "num_decoder_layers": 2, "num_sparse_decoder_layers": 1}, "mass"),
}  # fmt: skip
ACTIVATIONS = (
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_python",
    "relu",
    "silu",
    "swish",
    "tanh",
    "quick_gelu",
)
ROPE = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
     "original_max_position_embeddings": 8},
    *({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, **more}
      for more in ({}, {"attention_factor": 1.3}, {"truncate": False}, {"beta_fast": 8.0, "beta_slow": 2.0},
                   {"mscale": 0.7}, {"mscale_all_dim": 0.6}, {"mscale": 0.7, "mscale_all_dim": 1.2})),
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "rope_parameters": ROPE, "hidden_act": ACTIVATIONS, "activation_function": ACTIVATIONS, "dense_act_fn": ACTIVATIONS,
    "feed_forward_proj": (*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)),
    "head_dim": (8, 4, 16), "d_kv": (4, 16), "num_key_value_heads": (1, 2, 4), "sliding_window": (None, 6),
    "num_sparse_encoder_layers": (0, 1, 2), "num_sparse_decoder_layers": (0, 1, 2), "expert_capacity": (1, 3, 100),
    "layer_types": (["full_attention", "sliding_attention"],), "embedding_size": (16, 24, 32), "n_inner": (None, 40),
    "num_hidden_groups": (1, 2), "inner_group_num": (1, 2), "type_vocab_size": (1, 2, 3), "pad_token_id": (0, 1, 5),
    "n_group": (1, 2), "topk_group": (1, 2), "first_k_dense_replace": (0, 1, 2), "q_lora_rank": (None, 12),
    "num_experts_per_tok": (1, 2, 3), "num_local_experts": (3, 5), "n_shared_experts": (1, 2),
    "decoder_layers": (1, 3), "num_decoder_layers": (1, 3, None), "decoder_ffn_dim": (48, 40),
    "decoder_attention_heads": (4, 2), "max_window_layers": (0, 1), "routed_scaling_factor": (0.5, 2.5),
}  # fmt: skip
"""What is tried where the kind of the value alone would say too little."""
SIZES = {"vocab_size", "hidden_size", "d_model", "n_embd", "chunk_size_feed_forward", "num_mtp_layers"}


def alternatives(name: str, value: Any) -> tuple[Any, ...]:
    if name in VALUES:
        return VALUES[name]
    if name in SIZES or name in HARMLESS or value is None or isinstance(value, str | list | dict):
        return ()
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, 2 * value)
    return (value * 10, 0.003) if value else (0.5,)


def random_config(
    kind: str, base: dict[str, Any], draw: random.Random, changed: int
) -> tuple[Any, list[str]]:
    config_class = getattr(transformers, kind).config_class
    plain = config_class(**base)
    names = [
        f.name for f in dataclasses.fields(config_class) if alternatives(f.name, getattr(plain, f.name, None))
    ]
    chosen = draw.sample(sorted(names), min(changed, len(names)))
    return config_class(**base | {n: draw.choice(alternatives(n, getattr(plain, n))) for n in chosen}), chosen


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise + (1.0 if parameter.dim() == 1 and parameter.mean() == 1 else 0.0))
    return model


def read_as_it_computes(folder: Path, objective: str) -> float:
    """Largest difference between transformers and our model of the folder; raises WorkloadError if it is refused, by
    its table or at all."""
    family = by_model_type(json.loads((folder / "config.json").read_text())["model_type"])
    if family is not None and isinstance(describe_folder(str(folder)), HuggingFaceModel):
        family.read_config(hf_config := read_hf_config(str(folder)))
        check(family, family.read_config(hf_config), hf_config)
    workload = load(f"hf:{folder}", objective, KNOWN, sequence_length=LENGTH)
    ours = workload.build().eval()
    ours.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    text = torch.randint(6, SIZE, (4 * LENGTH,), generator=torch.Generator().manual_seed(1))
    return difference(
        workload.config, ours, str(folder), probes(workload.config, KNOWN, text, (LENGTH, 13, 5))
    )


@pytest.mark.parametrize("model_type", every(4, CLASSES))
def test_what_is_read_computes_what_transformers_computes(model_type: str, tmp_path: Path) -> None:
    kind, base, objective = CLASSES[model_type]
    draw, taken, lines = random.Random(model_type), 0, []
    for number in range(ROUNDS):
        try:
            config, chosen = random_config(kind, base, draw, number % 4)
            model = randomised(getattr(transformers, kind)(config))
        except Exception:  # transformers itself does not take it
            continue
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        try:
            apart = read_as_it_computes(folder, objective)
        except WorkloadError as error:
            lines.append(str(error))
            continue
        taken += 1
        assert apart <= TOLERANCE, {name: getattr(config, name) for name in chosen}
    assert taken > 1
    assert not any("\n" in line for line in lines)


def saved(tmp_path: Path, model_type: str, **changes: Any) -> Path:
    kind, base, _ = CLASSES[model_type]
    model_class = getattr(transformers, kind)
    randomised(model_class(model_class.config_class(**base | changes))).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("bert", {"is_decoder": True}, "is_decoder True of bert is not supported here, only False"),
        ("llama", {"rope_parameters": ROPE[1]}, r"rope_parameters\.partial_rotary_factor 0\.5 of llama"),
        (
            "switch_transformers",
            {"tie_word_embeddings": False},
            r"different decoder\.embed_tokens\.weight and encoder",
        ),
        ("switch_transformers", {"router_bias": True}, "router_bias is true; only Switch models without"),
        (
            "bart",
            {"encoder_ffn_dim": 32},
            "encoder_ffn_dim is 32 and decoder_ffn_dim is 48; only bart models",
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "as many key as query heads; set num_key_value_heads to 4",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "are quantised; give a folder",
        ),
    ],
)
def test_what_our_classes_cannot_compute_is_named(
    model_type: str, changes: dict, says: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, model_type, **changes)
    with pytest.raises(WorkloadError, match=says):
        read_as_it_computes(folder, CLASSES[model_type][2])


@pytest.mark.parametrize("scaling", [
    {"type": "yarn", "factor": 4.0}, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
])  # fmt: skip
def test_original_positions_beside_the_rotary_ones_come_first(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 777.0, "original_max_position_embeddings": 16, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_as_it_computes(folder, "causal_lm") <= TOLERANCE
    rope = load(f"hf:{folder}", "causal_lm", KNOWN, sequence_length=LENGTH).config.rope_scaling
    assert rope is not None
    assert rope.original_positions == 16


def test_a_size_of_heads_that_is_no_field_of_the_class_is_that_of_its_weights(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**ENCODER, num_key_value_heads=2)
    config.head_dim = 12
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        if path.is_file():
            path.unlink()
        found = describe_folder(str(tmp_path))
        assert isinstance(found, HuggingFaceModel), "run as it is"
    with pytest.raises(WorkloadError, match="head_dim 12 of this qwen2 is not hidden / heads"):
        read_as_it_computes(tmp_path, "causal_lm")


def test_heads_that_transformers_leaves_out_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, "deberta-v2")
    stored = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith("cls.")}
    stored |= {
        "lm_predictions.lm_head.bias": torch.zeros(SIZE),
        "mask_predictions.dense.weight": torch.zeros(32, 32),
    }
    save_file(stored, folder / "model.safetensors")
    new, left = load(f"hf:{folder}", "masked_lm", KNOWN, sequence_length=LENGTH).notes
    assert new.startswith(
        "head.dense.weight, head.dense.bias, head.norm.weight, head.norm.bias and 1 more start from random values"
    )
    assert left.startswith("lm_predictions.lm_head.bias, mask_predictions.dense.weight of ")
    stored["deberta.encoder.conv.conv.weight"] = torch.zeros(32, 32, 3)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(WorkloadError, match=r"has deberta\.encoder\.conv\.conv\.weight, which this model"):
        load(f"hf:{folder}", "masked_lm", KNOWN, sequence_length=LENGTH)


@pytest.mark.parametrize("model_type", ["bart", "pegasus"])
def test_a_bias_of_the_logits_that_we_lack_is_named(model_type: str, tmp_path: Path) -> None:
    kind, sizes, _ = CLASSES[model_type]
    model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**sizes))
    model.final_logits_bias[0, 3] = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match="final_logits_bias that is not zero"):
        read_as_it_computes(tmp_path, "mass")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_of_pegasus_are_sinusoids_or_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**CLASSES["pegasus"][1]))
    model.to(dtype).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.encoder.embed_positions.weight" in stored
    exact = dtype == torch.float32
    assert not exact or read_as_it_computes(tmp_path, "mass") <= TOLERANCE
    load(f"hf:{tmp_path}", "gap_sentences", SENTENCES, sequence_length=LENGTH)
    stored["model.decoder.embed_positions.weight"][3, 1] += 1e-5 if exact else 0.02
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WorkloadError, match=r"stores model\.decoder\.embed_positions\.weight, which"):
        load(f"hf:{tmp_path}", "gap_sentences", SENTENCES, sequence_length=LENGTH)


@pytest.mark.parametrize("tables", [1, 2])
def test_a_t5_without_scale_has_the_tables_of_its_weights(tables: int, tmp_path: Path) -> None:
    config = transformers.T5Config(
        **CLASSES["t5"][1], feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    model = transformers.T5ForConditionalGeneration(config)
    if tables == 2:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    randomised(model).save_pretrained(tmp_path)
    assert read_as_it_computes(tmp_path, "mass") <= TOLERANCE
    assert load(f"hf:{tmp_path}", "mass", KNOWN, sequence_length=LENGTH).config.tied == (tables == 1)


def test_weights_with_two_tables_are_not_tied_whatever_is_configured(tmp_path: Path) -> None:
    untied = saved(tmp_path, "llama", tie_word_embeddings=False)
    told = (
        (untied / "config.json")
        .read_text()
        .replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    (untied / "config.json").write_text(told)
    assert read_as_it_computes(untied, "causal_lm") <= TOLERANCE


def test_names_of_norms_that_tensorflow_gave_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert")
    file = folder / "model.safetensors"
    modern = load_file(file)
    legacy = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in modern.items()
    }
    assert legacy.keys() != modern.keys()
    save_file(legacy, file, metadata={"format": "pt"})
    assert read_as_it_computes(folder, "masked_lm") <= TOLERANCE


def test_a_generator_unlike_its_discriminator_is_named(tmp_path: Path) -> None:
    base = CLASSES["electra"][1]
    pair = transformers.ElectraForPreTraining(transformers.ElectraConfig(**base))
    pair.save_pretrained(tmp_path)
    narrow = base | {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "hidden_act": "relu",
    }
    transformers.ElectraForMaskedLM(transformers.ElectraConfig(**narrow)).save_pretrained(
        tmp_path / "generator"
    )
    with pytest.raises(WorkloadError, match="has activation 'relu', but this discriminator needs 'gelu'"):
        load(f"hf:{tmp_path}", "replaced_token_detection", KNOWN, sequence_length=LENGTH)


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "n_ctx": 1024,
        "layer_norm_epsilon": 1e-05, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_first_dropout": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama-3.2-1b": {
        "model_type": "llama", "attention_bias": False, "head_dim": 64, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "mlp_bias": False, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192},
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "bert-base": {
        "model_type": "bert", "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2, "vocab_size": 30522,
    },
    "t5-small": {
        "model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0, "dropout_rate": 0.1,
        "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "n_positions": 512, "num_heads": 8, "num_layers": 6,
        "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128,
    },
    "bart-base": {
        "model_type": "bart", "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": False,
        "add_final_layer_norm": False, "classif_dropout": 0.1, "d_model": 768, "decoder_attention_heads": 12,
        "decoder_ffn_dim": 3072, "decoder_layers": 6, "early_stopping": True, "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072, "encoder_layers": 6, "forced_eos_token_id": 2, "is_encoder_decoder": True,
        "max_position_embeddings": 1024, "normalize_before": False, "num_beams": 4, "vocab_size": 50265,
    },
}  # fmt: skip
"""As their authors wrote them, with keys that no class knows any more."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_as_the_presets(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert structure(describe_folder(str(tmp_path))) == structure(preset(name))


def test_roles_of_tokens_are_those_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the class are of its published vocabulary, and transformers warned of them in every command."""
    from transformers import configuration_utils

    folder = saved(tmp_path, "gpt2", vocab_size=61, bos_token_id=2, eos_token_id=0)
    told: list[str] = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", told.append)
    describe_folder(str(folder))
    assert told == []
