#!/usr/bin/env bash
# A configuration that transformers 5 writes loses its rotary base in transformers 4.
#
# Guess: config.json means the same to both: rope_theta 500000, and the llama3 scaling, survive.
# Behaviour: version 5 writes rope_parameters only. Version 4.57 ignores that key and takes base 10000
#   without scaling, without a word. A tokenizer of the same folder is refused by name (TokenizersBackend).
# Packages: transformers 5.23.0, transformers 4.57.6
# Why it matters: a serving stack on version 4 loads a model that was saved by version 5, answers fluently
#   at short range and degrades with length.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0
python3 -m venv older
older/bin/pip install --quiet --disable-pip-version-check \
    transformers==4.57.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

print("version: transformers", transformers.__version__, "writes")
scaled = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=1024, rope_theta=500000.0)
config = LlamaConfig(rope_parameters=scaled, max_position_embeddings=8192)
config.save_pretrained("folder")
vocabulary = {"[unk]": 0, "a": 1, "b": 2}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unk]").save_pretrained("folder")
print("written:", config.rope_parameters)
PY

older/bin/python - <<'PY'
import transformers
from transformers import AutoConfig, AutoTokenizer

print("version: transformers", transformers.__version__, "reads")
print("guess: rope_theta 500000 with llama3 scaling, and the tokenizer loads")
config = AutoConfig.from_pretrained("folder")
try:
    AutoTokenizer.from_pretrained("folder")
    refusal = "none"
except ValueError as error:
    refusal = str(error)
print(f"seen: rope_theta {config.rope_theta}, rope_scaling {config.rope_scaling}; tokenizer: {refusal}")
assert config.rope_theta == 10000.0
assert config.rope_scaling is None
assert "TokenizersBackend" in refusal
PY
