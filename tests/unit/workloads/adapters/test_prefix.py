"""Prefixes of keys and values against peft: the same weights and batches, twenty steps of AdamW."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.hf.export.adapter_folder import write_adapter
from workloads.inference import with_weights
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Sampling, Vocabulary

KNOWN = Vocabulary(size=160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)
COUNT, STEPS = 5, 20


def workload_of(folder: Path, objective: str = "causal_lm") -> TransformerWorkload:
    labels = ("bad", "good") if objective == "sequence_classification" else ()
    found = load(
        f"hf:{folder}", objective, KNOWN, sequence_length=16, labels=labels,
        adapter=Adapter("prefix", COUNT, 32.0, ()),
    )  # fmt: skip
    assert isinstance(found, TransformerWorkload)
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_twenty_steps_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
    if kind == "llama":
        config = transformers.LlamaConfig(
            **sizes,
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
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    workload = workload_of(tmp_path / "base")
    model = with_weights(workload, lambda name: workload.initial(name, 3)).train()
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.get_peft_model(
        hf, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT)
    ).train()
    (parameter,) = [p for p in theirs.parameters() if p.requires_grad]
    mine = {name: p for name, p in model.named_parameters() if name not in workload.frozen}
    names = [f"layers.{n}.attention.prefix.{part}" for n in range(2) for part in ("key", "value")]
    assert list(mine) == names
    with torch.no_grad():
        parameter.copy_(torch.cat([mine[name].t() for name in names], dim=1))
    optimizers = [torch.optim.AdamW(each, lr=1e-2, eps=1e-4) for each in ([*mine.values()], [parameter])]
    for step in range(STEPS):
        tokens = torch.randint(6, 150, (4, 17), generator=torch.Generator().manual_seed(step))
        inside, labels = tokens[:, :-1], tokens[:, 1:]
        ours = workload.loss(model, {"tokens": inside, "labels": labels})
        logits = theirs(input_ids=inside, attention_mask=torch.ones_like(inside)).logits
        losses = [
            ours.total / ours.count,
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        ]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = torch.cat([mine[name].t() for name in names], dim=1)
    torch.testing.assert_close(found, parameter, rtol=0, atol=1e-5)
    (tmp_path / "adapter").mkdir()
    state = {name: p.detach() for name, p in model.named_parameters()}
    write_adapter(workload, state.__getitem__, str(tmp_path / "adapter"), str(tmp_path / "base"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    padding = torch.arange(16) < torch.tensor([[16], [11]])
    tokens = torch.randint(6, 150, (2, 16))
    with torch.no_grad():
        ours_ = model.eval()({"tokens": tokens, "padding": padding}).logits
        theirs_ = loaded(input_ids=tokens, attention_mask=padding.long()).logits
    torch.testing.assert_close(ours_[padding], theirs_[padding], rtol=0, atol=1e-5)
    made = workload.generate(model, [[7, 8, 9], [11, 12, 13, 14, 15]], 8, Sampling())
    for prompt, continued in zip([[7, 8, 9], [11, 12, 13, 14, 15]], made, strict=True):
        ids = list(prompt)
        for token in continued:
            with torch.no_grad():
                assert int(model({"tokens": torch.tensor([ids])}).logits[0, -1].argmax()) == token
            ids.append(token)


def test_models_that_can_have_none_are_refused() -> None:
    for model in ("t5-tiny", "deepseek-v3-tiny", "albert-tiny"):
        plain = load(model, "span_corruption" if "t5" in model else "masked_lm" if "al" in model else "causal_lm",
                     Vocabulary(size=160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160))),
                     sequence_length=16)  # fmt: skip
        assert isinstance(plain, TransformerWorkload)
        with pytest.raises(WorkloadError, match="can have no prefix"):
            plain.with_adapter(Adapter("prefix", COUNT, 32.0, ()))
