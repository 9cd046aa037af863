"""Which file of a folder holds its weights: that which transformers reads, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from workloads.errors import WorkloadError
from workloads.hf.files.weight_files import Weights
from workloads.hf.files.weight_names import INDEX, SINGLE, check_none_unread, has_weights
from workloads.load import load
from workloads.workload import Vocabulary

CONFIG = transformers.LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
NAME = "model.layers.0.self_attn.q_proj.weight"


def shards(folder: Path) -> None:
    """A checkpoint in several files."""
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(folder, max_shard_size="40KB")


def whole(folder: Path) -> None:
    """A checkpoint in one file, which leaves the index of an earlier one where it is."""
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(folder)


def shards_and_whole(folder: Path) -> None:
    """An index whose shards are still there, beside a newer file."""
    shards(folder / "old")
    whole(folder)
    for path in (folder / "old").glob("model*"):
        path.rename(folder / path.name)


def whole_after_shards(folder: Path) -> None:
    """What transformers leaves of two saves: an index whose shards are gone."""
    shards(folder)
    whole(folder)
    assert (folder / INDEX).exists(), "transformers leaves the index no more"


def an_index_that_lacks_names(folder: Path) -> None:
    """A tensor of a shard is missing in the index, and another shard has an older copy of one."""
    shards(folder)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][NAME]
    (folder / INDEX).write_text(json.dumps(index))
    last = sorted(set(index["weight_map"].values()))[-1]
    name = "model.embed_tokens.weight"
    save_file(load_file(folder / last) | {name: torch.ones(97, 32)}, folder / last, metadata={"format": "pt"})


def a_file_that_the_configuration_names(folder: Path) -> None:
    """Weights under a name that config.json says, beside others."""
    whole(folder)
    (folder / SINGLE).rename(folder / "newest.safetensors")
    whole(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "newest.safetensors"}))


@pytest.mark.contract
@pytest.mark.parametrize(
    "write",
    [whole, shards, shards_and_whole, whole_after_shards, an_index_that_lacks_names,
     a_file_that_the_configuration_names],
    ids=lambda write: write.__name__,
)  # fmt: skip
def test_the_weights_are_those_that_transformers_loads(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    check_none_unread(str(tmp_path))
    found = Weights(str(tmp_path))
    assert set(found.names) == wanted.keys()
    assert all(torch.equal(found.read(name), tensor) for name, tensor in wanted.items())
    workload = load(f"hf:{tmp_path}", "causal_lm", Vocabulary(97, 2), sequence_length=16)
    assert torch.equal(workload.initial("layers.0.attention.query.weight", 0), wanted[NAME])


def test_a_class_that_is_run_as_it_is_begins_with_the_newer_file(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    model = transformers.GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).exists()
    workload = load(f"hf:{tmp_path}", "causal_lm", Vocabulary(97, 2), sequence_length=16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(workload.initial(f"network.{name}", 0), tensor)


@pytest.mark.parametrize(
    "name",
    ["model.fp16.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors", "weights.gguf",
     "consolidated.00.pth", "tf_model.h5", "flax_model.msgpack", "shard-00001-model-00001-of-00002.safetensors"],
)  # fmt: skip
def test_weights_under_another_name_are_not_passed_over(name: str, tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    check_none_unread(str(tmp_path))
    assert not has_weights(str(tmp_path))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(WorkloadError, match="which is not read here; load the folder with transformers"):
        check_none_unread(str(tmp_path))


def test_files_of_distributed_training_come_first_in_transformers_and_are_refused(tmp_path: Path) -> None:
    whole(tmp_path)
    save_file({NAME: torch.ones(32, 32)}, tmp_path / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(WorkloadError, match=r"shard-00000-model-00001-of-00001\.safetensors, which is not"):
        check_none_unread(str(tmp_path))


@pytest.mark.parametrize("named", ["../model.safetensors", "model.bin", 3])
def test_a_configuration_that_names_no_weights_in_its_folder_is_refused(
    named: object, tmp_path: Path
) -> None:
    whole(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    with pytest.raises(WorkloadError, match="is not a file of safetensors in this folder"):
        has_weights(str(tmp_path))
