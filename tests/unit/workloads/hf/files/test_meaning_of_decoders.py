"""Decoders of transformers: the first loss on conversations, and the text that an export says, are those of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from workloads.inference import with_weights
from workloads.load import load
from workloads.objectives.samples import Samples
from workloads.record_format import MARK
from workloads.workload import Sampling, Vocabulary

SIZE, LENGTH, ROOM = 97, 24, 8
KNOWN = Vocabulary(SIZE, eos=2, pad=1, bos=0)
TOKENS = {
    "vocab_size": SIZE,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
WIDTHS = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
          "max_position_embeddings": 64}  # fmt: skip
GROUPED = {**WIDTHS, "num_key_value_heads": 2, "head_dim": 8}
FEW = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": GROUPED,
    "qwen2": {**WIDTHS, "num_key_value_heads": 2},
    "qwen3": GROUPED,
    "mistral": GROUPED,
    "phi3": {**WIDTHS, "num_key_value_heads": 2},
    "olmo2": {**WIDTHS, "num_key_value_heads": 2},
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen3_moe": FEW,
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    # These are run as they are.
    "gpt_neox": WIDTHS,
    "stablelm": {**WIDTHS, "num_key_value_heads": 2},
}  # fmt: skip
QUICK = ("gpt2", "qwen3", "gpt_neox")


def a_conversation(number: int) -> np.ndarray:
    """A question of 3 to 6 tokens and an answer of 4 to 9, which is predicted."""
    draw = np.random.default_rng(number)
    asked, said = draw.integers(8, SIZE, 3 + number % 4), draw.integers(8, SIZE, 4 + number % 6)
    return np.concatenate([asked, said | MARK]).astype(np.uint32)


@pytest.mark.proves("loss", objective="conversation", family="kind")
@pytest.mark.proves("export", objective="conversation", family="kind")
@pytest.mark.proves("generate", objective="conversation", family="kind")
@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in DECODERS]
)
def test_conversations_are_learnt_and_said_as_in_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**DECODERS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").eval()
    options = {"pack": "no"}
    workload = load(f"hf:{tmp_path / 'in'}", "conversation", KNOWN, sequence_length=LENGTH, options=options)
    model = with_weights(workload, lambda name: workload.initial(name, 0))
    batch = workload.objective.collate(Samples(a_conversation, 100), range(4), 0)
    with torch.no_grad():
        ours = workload.loss(model, batch)
        logits = theirs(batch["tokens"], attention_mask=batch["padding"].long()).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    torch.testing.assert_close(ours.total / ours.count, wanted, rtol=1e-5, atol=1e-5)

    workload.to_hf(model.state_dict().__getitem__, str(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompts = [[0, 11, 12, 13], [0, 21, 22]]
    said = workload.generate(model, prompts, ROOM, Sampling())
    for prompt, row in zip(prompts, said, strict=True):
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        asked = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": ROOM}
        assert row == again.generate(tokens, **asked)[0, len(prompt) :].tolist()
