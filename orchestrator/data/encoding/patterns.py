"""Patterns with which OpenAI's tokenizers split text, and their special tokens, from tiktoken 0.14 (MIT).

`GPT4` is the pattern of cl100k_base as first published; the current one of tiktoken matches the same.
"""

from __future__ import annotations

END = "<|endoftext|>"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (GPT2, {END: 50256}),
    "r50k_base": (GPT2, {END: 50256}),
    "p50k_base": (GPT2, {END: 50256}),
    "cl100k_base": (GPT4, {END: 100257, **_FIM, "<|endofprompt|>": 100276}),
    "o200k_base": (O200K, {END: 199999, "<|endofprompt|>": 200018}),
}
"""By the name of an encoding: the pattern that splits text, and the ids of its special tokens."""
