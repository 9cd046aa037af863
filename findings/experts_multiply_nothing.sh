#!/usr/bin/env bash
# torch's FLOP counter counts no product of the experts in transformers' mixtures of experts.
#
# Guess: FlopCounterMode counts every matrix product of a forward pass, so a Mixtral counts the same whichever kernel its
#   experts use.
# Behaviour: transformers multiplies experts by torch's grouped product, for which the counter has no formula, so they
#   count as nothing, without a warning. This Mixtral counts a third of what it multiplies. With the experts one after
#   the other the count is right.
# Packages: torch 2.13.0, transformers 5.23.0
# Why it matters: an MFU that is computed from the counter is several times too low for models whose FLOPs are almost
#   all those of experts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

print("version: torch", torch.__version__, "transformers", transformers.__version__)
print("guess: both ways to multiply experts count the same")
ROWS, LENGTH, HIDDEN, INNER, LAYERS, CHOSEN = 2, 128, 256, 512, 2, 2
found = {}
for experts in (None, "eager"):
    config = transformers.MixtralConfig(
        vocab_size=1000, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=CHOSEN,
    )
    config._attn_implementation = "eager"
    if experts:
        config._experts_implementation = experts
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    tokens = torch.randint(0, 1000, (ROWS, LENGTH))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens).logits
    found[experts] = counter.get_total_flops(), logits, model.config._experts_implementation
    print(f"experts by {found[experts][2]}: {found[experts][0]:,} FLOPs")
(few, one, default), (every, other, _) = found[None], found["eager"]
of_experts = 2 * ROWS * LENGTH * LAYERS * CHOSEN * 3 * HIDDEN * INNER
print(f"seen: the default, {default}, counts {few / every:.0%} of the products; {of_experts:,} are missing")
assert torch.allclose(one, other, atol=1e-4)
assert default == "grouped_mm"
assert every - few == of_experts
PY
