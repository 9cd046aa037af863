#!/usr/bin/env bash
# lm-eval's rolling likelihood asks the model to predict the beginning token that it has added itself.
#
# Guess: perplexity of a text is over the tokens of the text, given the beginning token that the tokenizer puts first.
# Behaviour: the tokenizer puts the beginning token first, and lm-eval puts it before that once more, as the prefix. The
#   first prediction is then of a beginning token after a beginning token, which no training text holds, and its
#   log-likelihood is added to that of the text.
# Packages: lm-eval 0.4.13, transformers 5.23.0, torch 2.13.0, accelerate 1.15.0, numpy 2.4.6
# Why it matters: bits per byte of short documents are dominated by one token, models with and without a beginning token
#   cannot be compared, and the better a model is trained, the more it is punished.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    'lm-eval[hf]==0.4.13' transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - 2>/dev/null <<'PY'
import importlib.metadata

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("version: lm-eval", importlib.metadata.version("lm-eval"))
words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<s>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>")

torch.manual_seed(0)
sizes = dict(vocab_size=5, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, bos_token_id=0, eos_token_id=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
row = torch.tensor([[0] + [2, 3, 4] * 5])
for _ in range(200):
    optimizer.zero_grad()
    model(row, labels=row).loss.backward()
    optimizer.step()
model.eval()

text = " ".join("abc" * 5)
lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
rolling = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])[0]
with torch.no_grad():
    own = model(row).logits.log_softmax(-1)[0, :-1].gather(1, row[0, 1:, None]).sum().item()
    twice = model(torch.tensor([[0, 0]])).logits.log_softmax(-1)[0, 0, 0].item()
print(f"guess: {own:.3f}, the log-likelihood of 15 letters after <s>")
print(f"seen: {rolling:.3f}; <s> after <s> alone has {twice:.3f}")
assert rolling < own - 4 and twice < -4
PY
