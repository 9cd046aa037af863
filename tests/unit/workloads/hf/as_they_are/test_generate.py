"""Generation by classes of transformers that run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.inference import with_weights
from workloads.load import load
from workloads.workload import Sampling, Vocabulary

VOCABULARY = Vocabulary(97, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentence_end=np.zeros(97, bool))
WIDE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
NEOX = transformers.GPTNeoXConfig(**WIDE, max_position_embeddings=24, eos_token_id=2)
PEGASUS = transformers.PegasusConfig(
    vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=24, eos_token_id=2, pad_token_id=1,
    decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
PROMPTS = [[7, 8, 9, 10], [11], [12, 13]]


def made(folder: Path, theirs: Any, objective: str) -> tuple[HuggingFaceWorkload, nn.Module]:
    theirs.save_pretrained(folder)
    workload = load(f"hf:{folder}", objective, VOCABULARY, sequence_length=16, implementation="transformers")
    assert isinstance(workload, HuggingFaceWorkload)
    return workload, with_weights(workload, lambda name: workload.initial(name, 0) * 5)


@pytest.mark.parametrize(("theirs", "objective"), [(NEOX, "causal_lm"), (PEGASUS, "denoising")])
def test_greedy_search_is_their_own(tmp_path: Path, theirs: Any, objective: str) -> None:
    workload, model = made(tmp_path, theirs, objective)
    found = workload.generate(model.train(), PROMPTS, 9, Sampling())
    assert model.network.training
    model.eval()
    pair = workload.config.architecture == "encoder-decoder"
    start = {"decoder_start_token_id": workload.objective.decoder_start} if pair else {}  # type: ignore[attr-defined]
    for prompt, row in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([prompt])
        told = model.network.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=9,
            pad_token_id=2,
            **start,
        )[0].tolist()
        assert row == told[1 if pair else len(prompt) :]


def test_what_is_drawn_depends_on_seed_prompt_and_place_alone(tmp_path: Path) -> None:
    workload, model = made(tmp_path, NEOX, "causal_lm")
    warm = Sampling(temperature=2.0, seed=3)
    found = workload.generate(model, PROMPTS, 6, warm)
    torch.rand(5)
    assert workload.generate(model, PROMPTS[:2], 6, warm) == found[:2]
    assert workload.generate(model, PROMPTS, 6, Sampling(temperature=2.0, seed=4)) != found
    twice = workload.generate(model, [PROMPTS[0]] * 2, 6, warm)
    assert twice[0] == found[0] != twice[1]


def test_what_generates_nothing_says_so(tmp_path: Path) -> None:
    workload, model = made(tmp_path, NEOX, "causal_lm")
    assert [len(row) for row in workload.generate(model, [list(range(6, 26))], 90, Sampling())] == [4]
    with pytest.raises(WorkloadError, match="prompt 1 has 24 tokens, but the model 24 positions"):
        workload.generate(model, [[5], list(range(6, 30))], 4, Sampling())
    camembert = transformers.CamembertConfig(**WIDE, max_position_embeddings=66)
    workload, model = made(tmp_path / "other", camembert, "masked_lm")
    with pytest.raises(WorkloadError, match="generates no text"):
        workload.generate(model, PROMPTS, 4, Sampling())
