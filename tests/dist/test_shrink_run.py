"""Runs that begin as a part of a larger model: chosen once, the same under any layout, exported really smaller."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from base_run import STEPS, document, run_base
from jobs import curve, rows, weights, write_text
from local_chain import drive_chain_here
from local_run import LocalGang, drive_here
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from orchestrator.chain.preflight import check_chain
from orchestrator.chain.stage_run import stage_runs
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.chain import parse_chain
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.export.hugging_face import export
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.job_checks import check_job
from orchestrator.storage.run_directory import RunDir

ROWS = 512
SMALL = {"layers": 2, "intermediate": 32, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of four layers with eight heads, two of which share a key."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def shrunk(text: str, base: str, changes: dict[str, Any] = SMALL, **shrink: Any) -> dict[str, Any]:
    found = document(text, model=f"hf:{base}", changes=changes, shrink=shrink)
    found["checkpoint"]["every"] = 1
    found["checkpoint"]["keep"] = STEPS
    return found


@pytest.fixture(scope="module")
def run(text: str, llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two workers, by the gradient of 16 samples."""
    folder = tmp_path_factory.mktemp("runs") / "quiet"
    asked = shrunk(text, llama, importance="gradient", samples=16, layers=[0, 3])
    drive_here(asked, str(folder), Path(text).parent / "cache")
    return folder


