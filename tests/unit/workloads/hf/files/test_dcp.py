"""Folders of torch.distributed.checkpoint: what was saved sharded is read part by part, and no pickle runs anything."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from workloads.errors import WorkloadError
from workloads.hf.files.dcp import DcpTensors, write_dcp
from workloads.hf.files.weight_files import Weights
from workloads.load import load
from workloads.workload import Vocabulary, Workload

KNOWN = Vocabulary(97, eos=2, pad=1)


def llama(**changes: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | heads | changes)))


def save(state: dict[str, Any], folder: Path, model: transformers.PreTrainedModel | None = None) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if model is not None:
        model.config.save_pretrained(folder)


def begun(folder: Path) -> Workload:
    return load(f"hf:{folder}", "causal_lm", KNOWN, sequence_length=16)


def test_parts_are_read_where_they_lie(tmp_path: Path) -> None:
    wanted = {
        "a": torch.arange(60.0).view(6, 10),
        "b.c": torch.randn(3, 4, 5).bfloat16(),
        "turned": torch.arange(12.0).view(3, 4).t(),
        "one": torch.tensor(7),
    }
    save({**wanted, "step": 3}, tmp_path)
    found = DcpTensors(tmp_path)
    assert {n: tuple(t.shape) for n, t in wanted.items()} == dict(found.shapes)
    for name, tensor in wanted.items():
        assert torch.equal(found.part(name, tuple(slice(0, n) for n in tensor.shape)), tensor)
    assert torch.equal(found.part("a", (slice(2, 5), slice(3, 4))), wanted["a"][2:5, 3:4])
    assert torch.equal(found.part("turned", (slice(1, 3), slice(2, 3))), wanted["turned"][1:3, 2:3])


class Halves(dcp.DefaultSavePlanner):
    """Saves each tensor as two ranks would that have the first rows and the rest."""

    def create_local_plan(self) -> SavePlan:
        found = super().create_local_plan()
        items = [half for item in found.items for half in self._halves(item)]
        return replace(found, items=items)

    def _halves(self, item: WriteItem) -> list[WriteItem]:
        size = item.tensor_data.size
        made = []
        for low, high in ((0, size[0] // 2), (size[0] // 2, size[0])):
            offsets = torch.Size((low, *[0] * (len(size) - 1)))
            data = replace(
                item.tensor_data, chunk=ChunkStorageMetadata(offsets, torch.Size((high - low, *size[1:])))
            )
            index = MetadataIndex(item.index.fqn, offsets)
            made.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return made

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        tensor = self.state_dict[index.fqn]
        half = tensor.shape[0] // 2
        return tensor[half:] if index.offset[0] else tensor[:half]


def test_parts_that_cross_the_chunks_of_ranks_are_joined(tmp_path: Path) -> None:
    wanted = torch.arange(70.0).view(7, 10)
    dcp.save({"a": wanted}, checkpoint_id=tmp_path, planner=Halves(), no_dist=True)
    found = DcpTensors(tmp_path)
    assert len(found._entries["a"].chunks) == 2
    for rows, columns in (
        (slice(0, 7), slice(0, 10)),
        (slice(2, 5), slice(3, 4)),
        (slice(4, 6), slice(0, 2)),
    ):
        assert torch.equal(found.part("a", (rows, columns)), wanted[rows, columns])


def test_what_is_written_is_loaded_by_torch_one_tensor_at_a_time(tmp_path: Path) -> None:
    wanted = {f"layer.{n}": torch.randn(5, n + 1) for n in range(4)}
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return wanted[name]

    write_dcp({name: tensor.shape for name, tensor in wanted.items()}, read, str(tmp_path))
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert asked == list(wanted)
    assert str(tmp_path).encode() not in (tmp_path / ".metadata").read_bytes()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_folder_of_transformers_names_begins_a_model(tmp_path: Path, prefix: str) -> None:
    model = llama()
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    save({**state, "optim": {"state": {"model.norm.weight": {"exp_avg": torch.ones(32)}}}}, tmp_path, model)
    workload = begun(tmp_path)
    assert torch.equal(workload.initial("tokens.weight", 0), model.model.embed_tokens.weight)
    stored = workload.stored("layers.1.attention.query.weight", 0)
    assert stored is not None
    part = (slice(3, 9), slice(0, 5))
    assert torch.equal(stored[part], model.model.layers[1].self_attn.q_proj.weight[part])


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_metadata_that_would_run_something_is_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    honest = pickle.loads((tmp_path / ".metadata").read_bytes())
    honest.planner_data = Malicious(tmp_path / "ran")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(honest))
    with pytest.raises(WorkloadError, match=r"asks for posix\.system, which no metadata .* nothing was run"):
        DcpTensors(tmp_path)
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "the pickle was harmless"


def test_a_tensor_that_would_run_something_is_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    torch.save(Malicious(tmp_path / "ran"), path)
    about = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = about.storage_data.values()
    info.length = path.stat().st_size
    (tmp_path / ".metadata").write_bytes(pickle.dumps(about))
    with pytest.raises(WorkloadError, match=r"asks for posix\.system, which no plain tensor needs"):
        DcpTensors(tmp_path).part("a", (slice(0, 2),))
    assert not (tmp_path / "ran").exists()


def test_damage_is_told_in_a_line(tmp_path: Path) -> None:
    save({"a": torch.ones(2, 3)}, tmp_path)
    metadata = (tmp_path / ".metadata").read_bytes()
    (path,) = tmp_path.glob("*.distcp")
    data = path.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(WorkloadError, match=match):
            DcpTensors(tmp_path).part("a", (slice(0, 2), slice(0, 3)))

    path.write_bytes(data[:-200])
    refused("cannot be read")
    path.write_bytes(bytes(len(data)))
    refused("cannot be read")
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    about = pickle.loads(metadata)
    next(iter(about.storage_data.values())).length = path.stat().st_size
    (tmp_path / ".metadata").write_bytes(pickle.dumps(about))
    refused("is compressed")
    path.write_bytes(data)
    about = pickle.loads(metadata)
    about.state_dict_metadata["a"].chunks.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(about))
    refused("lacks a part of a")
    about = pickle.loads(metadata)
    next(iter(about.storage_data.values())).relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(about))
    refused("outside its folder")
    (tmp_path / ".metadata").write_bytes(metadata[:40])
    refused("cannot be read")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused("is not metadata")


def test_a_class_that_is_run_as_it_is_reads_no_such_folder(tmp_path: Path) -> None:
    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16
        )
    )
    save(dict(model.state_dict()), tmp_path, model)
    with pytest.raises(WorkloadError, match="convert them to safetensors"):
        begun(tmp_path)


def test_weights_of_a_folder_without_a_configuration_keep_their_names(tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path)
    assert Weights(str(tmp_path)).names == ["x"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert Weights(str(tmp_path)).names == ["x"]
