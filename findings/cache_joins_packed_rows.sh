#!/usr/bin/env bash
# Rows that are packed into one sequence attend to each other if the model keeps a cache.
#
# Guess: DataCollatorWithFlattening begins position_ids anew for each row. The models of transformers find the rows in them and keep
#   them apart, under sdpa too, so that the loss of a packed batch is that of its rows alone. A cache that nobody reads changes no loss.
# Behaviour: the rows are found only if there is no cache, and use_cache is true in a configuration unless somebody turned it off.
#   Then the mask is the plain causal one: every row sees the rows before it. Trainer turns the cache off, so the same model has another
#   loss in a plain loop, or in a Trainer after model.config.use_cache was set. Llama, Qwen 3, OLMo and GPT-2 do it alike.
# Packages: transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: a loop of one's own trains on rows that are mixed, without a word. Evaluations by Trainer and by a loop differ, and a
#   reference model or a teacher that is called with packed rows scores another text.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import logging

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__)
print("guess: largest difference of a logit between packed rows and rows alone: 0.0 with a cache and without")
size = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
kinds = {name: dict(size, intermediate_size=32, head_dim=16) for name in ("llama", "qwen3", "olmo")}
kinds["gpt2"] = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2)

torch.manual_seed(0)
rows = [torch.randint(3, 64, (length,)).tolist() for length in (7, 5, 9)]
packed = DataCollatorWithFlattening()([{"input_ids": row} for row in rows])
first = slice(0, 7)

for name, options in kinds.items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).eval()
    assert model.config.use_cache and model.config._attn_implementation == "sdpa"

    @torch.no_grad()
    def differences(**cache):
        """The largest difference of the first row's logits, and of those of the rows behind it."""
        alone = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
        found = (model(**packed, **cache).logits[0] - alone).abs()
        return found[first].max().item(), found[7:].max().item()

    plain, off = differences(), differences(use_cache=False)
    print(f"seen: {name}: with its cache {plain[1]:.3f} behind the first row, with use_cache=False {off[1]:.6f}")
    assert plain[0] < 1e-5 and plain[1] > 1e-2
    assert max(off) < 1e-5
PY
