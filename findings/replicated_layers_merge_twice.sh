#!/usr/bin/env bash
# Merging an adapter into replicated layers gives each copy the updates of all copies.
#
# Guess: layer_replication makes a deeper model whose copies of a layer share its weights, each with an adapter of its own. Merging
#   them gives each copy a weight of its own, or is refused.
# Behaviour: merge_and_unload adds the update of each copy to the one weight that they share. All copies then have the sum of all
#   updates: another model, with another loss. Nothing is said, and safe_merge finds nothing either.
# Packages: peft 0.21.2, transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: an adapter of a stretched model is trained for days and evaluated unmerged, and what is exported for serving is a
#   model that nobody has evaluated.
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
from transformers import LlamaConfig, LlamaForCausalLM

print("version: peft", peft.__version__)
print("guess: the merged model has the logits of the adapter on its base, with replicated layers as without")
size = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(**size, initializer_range=0.2)).eval()
tokens = torch.randint(3, 40, (2, 8))


@torch.no_grad()
def merged(replication):
    """The largest difference of a logit after the merge, relative to the largest logit; and the merged layers."""
    options = {"layer_replication": replication} if replication else {}
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **options)
    model = peft.get_peft_model(copy.deepcopy(base), settings).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    logits = model(tokens).logits
    whole = model.merge_and_unload(safe_merge=True)
    return ((whole(tokens).logits - logits).abs().max() / logits.abs().max()).item(), whole.model.layers


plain, _ = merged(None)
replicated, layers = merged([[0, 2], [0, 2]])
same = all(torch.equal(layers[n].self_attn.q_proj.weight, layers[n + 2].self_attn.q_proj.weight) for n in range(2))
print(f"seen: difference without replication {plain:.6f}, with it {replicated:.3f}; {len(layers)} layers, copies equal: {same}")
assert plain < 1e-4 and replicated > 0.05 and same and len(layers) == 4
PY
