#!/usr/bin/env bash
# compressed-tensors' dynamic "token" strategy has one scale for a whole matrix of tokens.
#
# Guess: with strategy token each row of activations has a scale of its own, as vLLM's kernels give it, whether the
#   input of the layer is [batch, length, hidden] or [tokens, hidden]; a row's output depends on no other row.
# Behaviour: the first two dimensions are kept and all others reduced. Of [batch, length, hidden] that is a token; of
#   [tokens, hidden] it is no dimension at all, and the scale is that of the whole tensor. OPT of transformers flattens
#   its feed-forward block to two dimensions, so the logits of one text depend on the texts beside it.
# Packages: compressed-tensors 0.20.0, transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: an int8 model is evaluated with other numbers than it is served with, and with other ones for each
#   batch; one outlier in a batch rounds all other rows away.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    compressed-tensors==0.20.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import copy
import importlib.metadata
import logging

import torch
from compressed_tensors.quantization import (
    QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus, apply_quantization_config,
)
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

logging.disable(logging.WARNING)
print("version: compressed-tensors", importlib.metadata.version("compressed-tensors"))
print("guess: a scale for each of 4 tokens, in two dimensions as in three")
tokens = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
x = torch.randn(4, 32)
shapes = {
    str(list(view)): list(compute_dynamic_scales_and_zp(x.view(view), tokens, torch.nn.Linear(32, 32))[0].shape)
    for view in ((1, 4, 32), (4, 32))
}
print(f"seen: scales {shapes}")


def moved_by_a_neighbour(model):
    """The largest difference that a second text in the batch makes to the logits of the first."""
    weights = QuantizationArgs(num_bits=8, symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=tokens)
    config = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, copy.deepcopy(config))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 127
    first, second = torch.arange(16)[None] % 50, torch.arange(16, 32)[None] % 50
    with torch.no_grad():
        return (model(first).logits - model(torch.cat((first, second))).logits[:1]).abs().max().item()


sizes = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, initializer_range=0.3)).eval()
opt = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3)).eval()
alone, beside = moved_by_a_neighbour(llama), moved_by_a_neighbour(opt)
print(f"seen: a second text moves the logits of the first by {alone:.1e} in Llama and {beside:.1e} in OPT")
assert shapes == {"[1, 4, 32]": [1, 4, 1], "[4, 32]": [1]}
assert alone < 1e-4 < 1e-3 < beside
PY
