#!/usr/bin/env bash
# sentence-transformers leaves the first word of a text out of the mean, together with the prompt.
#
# Guess: Pooling with include_prompt=False averages over the tokens of the text alone, whatever the tokenizer.
# Behaviour: it leaves out as many tokens as the prompt has by itself. A prompt ends with a space, as in "query: ". A
#   byte-level tokenizer (GPT-2, Llama 3, Qwen) makes a token of that space when the prompt stands alone, and joins it to
#   the next word when a text follows. So one token too many is left out: the text's first word. A text of one word has
#   no token left, and its vector is zero.
# Packages: sentence-transformers 6.2.0, transformers 5.23.0, torch 2.13.0
# Why it matters: queries are short, and their first word is often the one that matters; the other side, encoded with
#   another prompt or none, keeps its first word. Training with it learns to do without.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import sentence_transformers
import torch
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

print("version: sentence-transformers", sentence_transformers.__version__)
PROMPT, TEXT = "query: ", "cats sleep a lot"
cut = Tokenizer(models.BPE())
cut.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
cut.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=["<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
cut.train_from_iterator([PROMPT + TEXT] * 50, trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=cut, pad_token="<pad>")
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16,
)
encoder = Qwen3Model(config).eval()
encoder.save_pretrained("model")
tokenizer.save_pretrained("model")

modules = [Transformer("model"), Pooling(32, "mean", include_prompt=False)]
model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", prompts={"query": PROMPT})
found = model.encode(TEXT, prompt_name="query", convert_to_tensor=True)
with torch.no_grad():
    states = encoder(**tokenizer(PROMPT + TEXT, return_tensors="pt")).last_hidden_state[0]
tokens = tokenizer.tokenize(PROMPT + TEXT)
kept = [start for start in range(len(tokens)) if torch.allclose(states[start:].mean(0), found, atol=1e-5)]
single = model.encode("cats", prompt_name="query", convert_to_tensor=True)
print("guess: the mean is over", tokens[2:])
print("seen: the mean is over", *(tokens[start:] for start in kept), "and a text of one word is", set(single.tolist()))
assert tokens[2:] == ["Ġcats", "Ġsleep", "Ġa", "Ġlot"] and kept == [3]
assert not single.any()
PY
