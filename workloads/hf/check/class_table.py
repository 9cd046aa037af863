"""A table of transformers' language model classes: whether each passes `check_behaviour` in its default
configuration.

`python -m workloads.hf.check.class_table [FILE]` prints the table, or writes it to FILE. It takes a quarter of an hour.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workloads import objectives
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import describe_hf_class
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.behaviour import check_behaviour
from workloads.workload import Vocabulary

DEPTH = 4
SIZE = 1000
DEPTH_NAMES = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_layers",
    "n_layers",
)
LENGTH = 64
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""Attributes, by model_type, that the default configuration lacks but every published one has."""


@dataclass(frozen=True)
class ClassCheck:
    """An objective with its options to check a class with, and its column heading."""

    title: str
    objective: str
    options: tuple[tuple[str, Any], ...] = ()


CHECKS: Mapping[str, tuple[ClassCheck, ...]] = {
    "decoder": (
        ClassCheck("causal_lm", "causal_lm"),
        ClassCheck("documents: isolate", "causal_lm", (("documents", "isolate"),)),
    ),
    "encoder": (ClassCheck("masked_lm", "masked_lm"), ClassCheck("permuted_lm", "permuted_lm")),
    "encoder-decoder": (ClassCheck("denoising", "denoising"),),
}


def classes(architecture: str) -> Mapping[str, str]:
    """Return transformers' class names for an architecture, by model_type."""
    from transformers.models.auto import modeling_auto

    names_by_architecture: dict[str, Mapping[str, str]] = {
        "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return dict(names_by_architecture[architecture])


def configuration(model_type: str, architecture: str) -> Any:
    """Return the default configuration of a class, with few layers. Raises whatever the class raises."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    required = dict(REQUIRED.get(model_type, {}))
    full = vars(kind(**required))
    names = {kind.attribute_map.get(name, name) for name in DEPTH_NAMES}
    shallow = {name: min(DEPTH, full[name]) for name in names if type(full.get(name)) is int}
    try:
        hf_config = kind(**shallow, **required)
    except Exception:  # its default has as many entries in some list as layers
        hf_config = kind(**required)
    hf_config.architectures = [classes(architecture)[model_type]]
    if architecture == "decoder":
        hf_config.is_encoder_decoder = False
        if getattr(hf_config, "is_decoder", None) is False:
            hf_config.is_decoder = True
    return hf_config


def outcome(model_type: str, architecture: str, check: ClassCheck) -> str:
    """Return an empty text if the class is accepted, else the reason for the refusal."""
    try:
        hf_config = configuration(model_type, architecture)
    except Exception as error:  # each class checks its configuration in its own way
        return f"its default configuration is not a model: {type(error).__name__}"
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        hf_config.save_pretrained(folder)
        try:
            config = describe_hf_class(folder)
            if config.architecture != architecture:
                return f"its default configuration is of another kind ({config.architecture})"
            vocabulary = _vocabulary(min(SIZE, config.vocab_size))
            built = objectives.build(
                check.objective, vocabulary=vocabulary, sequence_length=LENGTH, seed=0, **dict(check.options)
            )
            check_behaviour(HuggingFaceWorkload(model_type, config, built, vocabulary))
        except WorkloadError as error:
            return str(error).split(" here: ", 1)[-1].replace(folder, "the folder").split(";")[0]
    return ""


def _vocabulary(size: int) -> Vocabulary:
    anywhere = np.ones(size, bool)
    return Vocabulary(
        size, eos=4, pad=1, bos=2, cls=3, sep=5, mask=6, word_start=anywhere, sentence_end=anywhere
    )


def table() -> Iterator[str]:
    """Return the tables in Markdown, one row per class."""
    import transformers

    yield "# Hugging Face classes that run as they are\n"
    yield "Generated by `python -m workloads.hf.check.class_table`: the default configuration of every class for"
    yield (
        f"language in transformers {transformers.__version__}, made small and checked in the same way as every "
        "job with `hf:` is"
    )
    yield (
        "before it starts (`workloads/hf/check/behaviour.py`). Classes with their own table, such as BERT, are "
        "not run"
    )
    yield "as they are."
    for architecture, checks in CHECKS.items():
        yield f"\n## {architecture.capitalize()}s\n"
        yield " | ".join(["| model_type", "class", *(check.title for check in checks)]) + " |"
        yield "|---" * (2 + len(checks)) + "|"
        for model_type, name in classes(architecture).items():
            outcomes = [outcome(model_type, architecture, check) or "yes" for check in checks]
            yield row(model_type, name, outcomes)


def row(model_type: str, name: str, outcomes: list[str]) -> str:
    """Return a row of the table."""
    cells = " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in outcomes)
    return f"| {model_type} | `{name}` | {cells} |"


def main() -> None:
    """Print the tables, or write them to the file named on the command line."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = []
    for line in table():
        lines.append(line)
        print(line, flush=True)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
