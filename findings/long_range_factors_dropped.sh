#!/usr/bin/env bash
# transformers reads a GGUF file of Llama 3.1 without its scaling for long contexts.
#
# Guess: from_pretrained(gguf_file=...) gives the model that the file holds: its weights without quantisation, and its positions.
# Behaviour: a GGUF file holds the scaling of Llama 3.1 and later as a tensor, rope_freqs.weight, by which llama.cpp
#   divides each frequency. transformers passes over that tensor: its configuration says rope_type default, beside
#   max_position_embeddings of 131072. Logits are those of a model without scaling; loading says nothing of it.
# Packages: transformers 5.23.0, gguf 0.19.0, torch 2.13.0, numpy 2.4.6, accelerate 1.15.0
# Why it matters: a GGUF that is fine-tuned or converted back becomes another model. Slow frequencies turn eight times too fast,
#   so the difference grows with the distance between tokens, and short prompts do not show it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 gguf==0.19.0 torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

print("version: transformers", transformers.__version__, "gguf", gguf.GGUFWriter.__module__.split(".")[0], "0.19.0")
print("guess: the frequencies of the loaded model are those of the file")
WIDTH, HEADS, WORDS, BASE = 64, 2, 64, 500000.0
scaled = LlamaForCausalLM(LlamaConfig(
    vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
    max_position_embeddings=131072, rope_parameters={
        "rope_type": "llama3", "rope_theta": BASE, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
))
frequencies = scaled.model.rotary_emb.inv_freq
plain = BASE ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
factors = (plain / frequencies).numpy()


def stored(add_factors):
    """Write a model of one layer, with the factors of its frequencies or without them, and load it."""
    name = f"{add_factors}.gguf"
    writer = gguf.GGUFWriter(name, "llama")
    writer.add_block_count(1)
    writer.add_context_length(131072)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(BASE)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"word{number}" for number in range(WORDS)])
    source = np.random.default_rng(0)
    for part in ("token_embd", "output"):
        writer.add_tensor(f"{part}.weight", source.standard_normal((WORDS, WIDTH), np.float32))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", source.standard_normal((WIDTH, WIDTH), np.float32) / 8)
    for part in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{part}.weight", np.ones(WIDTH, np.float32))
    if add_factors:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoModelForCausalLM.from_pretrained(".", gguf_file=name)


with_factors, without = stored(True), stored(False)
loaded = with_factors.model.rotary_emb.inv_freq
slow = [(numbers[-1] / plain[-1]).item() for numbers in (frequencies, loaded)]
ids = torch.arange(WORDS).repeat(4)[None]
equal = torch.equal(with_factors(ids).logits, without(ids).logits)
scaled.load_state_dict(with_factors.state_dict())
difference = (scaled(ids).logits - with_factors(ids).logits).abs().max().item()
print("configuration:", with_factors.config.rope_parameters, "and as if the tensor were not there:", equal)
print(f"seen: the slowest frequency is {slow[0]} of the plain one in the file and {slow[1]} as loaded;",
      f"logits after 256 tokens differ by {difference:.2f}")
assert with_factors.config.rope_parameters == {"rope_type": "default", "rope_theta": BASE}
assert equal and torch.allclose(loaded, plain) and not torch.allclose(frequencies, plain)
assert abs(slow[0] - 1 / 8) < 1e-6 and abs(slow[1] - 1) < 1e-6
assert difference > 0.01
PY
