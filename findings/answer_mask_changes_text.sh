#!/usr/bin/env bash
# TRL trains Qwen 3 on another text if only the answers are to be predicted.
#
# Guess: assistant_only_loss chooses which tokens have labels. What the model reads is the template's text in both cases.
# Behaviour: to find the answers, SFTTrainer takes a template of its own in place of the tokenizer's. With it every answer
#   of a conversation begins with an empty block of thoughts; Qwen 3's own template writes one before the last answer
#   alone. The tokenizer keeps the old template, so the conversations that the trained model is later asked to continue
#   are not of the form that it was trained on. (TRL's README of its templates says that the block is always written.)
# Packages: trl 1.16.0, transformers 5.23.0, torch 2.13.0
# Why it matters: earlier answers in the context differ between training and use, and a comparison of the two losses,
#   over all tokens and over answers, compares two texts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    trl==1.16.0 transformers==5.23.0 torch==2.13.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
from pathlib import Path

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

print("version: trl", trl.__version__)
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two."},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "four."},
]
own = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()  # as Qwen 3's repositories have it
letters = Tokenizer(models.BPE())
letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters.decoder = decoders.ByteLevel()
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
letters.train_from_iterator(
    [], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
)


def trained(answers_only):
    """The text that SFTTrainer trains on, and how the tokenizer afterwards writes the same talk up to a question."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = own
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )
    args = trl.SFTConfig(
        output_dir="out", assistant_only_loss=answers_only, bf16=False, report_to=[], use_cpu=True
    )
    rows = Dataset.from_list([{"messages": TALK}])
    trainer = trl.SFTTrainer(
        model=Qwen3ForCausalLM(config), args=args, train_dataset=rows, processing_class=tokenizer
    )
    asked = trainer.processing_class.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    return tokenizer.decode(trainer.train_dataset[0]["input_ids"]), asked


(whole, _), (answers, asked) = trained(False), trained(True)
print("guess: both train on", repr(whole))
print("seen: empty thoughts in the text of all tokens, of answers alone, and of a later question:",
      *(text.count("<think>") for text in (whole, answers, asked)))
assert whole.count("<think>") == 1 and answers.count("<think>") == 2 and asked.count("<think>") == 0
PY
