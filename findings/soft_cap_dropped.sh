#!/usr/bin/env bash
# transformers 4.57 computes Gemma 2 without its attention soft cap by default, and gpt-oss with a fixed clamp.
#
# Guess: the default attention gives the logits of the configured model; another implementation differs by
#   rounding only.
# Behaviour: the default (sdpa) ignores attn_logit_softcapping without a warning: its logits are those of a
#   model without a cap. swiglu_limit of gpt-oss changes nothing either: 7 is in the code.
# Packages: transformers 4.57.6, torch 2.13.0, numpy 2.4.6
# Why it matters: log-probabilities for evaluation, distillation or preferences come from another model than
#   the one that was trained; version 5 refuses sdpa for Gemma 2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==4.57.6 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import logging

import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__)
print("guess: default and eager attention agree, and both obey the cap")
ids = torch.arange(20)[None]
sizes = dict(
    vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, initializer_range=1.0, max_position_embeddings=64,
)


def logits(model_class, config):
    torch.manual_seed(0)
    with torch.no_grad():
        return model_class(config).eval()(ids).logits


def gemma(cap, implementation=None):
    config = Gemma2Config(**sizes, attn_logit_softcapping=cap)
    if implementation:
        config._attn_implementation = implementation
    return logits(Gemma2ForCausalLM, config)


default, eager, without = gemma(1.0), gemma(1.0, "eager"), gemma(None, "eager")
layers = dict(layer_types=["full_attention"], num_local_experts=2, num_experts_per_tok=1)
wide, narrow = (logits(GptOssForCausalLM, GptOssConfig(**sizes, **layers, swiglu_limit=limit)) for limit in (7.0, 0.5))
gap = (default - eager).abs().max().item()
print(f"gpt-oss with limit 7 and 0.5: equal {torch.equal(wide, narrow)}")
print(f"seen: default against eager {gap:.2f} apart; default against no cap {(default - without).abs().max().item():.1e}")
assert gap > 0.1
assert torch.allclose(default, without, atol=1e-3)
assert torch.equal(wide, narrow)
PY
