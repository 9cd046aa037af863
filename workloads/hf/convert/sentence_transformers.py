"""The files with which sentence-transformers reads an exported encoder: its modules, pooling and length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workloads.objectives.supervised import SentenceEmbeddings

MODULES = "sentence_transformers.models"


def write_modules(folder: str, objective: SentenceEmbeddings, hidden: int) -> None:
    """Write the files beside an encoder for transformers in `folder`.

    Args:
        folder: the export.
        objective: says how texts are pooled, and how long they are.
        hidden: the size of a vector.
    """
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{MODULES}.Pooling"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": objective.pooling == "cls",
            "pooling_mode_mean_tokens": objective.pooling == "mean",
        },
        "sentence_bert_config.json": {
            "max_seq_length": objective.sequence_length // objective.parts,
            "do_lower_case": False,
        },
        "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
    }
    for name, content in files.items():
        path = Path(folder) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
