"""Own models begin with the weights of a folder: their own export, or one of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from workloads.errors import WorkloadError
from workloads.own.check import model_of
from workloads.own.folder import FolderWeights
from workloads.own.model import NETWORK, OwnModel, OwnWorkload, describe_own
from workloads.own.samples import OfSamples
from workloads.workload import Vocabulary

MAE: dict[str, Any] = {
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "decoder_hidden_size": 8,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 8,
}


def workload(**changes: Any) -> OwnWorkload:
    config = describe_own("workloads.vision.mae:Mae", {**MAE, **changes}, None)
    return OwnWorkload("mae", config, OfSamples(), Vocabulary(1, 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of transformers with the weights of seed 5."""
    config, tensors = workload().config.bare.to_hf(model_of(workload(), 5).network.state_dict())  # type: ignore[operator,union-attr]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def begun(folder: Path, **changes: Any) -> FolderWeights:
    made = workload(**changes)
    assert isinstance(made.config, OwnModel)
    return FolderWeights(made.config, str(folder), made.shapes)


def test_a_run_begins_with_the_weights_of_a_folder(folder: Path) -> None:
    made = workload()
    made = OwnWorkload(made.name, made.config, made.objective, made.vocabulary, begun=begun(folder))
    wanted = model_of(made, 5).state_dict()
    assert all(torch.equal(made.initial(name, 7), wanted[name]) for name in made.shapes)
    assert begun(folder, mask_ratio=0.5).find(f"{NETWORK}decoder.mask_token") is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act 'gelu', and workload.changes 'quick_gelu'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-12, and workload.changes 1e-05"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 1, and workload.changes 2"),
    ],
)
def test_what_computes_otherwise_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        begun(folder, **changes)


def test_other_tensors_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["decoder.mask_token"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        WorkloadError, match=r"does not fit: network.decoder.mask_token \[1, 1, 8\] is missing"
    ):
        begun(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vit"}, "model_type 'vit'"),
        (
            {"model_type": "vit_mae"},
            "decoder_hidden_size 512, and workload.changes 8",
        ),  # by transformers' default
        ({}, "has no configuration of transformers"),
    ],
)
def test_a_configuration_counts_as_transformers_reads_it(
    folder: Path, config: dict[str, Any], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkloadError, match=message):
        begun(folder)
