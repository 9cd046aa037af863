"""Small models of the classes that GGUF files hold, with tokenizers that cut text as llama.cpp can."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from orchestrator.extensions.gguf.write import _CUTS

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def byte_level(cut: str = "gpt-2", frame: str = "") -> transformers.PreTrainedTokenizerFast:
    """A small tokenizer that cuts text in a way that llama.cpp has a name for."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut == "gpt-2")
    tokenizer.pre_tokenizer, tokenizer.decoder = whole, decoders.ByteLevel()
    if cut != "gpt-2":
        expression = next(e for e, name in _CUTS.items() if name == cut)
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|begin|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:12]], trainer)
    if frame:
        tokens = [(name, tokenizer.token_to_id(name)) for name in special]
        tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=tokens)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|begin|>"
    )


def write(folder: Path, kind: str = "llama", cut: str = "gpt-2", frame: str = "", **changes: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    )
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    byte_level(cut, frame).save_pretrained(folder)
    return folder