def test_the_choice_is_made_once_and_a_kill_changes_no_bit(
    run: Path, text: str, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    asked = shrunk(text, llama, importance="gradient", samples=16, layers=[0, 3])
    found = json.loads((run / "shrink.json").read_text())
    assert found["kept"]["layers"] == {"": [0, 3]}
    assert {name: len(each) for name, each in found["kept"]["columns"].items()} == {
        "layers.0.feedforward": 32,
        "layers.3.feedforward": 32,
    }
    assert {len(each) for each in found["kept"]["groups"].values()} == {2}
    assert {len(each) for each in found["scores"].values()} == {4, 48}
    drive_here(
        asked, str(tmp_path / "killed"), Path(text).parent / "cache", faults=("kill@1:1", "kill@0:3/2")
    )
    assert json.loads((tmp_path / "killed" / "shrink.json").read_text()) == found
    assert curve(tmp_path / "killed") == curve(run)
    assert weights(tmp_path / "killed", STEPS) == weights(run, STEPS)


def test_what_is_written_is_what_every_attempt_begins_with(
    run: Path, text: str, llama: str, tmp_path: Path
) -> None:
    """Another choice in the file is another model, so that the file counts, on one worker as on two."""
    asked = shrunk(text, llama, importance="gradient", samples=16, layers=[0, 3])
    found = json.loads((run / "shrink.json").read_text())
    found["kept"]["groups"] = {name: [0, 1] for name in found["kept"]["groups"]}
    found["kept"]["columns"] = {name: [*range(16, 48)] for name in found["kept"]["columns"]}
    losses = []
    for room in (1, 2):
        place = tmp_path / str(room)
        place.mkdir()
        (place / "events.jsonl").touch()
        (place / "shrink.json").write_text(json.dumps(found))
        drive_here(asked, str(place), Path(text).parent / "cache", gang=lambda room=room: LocalGang([room]))
        losses.append(rows(place)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(rows(run)[0]["loss"], rel=1e-4)


def by_hand(base: str, kept: dict[str, Any]) -> LlamaForCausalLM:
    """The part of the base, cut out of transformers' own class."""
    large = LlamaForCausalLM.from_pretrained(base)
    config = LlamaConfig.from_pretrained(base)
    config.num_hidden_layers, config.intermediate_size = 2, 32
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    small = LlamaForCausalLM(config)
    state = large.state_dict()
    for name, tensor in small.state_dict().items():
        if ".layers." not in name:
            tensor.copy_(state[name])
            continue
        number = int(name.split(".")[2])
        old = kept["layers"][""][number]
        source = state[name.replace(f"layers.{number}.", f"layers.{old}.")]
        columns = kept["columns"][f"layers.{old}.feedforward"]
        groups = kept["groups"][f"layers.{old}.attention"]
        keys = [g * 8 + d for g in groups for d in range(8)]
        queries = [g * 16 + d for g in groups for d in range(16)]
        if "gate_proj" in name or "up_proj" in name:
            source = source[columns]
        elif "down_proj" in name:
            source = source[:, columns]
        elif "q_proj" in name:
            source = source[queries]
        elif "k_proj" in name or "v_proj" in name:
            source = source[keys]
        elif "o_proj" in name:
            source = source[:, queries]
        tensor.copy_(source)
    return small.eval()


def test_the_model_before_the_first_step_is_the_part_cut_by_hand_and_its_export_is_small(
    run: Path, text: str, llama: str, tmp_path: Path
) -> None:
    """With a learning rate of nearly nothing the export is the model that the run began with."""
    asked = shrunk(text, llama, importance="gradient", samples=16, layers=[0, 3])
    asked["train"] |= {"steps": 1, "optimizer": {"lr": 1e-12}}
    drive_here(asked, str(tmp_path / "run"), Path(text).parent / "cache")
    found = export(str(tmp_path / "run"), 1, str(tmp_path / "export"))
    assert found["logits_difference"] < 1e-5
    kept = json.loads((tmp_path / "run" / "shrink.json").read_text())["kept"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert (config.num_hidden_layers, config.intermediate_size, config.head_dim) == (2, 32, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    tokens = torch.randint(0, ROWS, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, by_hand(llama, kept)(tokens).logits, rtol=1e-5, atol=1e-5
        )
    sizes = [(Path(folder) / "model.safetensors").stat().st_size for folder in (tmp_path / "export", llama)]
    assert sizes[0] < 0.7 * sizes[1]


def test_a_part_of_a_run_trains_on_from_its_weights(text: str, tmp_path: Path) -> None:
    """By magnitude, from a commit of a run with more layers and columns; its own commits need the base no more."""
    base = run_base(text, tmp_path)
    asked = document(text, init_from=str(base), shrink={"layers": "first"})
    asked["workload"]["changes"] = asked["workload"]["changes"] | {"layers": 1, "intermediate": 48}
    drive_here(asked, str(tmp_path / "part"), Path(text).parent / "cache")
    assert rows(tmp_path / "part")[0]["loss"] < rows(base)[0]["loss"] - 0.05
    shutil.rmtree(base)
    (tmp_path / "part" / "summary.json").unlink()
    store = Store(str(tmp_path / "part" / "checkpoints"))
    shutil.rmtree(tmp_path / "part" / "checkpoints" / f"step-{STEPS:08d}")
    (tmp_path / "part" / "checkpoints" / "LATEST").unlink(missing_ok=True)
    assert store.steps() == [3]
    drive_here(asked, str(tmp_path / "part"), Path(text).parent / "cache")
    assert store.steps()[-1] == STEPS


@pytest.mark.parametrize(
    ("changes", "shrink", "words"),
    [
        ({"layers": 2}, {"layers": [0, 1, 2]}, "are not 2 ascending numbers below 4"),
        ({}, {}, "as large as its base"),
        ({"heads": 4, "kv_heads": 4}, {}, "2 times kv_heads"),
    ],
)
def test_what_is_no_part_of_the_base_is_told_before_training(
    text: str, llama: str, tmp_path: Path, changes: dict[str, Any], shrink: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_begins(check_job(parse(shrunk(text, llama, changes, **shrink))), RunDir(str(tmp_path / "run")))


def chain(text: str, layers: list[int]) -> dict[str, Any]:
    """A base, a part of it that prunes its weights, and a stage that holds the zeros."""
    base = document(text)
    base |= {"name": "compress"}
    changes = base["workload"]["changes"]
    shrunk = {"init_from": "stage:large", "changes": changes | {"layers": 1}, "shrink": {"layers": layers}}
    small = {
        "name": "small",
        "workload": shrunk,
        "prune": {"sparsity": 0.5, "steps": [2, 4], "choose_every": 1},
    }
    held = {"init_from": "stage:small", "changes": changes | {"layers": 1}}
    last = {"name": "held", "workload": held, "prune": {"keep": True}}
    return base | {"stages": [{"name": "large"}, small, last]}


@pytest.mark.slow
def test_a_chain_makes_a_model_smaller_and_sparse(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    cache = Path(text).parent / "cache"
    ended = drive_chain_here(
        chain(text, [1]), tmp_path / "chain", cache, monkeypatch, {"small": ("kill@0:1", "kill@0:4/2")}
    )
    assert (ended.outcome, ended.line) == (Outcome.DONE, "")
    assert rows(tmp_path / "chain" / "small")[-1]["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert rows(tmp_path / "chain" / "held")[-1]["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert json.loads((tmp_path / "chain" / "small" / "shrink.json").read_text())["kept"]["layers"] == {
        "": [1]
    }


def test_a_chain_is_refused_before_its_first_stage_if_one_is_no_part_of_its_base(
    text: str, tmp_path: Path
) -> None:
    for layers, words in (([2], "ascending numbers below 2"), ([1], "")):
        asked = chain(text, layers)
        asked["data"]["cache"] = str(Path(text).parent / "cache")
        found = parse_chain(asked)
        place = RunDir(str(tmp_path / "chain"))
        with pytest.raises(InputError, match=words) if words else contextlib.nullcontext():
            check_chain(found, stage_runs(found, place), place, None)


def test_a_class_whose_heads_divide_its_width_is_not_exported_with_fewer(text: str) -> None:
    asked = document(text, model="gpt-tiny", changes={"hidden": 32, "layers": 2, "heads": 2, "head_dim": 8})
    asked["checkpoint"]["export"] = "hf"
    with pytest.raises(InputError, match=r"checkpoint\.export"):
        check_job(parse(asked))
