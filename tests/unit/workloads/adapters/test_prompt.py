"""Prompts at the input against peft: the same weights and batches, twenty steps of AdamW; and their masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.hf.export.adapter_folder import check_adapter, write_adapter
from workloads.inference import with_weights
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Sampling, Vocabulary

KNOWN = Vocabulary(size=160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)
COUNT, STEPS = 5, 20
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}


def workload_of(folder: Path, kind: str, objective: str = "causal_lm", **options: Any) -> TransformerWorkload:
    labels = ("bad", "good") if objective == "sequence_classification" else ()
    found = load(
        f"hf:{folder}", objective, KNOWN, sequence_length=16, labels=labels, options=options,
        adapter=Adapter(kind, COUNT, 32.0, ()),
    )  # fmt: skip
    assert isinstance(found, TransformerWorkload)
    return found


def base(folder: Path, kind: str) -> str:
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            **SIZES,
            num_key_value_heads=2,
            intermediate_size=64,
            initializer_range=0.1,
            max_position_embeddings=64,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=160, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def adapted(folder: Path, kind: str) -> Any:
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": COUNT}
    config = peft.PromptTuningConfig(**given) if kind == "prompt" else peft.PromptEncoderConfig(**given)
    return peft.get_peft_model(hf, config).train()


@pytest.mark.parametrize(
    ("kind", "model"),
    [("p_tuning", "gpt2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in
     (("prompt", "llama"), ("prompt", "gpt2"), ("p_tuning", "llama")))],
)  # fmt: skip
def test_twenty_steps_are_those_of_peft(kind: str, model: str, tmp_path: Path) -> None:
    base(tmp_path / "base", model)
    workload = workload_of(tmp_path / "base", kind)
    ours = with_weights(workload, lambda name: workload.initial(name, 3)).train()
    theirs = adapted(tmp_path / "base", kind)
    mine = {name: p for name, p in ours.named_parameters() if name not in workload.frozen}
    names = {
        "embedding": "prompt",
        "mlp_head.0": "prompt.first",
        "mlp_head.2": "prompt.second",
        "mlp_head.4": "prompt.last",
    }
    pairs = []
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            module, _, leaf = name.partition("prompt_encoder.default.")[2].rpartition(".")
            pairs.append((mine[f"{names[module]}.{leaf}"], parameter))
    assert len(pairs) == len(mine)
    with torch.no_grad():
        for one, other in pairs:
            other.copy_(one)
    sides = [torch.optim.AdamW(side, lr=1e-2, eps=1e-4) for side in map(list, zip(*pairs, strict=True))]
    for step in range(STEPS):
        tokens = torch.randint(6, 150, (4, 17), generator=torch.Generator().manual_seed(step))
        inside, labels = tokens[:, :-1], tokens[:, 1:]
        found = workload.loss(ours, {"tokens": inside, "labels": labels})
        logits = theirs(input_ids=inside, attention_mask=torch.ones_like(inside)).logits[:, COUNT:]
        losses = [
            found.total / found.count,
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        ]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for optimizer, loss in zip(sides, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    (tmp_path / "adapter").mkdir()
    state = {name: p.detach() for name, p in ours.named_parameters()}
    check_adapter(workload)
    write_adapter(workload, state.__getitem__, str(tmp_path / "adapter"), str(tmp_path / "base"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    padding = torch.arange(16) < torch.tensor([[16], [11]])
    tokens = torch.randint(6, 150, (2, 16))
    with torch.no_grad():
        ours_ = ours.eval()({"tokens": tokens, "padding": padding}).logits
        theirs_ = loaded(input_ids=tokens, attention_mask=padding.long()).logits[:, COUNT:]
    torch.testing.assert_close(ours_[padding], theirs_[padding], rtol=0, atol=1e-5)
    prompts = [[7, 8, 9], [11, 12, 13, 14, 15]]
    made = workload.generate(ours, prompts, 8, Sampling())
    for prompt, continued in zip(prompts, made, strict=True):
        ids = list(prompt)
        for token in continued:
            with torch.no_grad():
                assert int(ours({"tokens": torch.tensor([ids])}).logits[0, -1].argmax()) == token
            ids.append(token)


def test_documents_that_do_not_see_each_other_all_see_the_prompt(tmp_path: Path) -> None:
    base(tmp_path, "llama")
    workload = workload_of(tmp_path, "prompt")
    model = with_weights(workload, lambda name: workload.initial(name, 3)).eval()
    tokens = torch.randint(6, 150, (1, 16))
    part = (torch.arange(16) >= 9).long()
    positions = torch.cat((torch.arange(9), torch.arange(7)))
    attention = (part[:, None] == part[None, :]).tril()
    packed = {"tokens": tokens, "positions": positions[None], "attention": attention[None]}
    with torch.no_grad():
        together = model(packed).logits
        apart = [model({"tokens": each}).logits for each in (tokens[:, :9], tokens[:, 9:])]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=0, atol=1e-5)


def test_models_that_can_have_none_are_refused(tmp_path: Path) -> None:
    known = Vocabulary(**{**KNOWN.__dict__, "sentinels": tuple(range(60, 160))})
    plain = load("t5-tiny", "span_corruption", known, sequence_length=16)
    assert isinstance(plain, TransformerWorkload)
    with pytest.raises(WorkloadError, match="can have no prompt: it has two stacks"):
        plain.with_adapter(Adapter("prompt", COUNT, 32.0, ()))
    base(tmp_path, "llama")
    with pytest.raises(WorkloadError, match=r"checkpoint\.export to null"):
        check_adapter(workload_of(tmp_path, "prompt", "sequence_classification"))
    with pytest.raises(WorkloadError, match="cannot be merged"):
        workload_of(tmp_path, "prompt").check_hf()
