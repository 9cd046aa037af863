"""A small Llama with random weights, a byte-level tokenizer and a chat template, as others would publish it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from orchestrator.data.encoding.training import train_bytes

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_chat_folder(folder: Path, seed: int = 0, hidden: int = 32) -> str:
    """Write it, and return where."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(train_bytes(["a text of some words, äöü and more"] * 9, 290, ["<pad>"]))
    eos = next(iter(made.get_added_tokens_decoder().values())).content
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, pad_token="<pad>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=made.get_vocab_size(), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
        eos_token_id=made.token_to_id(eos), bos_token_id=None, pad_token_id=made.token_to_id("<pad>"),
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
