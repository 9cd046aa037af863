#!/usr/bin/env bash
# add_bos_token does nothing for a byte-level tokenizer that is named LlamaTokenizerFast.
#
# Guess: add_bos_token true in tokenizer_config.json puts the beginning token before each text, as it does
#   for Llama 2, and false leaves it out.
# Behaviour: transformers 5 falls back to its generic class for a byte-level file; that class ignores the
#   flag, so true and false give the same ids, and the post-processor of the file alone decides.
# Packages: transformers 5.23.0
# Why it matters: a base model that was trained with a beginning token scores and generates without it, and
#   the configuration says the opposite.
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
import logging
import pathlib

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__)
print("guess: the flag decides whether id 0 comes first")
folder = pathlib.Path("folder")
folder.mkdir()
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=290, special_tokens=["<begin>", "<end>"], show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
bpe.train_from_iterator(["rain on the roof"] * 5, trainer)


def ids(flag, framed):
    bpe.post_processor = (
        processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
        if framed
        else processors.ByteLevel()
    )
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>", "add_bos_token": flag,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return AutoTokenizer.from_pretrained(folder)("rain").input_ids


first = {(flag, framed): ids(flag, framed)[0] == 0 for flag in (True, False) for framed in (True, False)}
for (flag, framed), begins in first.items():
    print(f"add_bos_token {flag}, template in the file {framed}: begins with the beginning token: {begins}")
print("seen: only the template of the file decides; the flag changes nothing")
assert first == {(True, True): True, (True, False): False, (False, True): True, (False, False): False}
PY
