"""A commit in the formats of others; and what has such a format as the beginning of another run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from jobs import job, weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.config.errors import InputError
from orchestrator.export.converted import Conversion
from orchestrator.export.hugging_face import export
from workloads.hf.files.weight_files import Weights

STEPS = 2
SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}


def document(text: str) -> dict[str, Any]:
    found = job(text, steps=STEPS, optimizer={"lr": 3e-3, "warmup": 0})
    found["workload"] = {"model": "llama-tiny", "changes": SMALL}
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def llama(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Llama class on one worker, and the data cache beside it."""
    folder = tmp_path_factory.mktemp("runs")
    drive_here(document(text), str(folder / "llama"), folder / "cache", gang=lambda: LocalGang([1]))
    return folder / "llama"


@pytest.mark.slow
def test_a_run_goes_to_torchtitan_and_another_begins_with_that_by_two_tensor_parallel_ranks(
    llama: Path, text: str, tmp_path: Path
) -> None:
    target = tmp_path / "titan"
    told = export(str(llama), STEPS, str(target), form=Conversion("dcp", "torchtitan"))
    assert told["logits_difference"] < 1e-5
    about = dcp.FileSystemReader(target).read_metadata().state_dict_metadata
    assert "layers.1.attention.qkv_linear.wk.weight" in about
    assert set(json.loads((target / "export.json").read_text())["files"]) == set(os.listdir(target))
    assert {"config.json", "tokenizer.json", "README.md"} <= set(os.listdir(target))
    assert not list(target.glob("*.safetensors"))
    begins = document(text)
    begins["workload"]["init_from"] = str(target)
    begins["train"] |= {"steps": 1, "optimizer": {"lr": 1e-30, "weight_decay": 0.0, "warmup": 0}}
    begins["parallel"] = {"tp": 2}
    drive_here(begins, str(tmp_path / "begun"), llama.parent / "cache", gang=lambda: LocalGang([2]))
    before, after = weights(llama, STEPS), weights(tmp_path / "begun", 1)
    assert {n: before[n] for n in before if n.startswith("model.")} == {
        n: after[n] for n in after if n.startswith("model.")
    }


def test_a_run_goes_to_llama_cpp(llama: Path, tmp_path: Path) -> None:
    told = export(str(llama), STEPS, str(tmp_path / "gguf"), form=Conversion("gguf", numbers="q8_0"))
    assert 0 < told["rounding"] < 0.1
    assert set(os.listdir(tmp_path / "gguf")) == {"model.gguf", "README.md", "export.json"}
    facts = json.loads((tmp_path / "gguf" / "export.json").read_text())
    assert (facts["rounding"], facts["step"]) == (told["rounding"], STEPS)


SAVE = """
import os, sys, torch, transformers
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for layer in model.model.layers:
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    parallelize_module(layer, mesh["tp"], plan)
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
state, moments = get_state_dict(model, optimizer)
dcp.save({"model": state, "optim": moments, "step": 7}, checkpoint_id=sys.argv[2])
os._exit(0)
"""


def test_the_job_says_the_format(llama: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(llama, tmp_path / "run"))
    spec = yaml.safe_load((run / "job.yaml").read_text())
    spec["checkpoint"] |= {"export": "dcp", "export_names": "olmo"}
    (run / "job.yaml").write_text(yaml.safe_dump(spec))
    export(str(run), STEPS, str(tmp_path / "olmo"))
    about = dcp.FileSystemReader(tmp_path / "olmo").read_metadata().state_dict_metadata
    assert "model.blocks.1.attention.w_k.weight" in about


@pytest.mark.slow
def test_what_four_ranks_saved_in_two_dimensions_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    target = tmp_path / "dcp"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {
        **os.environ,
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(tmp_path / "hf"), str(target)], env=place | {"RANK": str(n)}
        )
        for n in range(4)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * 4
    config.save_pretrained(target)
    assert len(list(target.glob("*.distcp"))) == 4
    found, wanted = Weights(str(target)), model.state_dict()
    assert set(found.names) == set(wanted)
    assert all(torch.equal(found.read(name), wanted[name]) for name in wanted)
    name, part = "model.layers.1.mlp.down_proj.weight", (slice(5, 30), slice(20, 41))
    assert torch.equal(found.part(name, part), wanted[name][part])


@pytest.mark.slow
def test_an_encoder_goes_to_onnxruntime(text: str, tmp_path: Path) -> None:
    bert = job(text, steps=STEPS, optimizer={"lr": 3e-3, "warmup": 0})
    bert["workload"] = {
        "model": "bert-tiny", "changes": {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 48},
        "objective": "masked_lm",
    }  # fmt: skip
    drive_here(bert, str(tmp_path / "bert"), tmp_path / "cache", gang=lambda: LocalGang([1]))
    told = export(str(tmp_path / "bert"), STEPS, str(tmp_path / "onnx"), form=Conversion("onnx"))
    assert told["logits_difference"] < 1e-5
    assert {"model.onnx", "tokenizer.json", "config.json", "export.json"} <= set(
        os.listdir(tmp_path / "onnx")
    )
    with pytest.raises(InputError, match="GGUF export supports language models"):
        export(str(tmp_path / "bert"), STEPS, str(tmp_path / "gguf"), form=Conversion("gguf"))
    assert not (tmp_path / "gguf").exists()


def test_a_target_stays_as_it_is_where_the_format_has_no_such_names(text: str, tmp_path: Path) -> None:
    gpt = job(text, steps=1, optimizer={"lr": 1e-3})
    drive_here(gpt, str(tmp_path / "gpt"), tmp_path / "cache", gang=lambda: LocalGang([1]))
    with pytest.raises(InputError, match="names of olmo are known for"):
        export(str(tmp_path / "gpt"), 1, str(tmp_path / "out"), form=Conversion("dcp", "olmo"))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
