"""Task files in lm-eval's format over examples made of real text: the topics of Python's language reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def examples(count: int = 24) -> list[dict[str, Any]]:
    """Beginnings of texts, each with its continuation among those of three others."""
    from pydoc_data.topics import topics

    texts = [" ".join(topics[key].split())[:160] for key in sorted(topics) if len(topics[key]) > 400][:count]
    found = []
    for number, text in enumerate(texts):
        others = [texts[(number + step) % count][60:90] for step in range(4)]
        label = number % 4
        choices = others[-label:] + others[:-label] if label else others
        found.append({"beginning": text[:60], "choices": choices, "label": label, "rest": text[60:90]})
    return found


def write_task(folder: Path, name: str = "topics", **changes: Any) -> Path:
    """A multiple-choice task and its data; changes of None leave a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples()))
    document = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "topics.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "beginning",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "f1"}, {"metric": "mcc"}],
    } | changes
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in document.items() if value is not None}))
    return path


def write_generation(folder: Path, name: str = "rest", **changes: Any) -> Path:
    """A generation task over the same data."""
    metrics = ("exact_match", "rougeL", "rouge1", "bleu", "chrf", "f1")
    generation = {
        "output_type": "generate_until",
        "doc_to_choice": None,
        "doc_to_target": "rest",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": metric} for metric in metrics],
    }
    return write_task(folder, name, **(generation | changes))


def write_rolling(folder: Path, name: str = "rolling") -> Path:
    """The likelihood of whole texts."""
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{beginning}}{{rest}}",
    }
    metrics = [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    return write_task(folder, name, doc_to_choice=None, metric_list=metrics, **rolling)
