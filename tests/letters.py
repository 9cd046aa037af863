"""Texts of letters, and the tokenizer of a word each with its chat template, for runs on records."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]
WORDS = [*SPECIAL, *"abcdefghijklmnop", "user", "assistant", ":"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} <|endoftext|> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def letters(number: int) -> str:
    """Four to twelve letters."""
    return " ".join("abcdefghijklmnop"[(number * 7 + place) % 16] for place in range(4 + number % 9))


def write_tokenizer(folder: Path, template: bool = True) -> None:
    """The tokenizer and its template, in a folder."""
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
