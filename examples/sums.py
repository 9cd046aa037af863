"""Writes what the example of learning from rewards reads: sums as text, prompts for rollouts, and a tokenizer.

    python examples/sums.py

sums/text.jsonl: sums for pre-training. In most of those that carry a digit, the carry is forgotten, as in 17+25=32. A
model that has read them therefore gives this wrong answer more often than the right one. sums/prompts.jsonl: questions
with right answers. sums/held_out.jsonl: the same for sums that are in neither of the other files.
sums/tokenizer/tokenizer.json: a token for each character.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

CHARACTERS = "0123456789+="
SPECIAL = ("<|endoftext|>", "<|pad|>")
NUMBERS = [n for n in range(50) if n % 10 >= 2]
"""Two thirds of their sums carry."""
TEXTS, HELD_OUT, FORGOTTEN = 40_000, 200, 0.65


def without_carry(a: int, b: int) -> int:
    """Return a sum whose carry from ones to tens is forgotten."""
    return (a // 10 + b // 10) * 10 + (a + b) % 10


def characters() -> Tokenizer:
    """Return a tokenizer of characters."""
    vocabulary = {token: number for number, token in enumerate([*CHARACTERS, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file."""
    draw = random.Random(0)
    pairs = list(itertools.product(NUMBERS, repeat=2))
    draw.shuffle(pairs)
    held_out, known = pairs[:HELD_OUT], pairs[HELD_OUT:]
    texts = []
    for a, b in draw.choices(known, k=TEXTS):
        result = without_carry(a, b) if draw.random() < FORGOTTEN else a + b
        texts.append({"text": f"{a}+{b}={result}"})
    prompts = {
        name: [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in those]
        for name, those in (("prompts", known), ("held_out", held_out))
    }
    return {"text": texts, **prompts}


def main(target: str = "sums") -> None:
    """Write the files."""
    place = Path(target)
    (place / "tokenizer").mkdir(parents=True, exist_ok=True)
    characters().save(str(place / "tokenizer" / "tokenizer.json"))
    made = rows()
    for name, found in made.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{place}: " + ", ".join(f"{len(found)} in {name}.jsonl" for name, found in made.items()))


if __name__ == "__main__":
    main(*sys.argv[1:2])
