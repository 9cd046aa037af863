#!/usr/bin/env bash
# Saving a model in shards over an earlier single file keeps the earlier weights in use.
#
# Guess: save_pretrained replaces the model that a folder held, whatever max_shard_size was before.
# Behaviour: the old model.safetensors stays beside the new shards and index, and from_pretrained reads the
#   old file. Saving a single file over shards removes the shards but leaves their index.
# Packages: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: a folder that is saved to again after the model or the shard size grew silently serves the
#   weights of before.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import os
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()
print("version: transformers", transformers.__version__)
print("guess: the second save wins: all loaded weights are 2")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
)


def save(folder, value, **options):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    model.save_pretrained(folder, **options)


def weight_files(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("model"))


grown = tempfile.mkdtemp()
save(grown, 1)
save(grown, 2, max_shard_size="10KB")
loaded = LlamaForCausalLM.from_pretrained(grown).lm_head.weight.unique().tolist()
print("files:", weight_files(grown))

shrunk = tempfile.mkdtemp()
save(shrunk, 1, max_shard_size="10KB")
save(shrunk, 2)
print("other way round:", weight_files(shrunk))
print(f"seen: after a save of 1 in one file and of 2 in shards, from_pretrained gives {loaded}")
assert loaded == [1.0]
assert weight_files(shrunk) == ["model.safetensors", "model.safetensors.index.json"]
PY
