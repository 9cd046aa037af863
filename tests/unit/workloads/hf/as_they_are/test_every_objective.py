"""Every objective that a family with a conversion table can be trained by, from a folder that transformers wrote:
transformers loads the export, and computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from proofs import possible

from workloads.errors import WorkloadError
from workloads.hf.check.compare import TOLERANCE, difference, load, probes
from workloads.hf.check.parity_table import CASES, LENGTH, Case, random_state
from workloads.hf.tables.families import FAMILIES
from workloads.inference import with_weights
from workloads.load import load as load_workload
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

SIZE, SENTINELS = 220, 100
KNOWN = Vocabulary(
    SIZE, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(SIZE - SENTINELS, SIZE)),
    word_start=np.ones(SIZE, bool), sentence_end=np.ones(SIZE, bool),
)  # fmt: skip
LABELS = ("bad", "fair", "good")
OPTIONS = {"entity_masking": {"entities": [[7, 8], [9]]}}
ELSEWHERE = ("causal_lm", "masked_lm", "seq2seq", "replaced_token_detection", "span_extraction")
"""Objectives that other tests compare for each family that has them here."""
ALSO = {("ernie", "span_extraction"), ("xlnet", "masked_lm")}
"""What they leave out."""
QUICK = {
    ("gpt2", "reward"),
    ("bert", "next_sentence"),
    ("bert", "sentence_embeddings"),
    ("bart", "mass"),
    ("qwen2-moe", "token_classification"),
}
CASE_OF = {case.config.family: case for case in reversed(CASES) if case.config.head in ("language", "masked")}
"""The first case of each family whose model has a language head."""


def _cells() -> Iterator[Any]:
    for family, found in possible().items():
        for objective in found:
            elsewhere = objective in ELSEWHERE and (family, objective) not in ALSO
            if elsewhere or family not in CASE_OF:
                continue
            marks = [] if (family, objective) in QUICK else [pytest.mark.slow]
            yield pytest.param(family, objective, marks=marks, id=f"{family}-{objective}")


def folder_of(case: Case, place: Path) -> Path:
    """A folder that `save_pretrained` wrote, with random weights."""
    workload = TransformerWorkload(case.model, case.config.changed({"vocab_size": SIZE}), None, KNOWN)
    workload.to_hf(random_state(workload).__getitem__, str(place / "ours"))
    load(str(place / "ours")).save_pretrained(place / "in")
    return place / "in"


@pytest.mark.proves("export", objective="objective", family="family")
@pytest.mark.parametrize(("family", "objective"), list(_cells()))
def test_the_export_of_what_an_objective_trains_computes_the_same(
    family: str, objective: str, tmp_path: Path
) -> None:
    folder = folder_of(CASE_OF[family], tmp_path)
    labels = LABELS if objective in ("sequence_classification", "token_classification") else ()
    options = OPTIONS.get(objective, {})
    workload = load_workload(
        f"hf:{folder}", objective, KNOWN, options=options, sequence_length=LENGTH, labels=labels
    )
    assert isinstance(workload, TransformerWorkload)
    workload.check_hf()
    workload.to_hf(lambda name: workload.initial(name, 3), str(tmp_path / "out"))
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    text = torch.randint(6, SIZE - SENTINELS, (400,), generator=torch.Generator().manual_seed(0))
    batches = list(probes(workload.config, KNOWN, text, (7, LENGTH)))
    assert difference(workload.config, model, str(tmp_path / "out"), batches) <= TOLERANCE


@pytest.mark.parametrize("objective", ["translation_lm", "unified_lm"])
def test_a_folder_with_one_token_type_does_not_train_what_needs_two(objective: str, tmp_path: Path) -> None:
    folder = folder_of(CASE_OF["roberta"], tmp_path)
    says = rf"{objective} tells two texts apart by their token types, and hf:.* has 1"
    with pytest.raises(WorkloadError, match=says):
        load_workload(f"hf:{folder}", objective, KNOWN, sequence_length=LENGTH)


def test_transformers_has_every_class_that_an_export_names() -> None:
    named = {head.kind for family in FAMILIES.values() for head in family.heads.values()}
    assert [kind for kind in sorted(named) if not hasattr(transformers, kind)] == []
