#!/usr/bin/env bash
# The tokenizer class of a known model replaces rules that tokenizer.json holds.
#
# Guess: tokenizer.json is the whole tokenizer: AutoTokenizer cuts a text as the tokenizers library does
#   from the same file.
# Behaviour: where tokenizer_config.json names Qwen2TokenizerFast, transformers 5 rebuilds the pre-tokenizer
#   from that class, so numbers are cut digit by digit though the file keeps them whole. With the generic
#   class beside model_type qwen3 it follows the file.
# Packages: transformers 5.23.0
# Why it matters: a Qwen model with a tokenizer of one's own is trained on one cut and served on another; no
#   id is out of range, so nothing fails.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import json
import pathlib

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

print("version: transformers", transformers.__version__)
print("guess: AutoTokenizer cuts as the file does")
folder = pathlib.Path("folder")
folder.mkdir()
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
bpe.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
bpe.train_from_iterator(["from 1987 to 2031 it rose by 100"] * 5, trainer)
bpe.save(str(folder / "tokenizer.json"))
text = "from 1987 to 2031"
by_file = bpe.encode(text).tokens


def cut(tokenizer_class, model_type):
    settings = {"eos_token": "<|endoftext|>"}
    if tokenizer_class:
        settings["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(folder).tokenize(text)


print("by the file:   ", by_file)
print("by the class:  ", cut("Qwen2TokenizerFast", "llama"))
print("by model_type: ", cut("PreTrainedTokenizerFast", "qwen3"))
print("another model: ", cut("PreTrainedTokenizerFast", "gpt2"))
print("seen: Qwen's class cuts 1987 into digits, the file into one token")
assert "1987" in by_file
assert cut("Qwen2TokenizerFast", "llama")[2:6] == ["1", "9", "8", "7"]
assert cut("PreTrainedTokenizerFast", "qwen3") == by_file
assert cut("PreTrainedTokenizerFast", "gpt2") == by_file
PY
