"""What a pretrained folder means beyond its weights: which number is which label, and how a text begins and ends.

A forward pass reads none of this, so a mistake here shows up only as wrong results. Training, evaluation, prompts and
export all read it from here, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workloads.hf.hf_config import read_hf_config

GENERIC = re.compile(r"LABEL_\d+")
"""The names that transformers gives to labels that nobody named."""


@dataclass(frozen=True)
class FolderMeaning:
    """What the configuration files of a pretrained folder say about labels and tokens.

    Attributes:
        labels: the label of each row of the classification head, in the head's order; empty if the folder names none.
        problem_type: the loss of the classification head, by transformers' name; None if the folder does not say.
    """

    labels: tuple[str, ...] = ()
    problem_type: str | None = None


def folder_meaning(folder: str) -> FolderMeaning:
    """Read what the folder (or its config.json) means. Raises WorkloadError if transformers cannot read it."""
    config = read_hf_config(folder, quantised=_Anything())
    return FolderMeaning(labels=_labels(config), problem_type=getattr(config, "problem_type", None))


ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""The roles of tokens for which transformers has a name of its own, such as eos_token."""
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers of transformers that name no token by default."""


def tokens_of_files(config: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by name, such as eos_token, that transformers reads of a tokenizer_config.json and of what a
    special_tokens_map.json has `named`, for a class that names none by default. The map goes first, null included."""
    roles = {f"{role}_token" for role in ROLES}
    found = {name: value for name, value in config.items() if name in roles}
    found |= {name: value for name, value in named.items() if name in roles}
    extra = config.get("extra_special_tokens")
    found |= extra if isinstance(extra, dict) else {}
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


@lru_cache(maxsize=4)  # a command asks several times, and each takes a second
def tokens_of_class(folder: str, files: str) -> Mapping[str, str] | None:
    """The special tokens by name that the tokenizer has which transformers makes of a local folder: of its files, and
    by default of its class. None if it makes none. `files` tells the content of the folder's files from others."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception:  # of any class of transformers
        return None
    return {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}


def _labels(config: Any) -> tuple[str, ...]:
    named = getattr(config, "id2label", None) or {}
    labels = tuple(str(named[number]) for number in sorted(named))
    return () if all(GENERIC.fullmatch(label) for label in labels) else labels


class _Anything:
    """Contains everything: meaning does not depend on how weights are quantised."""

    def __contains__(self, _: object) -> bool:
        return True
