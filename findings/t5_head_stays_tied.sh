#!/usr/bin/env bash
# T5Config(tie_word_embeddings=False) gives a model whose head is tied.
#
# Guess: as for every other model, false gives the head a weight of its own.
# Behaviour: T5's configuration turns false into true: head and embedding are one tensor. A folder whose
#   config.json says false and that stores two different tensors loads with two, so what trains depends on
#   where the model came from.
# Packages: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: T5 1.1, which unties the head, cannot be trained from scratch by its own configuration: it
#   has fewer parameters than its paper and another scale of the logits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import json
import pathlib

import torch
import transformers
from transformers import T5Config, T5ForConditionalGeneration

transformers.utils.logging.disable_progress_bar()
print("version: transformers", transformers.__version__)
print("guess: tie_word_embeddings=False gives two tensors")
sizes = dict(vocab_size=50, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8, decoder_start_token_id=0)
config = T5Config(tie_word_embeddings=False, **sizes)
model = T5ForConditionalGeneration(config)
tied = model.lm_head.weight is model.shared.weight

other = T5ForConditionalGeneration(T5Config(**sizes))
other.lm_head.weight = torch.nn.Parameter(torch.randn(50, 16))
other.save_pretrained("folder")
path = pathlib.Path("folder/config.json")
path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
loaded = T5ForConditionalGeneration.from_pretrained("folder")
loaded_tied = loaded.lm_head.weight is loaded.shared.weight
print(f"loaded from a folder with two tensors: tied {loaded_tied}")
print(f"seen: from the configuration: flag {config.tie_word_embeddings}, one tensor {tied}")
assert tied
assert config.tie_word_embeddings is True
assert not loaded_tied
PY
