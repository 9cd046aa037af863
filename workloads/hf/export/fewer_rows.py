"""A Hugging Face folder with fewer tokens: the rows of the others are removed from its tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.convert.folder import describe_folder
from workloads.hf.files.hf_config import folder_config
from workloads.hf.files.weight_files import Weights, write
from workloads.hf.tables.convert import row_of, used
from workloads.hf.tables.families import family_of
from workloads.model.config import TransformerConfig
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

CONFIG, GENERATION = "config.json", "generation_config.json"
COPY = re.compile(r"(^|\.)(lm_head|cls\.predictions)(\.decoder)?\.(weight|bias)$")
"""Names of tensors that some files store besides a table that they are tied to."""
LISTS = ("suppress_tokens", "begin_suppress_tokens")
"""Keys of a generation's settings that list tokens."""
BY_TOKENS = ("bad_words_ids", "forced_decoder_ids", "force_words_ids", "sequence_bias")
"""Keys that name tokens in a way that is not renumbered here."""


def named_tokens(folder: str) -> set[int]:
    """Return the tokens that the configuration in a folder names by their ids."""
    ids: set[int] = set()
    for name in (CONFIG, GENERATION):
        for key, value in _read(Path(folder) / name).items():
            if key.endswith("_token_id") and value is not None:
                ids |= set(value if isinstance(value, list) else [value])
    return {number for number in ids if isinstance(number, int) and number >= 0}


def write_fewer_rows(folder: str, kept: Sequence[int], target: str) -> None:
    """Write the model of `folder` with only these tokens, in their order: configuration and weights.

    Every other tensor is copied as it is. Rows of the tables beyond the tokenizer's entries are removed too.

    Args:
        folder: a folder whose class this project has.
        kept: the ids of the tokens, ascending.
        target: the folder to write to; it must exist.

    Raises:
        WorkloadError: the class is run as it is, or a setting names tokens in another way.
    """
    described = describe_folder(folder, folder_config(folder))
    if not isinstance(described, TransformerConfig):
        raise WorkloadError(f"{folder} runs as a class of transformers, whose embedding tables are not known")
    size = described.vocab_size
    if kept[-1] >= size:
        raise WorkloadError(f"the tokenizer has token {kept[-1]}, and the model in {folder} only {size}")
    numbers = {old: new for new, old in enumerate(kept)}
    for name in (CONFIG, GENERATION):
        if config := _read(Path(folder) / name):
            renumbered = _renumbered(config, numbers, folder)
            if name == CONFIG:
                renumbered["vocab_size"] = len(kept)
            (Path(target) / name).write_text(json.dumps(renumbered, indent=2) + "\n")
    write(_tensors(folder, described, kept), target)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _renumbered(config: Mapping[str, Any], numbers: Mapping[int, int], folder: str) -> dict[str, Any]:
    changed = dict(config)
    for key, value in config.items():
        if key in BY_TOKENS and value:
            raise WorkloadError(f"{folder} has {key} in its settings, which names tokens; remove it")
        if key.endswith("_token_id") and isinstance(value, int):
            changed[key] = numbers.get(value, value)
        elif key.endswith("_token_id") and isinstance(value, list):
            changed[key] = [numbers[number] for number in value]
        elif key in LISTS and value:
            changed[key] = [numbers[number] for number in value if number in numbers]
    return changed


def _tensors(folder: str, config: TransformerConfig, kept: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the folder, tables with the kept rows only."""
    weights = Weights(folder)
    tables = set(_tables(config))
    prefix = family_of(config).prefix
    rows = torch.tensor(kept)
    for name in weights.names:
        tensor = weights.read(name)
        is_table = bool({name, f"{prefix}{name}"} & tables) or bool(COPY.search(name))
        yield name, tensor[rows] if is_table and len(tensor) == config.vocab_size else tensor


def _tables(config: TransformerConfig) -> Iterator[str]:
    """Yield the names in transformers of the tensors with one row per token, of any head that predicts tokens."""
    family = family_of(config)
    for head in ("none", "language", "masked"):
        if head not in family.heads:
            continue
        headed = config.changed({"head": head, "sentence_head": False, "generator": 0})
        workload = TransformerWorkload("", headed, None, Vocabulary(1, 0))  # type: ignore[arg-type]
        for table in workload.tables:
            row, _, number = row_of(family, headed, table)
            yield from used(family, headed, row, number)


def stored_parameters(folder: str) -> int:
    """Return the number of parameters in a folder's weights."""
    weights = Weights(folder)
    return sum(weights.shape(name).numel() for name in weights.names)
