"""Dropout of classes of transformers that run as they are: ours in the place of theirs, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.dropout import CountedDropout
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.behaviour import check_behaviour, trained_model
from workloads.load import load
from workloads.model.dropout import KEYS, row_keys
from workloads.workload import Vocabulary

VOCABULARY = Vocabulary(97, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 64}
NEOX = transformers.GPTNeoXConfig(**WIDE)
ACCEPTED: dict[str, tuple[Any, str]] = {
    "gpt_neox": (NEOX, "causal_lm"),
    "gptj": (
        transformers.GPTJConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=64),
        "causal_lm",
    ),
    "phi": (transformers.PhiConfig(**WIDE), "causal_lm"),
    "camembert": (transformers.CamembertConfig(**WIDE, max_position_embeddings=66), "masked_lm"),
}
REFUSED: dict[str, Any] = {
    "ministral": transformers.MinistralConfig(**WIDE, num_key_value_heads=2, head_dim=8),
    "opt": transformers.OPTConfig(
        **SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, pad_token_id=1
    ),
}


def loaded(
    folder: Path, theirs: Any, objective: str = "causal_lm", dropout: float = 0.1
) -> HuggingFaceWorkload:
    theirs.save_pretrained(folder)
    found = load(f"hf:{folder}", objective, VOCABULARY, dropout=dropout, sequence_length=24)
    assert isinstance(found, HuggingFaceWorkload)
    return found


@pytest.mark.parametrize("name", ACCEPTED)
def test_its_dropout_modules_draw_from_the_sample(name: str, tmp_path: Path) -> None:
    check_behaviour(loaded(tmp_path, *ACCEPTED[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_without_such_modules_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError, match=r"no dropout module that can be replaced; set workload.dropout to 0"
    ):
        check_behaviour(loaded(tmp_path, REFUSED[name]))


def test_a_row_is_trained_alike_in_any_batch_and_every_module_draws_for_itself(tmp_path: Path) -> None:
    workload = loaded(tmp_path, NEOX)
    model, tokens = (
        trained_model(workload, 0),
        torch.randint(6, 97, (4, 24), generator=torch.Generator().manual_seed(0)),
    )
    whole = model({"tokens": tokens, KEYS: row_keys(5, 0, 4)}).logits
    parts = [model({"tokens": tokens[i : i + 1], KEYS: row_keys(5, i, 1)}).logits for i in range(4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    modules = [module for module in model.modules() if isinstance(module, CountedDropout)]
    assert len({module.site for module in modules}) == len(modules) > 2
    ones = torch.ones(1, 24, 32)
    masks = {module(ones).detach().numpy().tobytes() for module in modules}
    assert len(masks) == len(modules)
    scores = torch.ones(1, 4, 24, 24)
    assert modules[0](scores) is scores
    with pytest.raises(KeyError, match=KEYS):
        model({"tokens": tokens})
    assert torch.equal(model.eval()({"tokens": tokens}).logits, model({"tokens": tokens}).logits)
