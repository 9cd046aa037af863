"""A small Llama and a tokenizer of words, for TRL's trainers and this project's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from workloads.workload import Vocabulary

SIZE, LENGTH = 97, 32
KNOWN = Vocabulary(SIZE, eos=2, pad=1, bos=0)
LLAMA = {"vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
         "pad_token_id": 1, "eos_token_id": 2}  # fmt: skip


def model_of(folder: Path, kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, **sizes)
    model = getattr(transformers, kind)(config)
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that answers differ in more than rounding
    model.save_pretrained(folder)
    return model


def a_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models

    words = {f"w{n}": n for n in range(SIZE)}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")), pad_token="w1", eos_token="w2"
    )
    made.save_pretrained(folder)
    return made
