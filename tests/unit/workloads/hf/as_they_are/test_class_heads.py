"""Supervised heads, preferences and adapters of Hugging Face classes that run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.behaviour import check_behaviour, move_adapter, trained_model
from workloads.hf.check.compare import TOLERANCE, difference
from workloads.hf.check.made_up_rows import reader
from workloads.hf.export.adapter_folder import check_adapter, write_adapter
from workloads.load import load
from workloads.objectives.samples import Samples
from workloads.parameter_shares import trained_share
from workloads.workload import Batch, Frame, Vocabulary

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
PAIR = {"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        "pad_token_id": 1, "eos_token_id": 4, "bos_token_id": 2, "decoder_start_token_id": 4}  # fmt: skip
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "camembert": ("Camembert", "MaskedLM", {**SIZES, "max_position_embeddings": 66, "type_vocab_size": 1}),
    "deberta": ("DebertaV2", "MaskedLM", SIZES),
    "modernbert": ("ModernBert", "MaskedLM", {**SIZES, "local_attention": 8}),
    "ministral": ("Ministral", "CausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma3": ("Gemma3Text", "CausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 8}),
    "bloom": ("Bloom", "CausalLM", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 1}),
    "marian": ("Marian", "Seq2SeqLM", {**PAIR, "bos_token_id": None}),
    # These have a table of their own here, but not for all heads.
    "t5": ("T5", "Seq2SeqLM", {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
           "pad_token_id": 1, "eos_token_id": 4, "decoder_start_token_id": 1, "dropout_rate": 0.0}),
    "bart": ("Bart", "Seq2SeqLM", PAIR),
    "llama": ("Llama", "CausalLM", SIZES),
    "mixtral": ("Mixtral", "CausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "xlnet": ("XLNet", "CausalLM", {"vocab_size": 97, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64,
              "pad_token_id": 1}),
    "gpt2": ("GPT2", "CausalLM", {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
KNOWN = Vocabulary(97, eos=4, pad=1, bos=2, cls=3, sep=5, mask=6, sentence_end=np.ones(97, bool))
FRAMES = {
    "t5": Frame(((), (4,)), ((), (4,), (4,)), False),
    "bart": Frame(((2,), (4,)), ((2,), (4, 4), (4,)), False),
}
SUPERVISED = ("sequence_classification", "regression", "token_classification", "span_extraction")
CASES = [
    *(
        (model, objective)
        for model in ("camembert", "deberta", "modernbert", "ministral")
        for objective in SUPERVISED
    ),
    *(("t5", objective) for objective in SUPERVISED),
    *(("bart", objective) for objective in SUPERVISED if objective != "token_classification"),
    *((model, "span_extraction") for model in ("llama", "gpt2", "mixtral")),
    ("xlnet", "sequence_classification"),
    *((model, "sequence_classification") for model in ("gemma3", "bloom")),
    *((model, o) for model in ("ministral", "gemma3") for o in ("conversation", "dpo", "ipo", "kto", "orpo")),
    ("marian", "seq2seq"),
]
QUICK = (
    ("camembert", "sequence_classification"), ("ministral", "dpo"), ("bart", "span_extraction"),
    ("mixtral", "span_extraction"),
)  # fmt: skip


def loaded(folder: Path, model: str, objective: str, adapter: Adapter | None = None) -> HuggingFaceWorkload:
    family, kind, sizes = CONFIGS[model]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    getattr(transformers, f"AutoModelFor{kind}").from_config(config).save_pretrained(folder)
    labels = ("a", "b", "c") if "classification" in objective else ()
    known = Vocabulary(**{**KNOWN.__dict__, "frame": FRAMES.get(model)})
    found = load(f"hf:{folder}", objective, known, sequence_length=24, labels=labels, adapter=adapter)
    assert isinstance(found, HuggingFaceWorkload)
    return found


def batch_of(workload: HuggingFaceWorkload) -> Batch:
    return workload.objective.collate(
        Samples(reader(workload.objective, workload.vocabulary, 24), 3), [0, 1, 2], 0
    )


@pytest.mark.parametrize(
    ("model", "objective"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_a_class_that_passes_its_checks_has_the_loss_of_transformers(
    model: str, objective: str, tmp_path: Path
) -> None:
    workload = loaded(tmp_path, model, objective)
    check_behaviour(workload)
    batch = batch_of(workload)
    if objective not in (*SUPERVISED, "seq2seq"):
        return
    network = trained_model(workload, 0)
    ours = workload.loss(network, batch)
    given = {"input_ids": batch["tokens"], "attention_mask": batch["padding"].long()}
    labels = batch.get("sequence_labels", batch.get("labels"))
    if objective == "span_extraction":
        given |= {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
    elif objective == "seq2seq":
        given |= {"labels": labels, "decoder_input_ids": batch["decoder_tokens"]}
    else:
        given["labels"] = labels
    theirs = network.network(**given).loss
    torch.testing.assert_close(ours.total / ours.count, theirs, rtol=1e-5, atol=0)
    assert workload.notes if objective != "seq2seq" else not workload.notes


ADAPTED = [
    ("ministral", "causal_lm", "lora", ("*_proj",)),
    ("gemma3", "conversation", "dora", ("*.self_attn.*", "*.mlp.*")),
    ("camembert", "sequence_classification", "lora", ("*.query", "*.value")),
    ("deberta", "token_classification", "dora", ("*_proj",)),
    ("modernbert", "sequence_classification", "rslora", ("*Wqkv",)),
    ("bloom", "causal_lm", "lora", ("*.query_key_value",)),
    ("t5", "sequence_classification", "lora", ("*.q", "*.v")),
    ("bart", "span_extraction", "lora", ("*_proj",)),
    ("marian", "seq2seq", "lora", ("*fc1",)),
]


@pytest.mark.parametrize(
    ("model", "objective", "kind", "targets"),
    [case if n == 2 else pytest.param(*case, marks=pytest.mark.slow) for n, case in enumerate(ADAPTED)],
    ids=str,
)
def test_peft_loads_the_adapter_of_a_class(
    model: str, objective: str, kind: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("base", "adapter", "plain"):
        (tmp_path / name).mkdir()
    workload = loaded(tmp_path / "base", model, objective, Adapter(kind, 4, 8.0, targets))
    check_behaviour(workload)  # merged, it computes the same
    check_adapter(workload)
    ends = ("lora_a.weight", "lora_b.weight", "magnitude.weight")
    heads = {f"network.{name}" for name in workload.new}
    trained = {name for name, _ in workload.build().named_parameters()} - workload.frozen
    assert all(n.endswith(ends) or n in heads for n in trained)
    network = trained_model(workload, 3)
    move_adapter(network)
    state = network.eval().state_dict()
    write_adapter(workload, state.__getitem__, str(tmp_path / "adapter"), "somewhere")
    workload.base_to_hf(state.__getitem__, str(tmp_path / "plain"))

    def onto(bare: Any) -> Any:
        return peft.PeftModel.from_pretrained(bare, str(tmp_path / "adapter")).eval()

    found = [difference(workload.config, network, str(tmp_path / "plain"), [batch_of(workload)], f)
             for f in (onto, lambda bare: bare)]  # fmt: skip
    assert found[0] <= TOLERANCE
    assert found[1] > 10 * TOLERANCE
    assert trained_share(workload.config, (), workload.adapter) < 0.5


@pytest.mark.slow
def test_twenty_steps_of_an_adapted_class_are_those_of_peft(tmp_path: Path) -> None:
    workload = loaded(tmp_path, "ministral", "causal_lm", Adapter("lora", 4, 8.0, ("*_proj",)))
    ours = trained_model(workload, 3)
    plain = transformers.MinistralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    named = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=named)).train()
    pairs = []
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            mine = name.removeprefix("base_model.model.").replace("lora_A.default", "lora_a")
            pairs.append(
                (ours.get_parameter("network." + mine.replace("lora_B.default", "lora_b")), parameter)
            )
    with torch.no_grad():
        for one, other in pairs:
            other.copy_(one)
    sides = [torch.optim.AdamW(side, lr=1e-2, eps=1e-4) for side in map(list, zip(*pairs, strict=True))]
    for step in range(20):
        tokens = torch.randint(7, 97, (4, 25), generator=torch.Generator().manual_seed(step))
        found = workload.loss(ours, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        logits = theirs(input_ids=tokens[:, :-1]).logits
        losses = [
            found.total / found.count,
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()),
        ]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for optimizer, loss in zip(sides, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    bloom = loaded(tmp_path / "bloom", "bloom", "conversation")
    with pytest.raises(WorkloadError, match=r'must not see.*set workload\.options\.pack to "no"'):
        check_behaviour(bloom)
    with pytest.raises(WorkloadError, match="no TokenClassification class for gemma3_text"):
        loaded(tmp_path / "gemma", "gemma3", "token_classification")
    with pytest.raises(WorkloadError, match="houlsby adapters need a class of this project"):
        loaded(tmp_path / "adapted", "bloom", "causal_lm", Adapter("houlsby", 4, 32.0, ()))
    with pytest.raises(WorkloadError, match=r"matches no linear layer; the nearest are network\."):
        loaded(tmp_path / "nothing", "bloom", "causal_lm", Adapter("lora", 4, 32.0, ("*.qproj",)))
    (tmp_path / "pad").mkdir()
    transformers.MinistralConfig(**{**SIZES, "head_dim": 8, "pad_token_id": 7}).save_pretrained(
        tmp_path / "pad"
    )
    with pytest.raises(WorkloadError, match=r"pad_token_id 7.*set workload\.changes\.pad_token_id to 1"):
        load(f"hf:{tmp_path / 'pad'}", "regression", KNOWN, sequence_length=24)
    with pytest.raises(WorkloadError, match=r"t5-tiny .* has no head for regression here"):
        load("t5-tiny", "regression", KNOWN, sequence_length=24)
