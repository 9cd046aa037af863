"""The tokenizer of a GGUF file: a byte-level BPE whose way to cut text llama.cpp knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.errors import WorkloadError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {
    "": "gpt-2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
"""llama.cpp's name of a way to cut text, by its expression; empty for that of the byte-level pre-tokenizer itself."""
TEXTS = (
    "Hello, world!  It's 12345 o'clock;\n\n\tWE'LL see.",
    " Größe, 東京 and 🙂 at 3.14159 % of café\r\n",
    "def f(x):\n    return x ** 2  # done",
)
HINT = "export it for transformers"


def add_tokenizer(writer: Any, plain: str, config: Mapping[str, Any]) -> None:
    """Add the tokenizer of an export for transformers. Raises WorkloadError if llama.cpp has none like it."""
    import gguf

    wrapped = _wrapped(plain)
    about = json.loads((Path(plain) / "tokenizer.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut(about))
    added = {token["id"]: token for token in about["added_tokens"]}
    names = {number: token for token, number in wrapped.get_vocab().items()}
    tokens, kinds = [], []
    for number in range(config["vocab_size"]):
        tokens.append(names.get(number, f"[PAD{number}]"))
        kind = gguf.TokenType.NORMAL if number in names else gguf.TokenType.UNUSED
        if number in added:
            kind = gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = about["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    begins, ends = _frame(wrapped)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    for role, add in (
        ("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):  # fmt: skip
        number = getattr(wrapped, f"{role}_token_id")
        if number is not None:
            add(number)
    if wrapped.chat_template:
        writer.add_chat_template(wrapped.chat_template)


def check_tokenizer(plain: str, folder: str, file: str) -> None:
    """Raise RuntimeError if transformers reads another tokenizer from the GGUF file."""
    from transformers import PreTrainedTokenizerFast

    wanted = _wrapped(plain)
    found = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file, local_files_only=True)
    for text in (*TEXTS, *(f"a{token}b" for token in wanted.all_special_tokens)):
        one, other = (each(text, add_special_tokens=False)["input_ids"] for each in (wanted, found))
        if one != other:
            raise RuntimeError(
                f"transformers reads a tokenizer from {file} that divides {text!r} otherwise; nothing was published"
            )


def _wrapped(plain: str) -> Any:
    """The tokenizer in a folder. It is of the plain class: that of some models cuts text in its own way, whatever the
    folder says."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(plain, local_files_only=True)


def _cut(about: Mapping[str, Any]) -> str:
    """llama.cpp's name of the way in which a tokenizer.json cuts text. Raises WorkloadError if it has none."""
    model, before = about["model"], about["pre_tokenizer"] or {}
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    last = steps[-1]
    if model["type"] != "BPE" or last.get("type") != "ByteLevel":
        raise WorkloadError(
            f"GGUF files are written with byte-level BPE, and this tokenizer is another; {HINT}"
        )
    expression = next((one["pattern"].get("Regex", "?") for one in steps if one["type"] == "Split"), "")
    known = _CUTS.get(expression)
    plain = (
        not last.get("add_prefix_space")
        and last.get("use_regex", True) == (not expression)
        and len(steps) < 3
    )
    normalised = about["normalizer"] is not None and (known, about["normalizer"]["type"]) != ("qwen2", "NFC")
    whole = bool(model.get("ignore_merges")) == (known == "llama-bpe")
    if known is None or not plain or normalised or not whole:
        raise WorkloadError(
            f"llama.cpp cuts text as GPT-2, Llama 3 or Qwen 2 do, and this tokenizer does otherwise; {HINT}"
        )
    return known


def _frame(wrapped: Any) -> tuple[bool, bool]:
    """Whether a text begins with bos and ends with eos. Raises WorkloadError for anything else around it."""
    bare, full = (wrapped("a", add_special_tokens=on)["input_ids"] for on in (False, True))
    for begin in (False, True):
        for end in (False, True):
            if full == [*[wrapped.bos_token_id] * begin, *bare, *[wrapped.eos_token_id] * end]:
                return begin, end
    raise WorkloadError(f"this tokenizer sets other tokens around a text than bos and eos; {HINT}")
