#!/usr/bin/env bash
# FSMT trains its decoder on the source text when only labels are given.
#
# Guess: as in BART, Marian and T5, labels alone are shifted right to become the decoder's input.
# Behaviour: FSMT shifts input_ids instead. Where source and labels have equal lengths it trains without a
#   word on the wrong decoder input; otherwise it raises an error about sizes. Its shift also writes the pad
#   token over -100 in the tensor it is given.
# Packages: transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: fine-tuning a WMT19 model with a standard collator of equal lengths learns a task that
#   generation never poses.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import torch
import transformers
from transformers import FSMTConfig, FSMTForConditionalGeneration
from transformers.models.fsmt.modeling_fsmt import shift_tokens_right

print("version: transformers", transformers.__version__)
print("guess: the loss with labels alone equals that with the labels shifted right")
torch.manual_seed(0)
config = FSMTConfig(
    langs=["en", "de"], src_vocab_size=40, tgt_vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1,
    encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
    bos_token_id=0, pad_token_id=1, eos_token_id=2, init_std=0.5,
)
model = FSMTForConditionalGeneration(config).eval()
source = torch.tensor([[5, 6, 7, 8, 9, 2]])
labels = torch.tensor([[15, 16, 17, 2, -100, -100]])
target_shifted = torch.tensor([[2, 15, 16, 17, 2, 1]])
source_shifted = shift_tokens_right(source.clone(), config.pad_token_id)
with torch.no_grad():
    alone = model(input_ids=source, labels=labels).loss.item()
    by_target = model(input_ids=source, decoder_input_ids=target_shifted, labels=labels).loss.item()
    by_source = model(input_ids=source, decoder_input_ids=source_shifted, labels=labels).loss.item()
given = labels.clone()
shift_tokens_right(given, config.pad_token_id)
print(f"the shift leaves the labels it was given as {given.tolist()}")
print(f"seen: labels alone {alone:.4f}, target shifted {by_target:.4f}, source shifted {by_source:.4f}")
assert abs(alone - by_source) < 1e-6
assert abs(alone - by_target) > 1e-3
assert given.tolist() == [[15, 16, 17, 2, 1, 1]]
PY
