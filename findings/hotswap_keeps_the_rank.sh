#!/usr/bin/env bash
# peft's hot-swap scales an adapter with rank_pattern wrongly, and saves a swapped adapter under the settings of the one before.
#
# Guess: hotswap_adapter gives the model that loading the new adapter gives. Settings that it cannot swap are refused, as
#   alpha_pattern and use_rslora are. What is saved afterwards is the new adapter.
# Behaviour: rank_pattern is not compared. The scale of each layer is made of lora_alpha and r alone, so a layer whose rank is half
#   of r has half of its update. The old configuration stays: an adapter that differs in lora_alpha computes rightly, and
#   save_pretrained then writes the new weights with the old lora_alpha. Nothing is said.
# Packages: peft 0.21.2, transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: AdaLoRA-like searches and EVA give adapters with a rank for each layer, and hot-swapping is how a server changes
#   adapters without compiling anew. It answers with an adapter that nobody evaluated.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=

venv/bin/python -W ignore - 2>/dev/null <<'PY'
import copy

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

print("version: peft", peft.__version__)
print("guess: the swapped model has the logits of the loaded one, and what it saves loads as the same")
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)).eval()
tokens = torch.arange(12)[None]


def stored(folder, seed, **settings):
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=8, init_lora_weights=False, **settings)
    get_peft_model(copy.deepcopy(base), config).save_pretrained(folder)


def loaded(folder):
    return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def logits(model):
    with torch.no_grad():
        return model(tokens).logits


def differences(**settings):
    """How far the swapped model, and what it saves, are from the loaded one, by how far the two adapters are apart."""
    stored("old", 1, lora_alpha=16)
    stored("new", 2, **{"lora_alpha": 16, **settings})
    wanted, model = logits(loaded("new")), loaded("old")
    apart = (logits(model) - wanted).norm()
    hotswap_adapter(model, "new", "default")
    model.save_pretrained("saved")
    return [round(((other - wanted).norm() / apart).item(), 3) for other in (logits(model), logits(loaded("saved")))]


seen = {
    "same settings": differences(),
    "lora_alpha 4": differences(lora_alpha=4),
    "rank_pattern": differences(rank_pattern={"q_proj": 4, "v_proj": 4}),
}
print("difference of the swapped model, and of what it saves:", seen)
print(f"seen: with rank_pattern the swapped model is off by {seen['rank_pattern'][0]} of the distance between the two adapters;",
      f"with another lora_alpha what it saves is off by {seen['lora_alpha 4'][1]}")
assert seen["same settings"] == [0, 0]
assert seen["lora_alpha 4"][0] < 0.001 < 0.3 < seen["lora_alpha 4"][1]
assert seen["rank_pattern"][0] > 0.1
try:
    differences(alpha_pattern={"q_proj": 4})
    refused = False
except ValueError:
    refused = True
assert refused
PY
