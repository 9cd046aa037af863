#!/usr/bin/env bash
# A weighted sum of DoRA adapters has none of their magnitudes.
#
# Guess: add_weighted_adapter combines the directions and the magnitudes, or refuses DoRA. With the weights 1 and 0 the sum is the first
#   adapter, as it is for LoRA.
# Behaviour: only the factors A and B are combined. The new adapter is a DoRA adapter whose magnitudes are the norms of the base's weights,
#   as in one that was never trained. With the weights 1 and 0 it is not the first adapter. Nothing is said.
# Packages: peft 0.21.2, transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: a merge of trained adapters by any method (cat, linear, svd, ties) throws away half of what DoRA trained, and seems to
#   show that DoRA does not merge well.
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
print("guess: 1.0 x first + 0.0 x second is the first adapter: distance 0.0, with DoRA as with LoRA")
size = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(**size))
before = base.model.layers[0].self_attn.q_proj.weight.detach()


def distance(dora, method):
    """How far the sum's update is from that of the first adapter, relative to it; and its magnitudes."""
    settings = peft.LoraConfig(target_modules=["q_proj"], r=4, use_dora=dora)
    model = peft.get_peft_model(copy.deepcopy(base), settings, adapter_name="first")
    model.add_adapter("second", settings)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        if "magnitude" in name:
            parameter.data *= 0.7 + torch.rand_like(parameter)
    density = {"density": 1.0} if method == "ties" else {}
    model.add_weighted_adapter(["first", "second"], [1.0, 0.0], "sum", combination_type=method, **density)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    kept = [layer.lora_magnitude_vector[name].weight.detach() for name in ("first", "sum")] if dora else []

    def update(adapter):
        model.set_adapter(adapter)
        merged = copy.deepcopy(model).merge_and_unload()
        return merged.model.layers[0].self_attn.q_proj.weight.detach() - before

    first = update("first")
    return ((update("sum") - first).norm() / first.norm()).item(), kept


for method in ("cat", "svd", "linear"):
    lora, _ = distance(False, method)
    dora, (trained, summed) = distance(True, method)
    print(f"seen: {method}: LoRA {lora:.4f}, DoRA {dora:.4f}")
    assert lora < 1e-4 and dora > 0.1
    assert torch.allclose(summed, before.norm(dim=1), rtol=1e-5) and not torch.allclose(summed, trained, rtol=0.05)
print("seen: the magnitudes of the sum are the norms of the base's weights")
PY
