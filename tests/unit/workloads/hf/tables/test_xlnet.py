"""XLNet in two streams: what permuted_lm makes of text gives transformers' logits and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.check.compare import TOLERANCE, load
from workloads.hf.check.parity_table import random_state
from workloads.hf.convert.folder import describe_folder
from workloads.hf.tables.convert import to_hf
from workloads.hf.tables.families import family_of
from workloads.load import load as load_workload
from workloads.model.presets import preset
from workloads.objectives.permuted import PermutedLM
from workloads.objectives.samples import Samples
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch, Vocabulary

SIZE, LENGTH = 97, 32
VOCABULARY = Vocabulary(SIZE, eos=2, pad=1, mask=3)
SMALL = {
    "vocab_size": SIZE,
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "intermediate": 48,
    "kv_heads": 0,
    "head_dim": 0,
}


def batch_of(span: int) -> tuple[Batch, int]:
    """Two samples, and how many tokens of text each has."""
    objective = PermutedLM(vocabulary=VOCABULARY, sequence_length=LENGTH, seed=4, span=span)
    size = objective.window(LENGTH)
    text = np.random.default_rng(0).integers(4, SIZE, (2, size))
    text[:, size // 2] = VOCABULARY.eos
    return objective.collate(Samples(lambda number: text[number], 2), [0, 1], 0), size


def arguments(batch: Batch, row: int, size: int) -> dict[str, Tensor]:
    """What transformers takes for a sample: which tokens a token may see, and the places that are predicted."""
    queries = batch["queries"][row]
    targets = batch["positions"][row][queries]
    hidden = ~batch["attention"][row, :size, :size]
    hidden[targets] = ~batch["attention"][row][queries][:, :size]
    mapping = torch.nn.functional.one_hot(targets, size)
    return {
        "input_ids": batch["tokens"][row : row + 1, :size],
        "perm_mask": hidden[None].float(),
        "target_mapping": mapping[None].float(),
    }


@pytest.mark.parametrize(("span", "segments"), [(1, False), (5, True)])
def test_two_streams_are_those_of_transformers(span: int, segments: bool, tmp_path: Path) -> None:
    config = preset("xlnet-base").changed(SMALL)
    workload = TransformerWorkload("xlnet-base", config, None, VOCABULARY)  # type: ignore[arg-type]
    state = random_state(workload)
    workload.to_hf(state.__getitem__, str(tmp_path))
    model, theirs = workload.build().eval(), load(str(tmp_path))
    model.load_state_dict(state)
    batch, size = batch_of(span)
    if segments:
        batch["token_types"] = (batch["positions"] > size // 2).long()
    labels, predicted = batch["labels"], batch["labels"] != -100
    output = model(batch)
    loss = workload.criterion(output, batch)
    assert output.logits.shape == (int(predicted.sum()), SIZE)
    loss.total.backward()
    at, total = 0, 0.0
    for row in range(len(labels)):
        given = arguments(batch, row, size)
        if segments:
            given["token_type_ids"] = batch["token_types"][row : row + 1, :size]
        wanted = theirs(**given).logits[0]
        assert float((output.logits[at : at + len(wanted)] - wanted).abs().max()) <= TOLERANCE
        at += len(wanted)
        value = torch.nn.functional.cross_entropy(wanted, labels[row][predicted[row]], reduction="sum")
        value.backward()
        total += float(value.detach())
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-6)
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    found = dict(to_hf(family_of(config), config, workload.shapes, own.__getitem__))
    for name, parameter in theirs.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert gradient.any() or (not segments and name.endswith(("seg_embed", "r_s_bias"))), name
        size_of = max(1.0, float(gradient.abs().max()))
        assert float((found[name] - gradient).abs().max()) <= TOLERANCE * size_of, name


def test_a_query_sees_no_token_of_its_own(tmp_path: Path) -> None:
    workload: Any = load_workload(
        "xlnet-base", "permuted_lm", VOCABULARY, changes=SMALL, sequence_length=LENGTH
    )
    model = workload.build().eval()
    model.load_state_dict(random_state(workload))
    batch, _ = batch_of(1)
    first = model(batch).logits
    row, place = 0, int(batch["positions"][0][batch["queries"][0]][0])
    batch["tokens"][row, place] = (batch["tokens"][row, place] + 1) % SIZE
    second = model(batch).logits
    count = int(batch["queries"][0].sum())
    assert torch.equal(first[0], second[0])  # the first target in the order
    assert not torch.allclose(first[1:count], second[1:count])  # those after it see it


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ""),
        ({"clamp_len": 8}, "as it is"),
        ({"bi_data": True}, "as it is"),
        ({"attn_type": "uni"}, "as it is"),
    ],
)
def test_a_folder_is_read_or_run_as_the_class(changes: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": SIZE, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    theirs: Any = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes, **changes))
    theirs.save_pretrained(tmp_path)
    assert isinstance(describe_folder(str(tmp_path)), HuggingFaceModel) == bool(wanted)
    if wanted:
        return
    workload: Any = load_workload(f"hf:{tmp_path}", "permuted_lm", VOCABULARY, sequence_length=LENGTH)
    query = workload.initial("layers.0.attention.query.weight", 0)
    assert torch.equal(query, theirs.transformer.layer[0].rel_attn.q.flatten(1).T)
    stored = workload.stored("layers.1.attention.relative.segments", 0)
    part = stored[(slice(8, 16), slice(0, 2))]
    assert torch.equal(part, theirs.transformer.layer[1].rel_attn.seg_embed[:, 1].T)


def test_what_has_no_place_beside_it_is_refused() -> None:
    for changes in ({"qk_norm": True}, {"kv_heads": 2}, {"architecture": "decoder"}):
        with pytest.raises(WorkloadError, match="relative_keys need an encoder"):
            preset("xlnet-base").changed(SMALL | changes)
