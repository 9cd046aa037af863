"""A run keeps the configuration of its model's folder: an edited, moved or removed folder changes nothing of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jobs import curve, job
from lasting_gang import lasting_gang
from letters import WORDS, letters, write_tokenizer
from local_run import LocalGang, controller_here
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.workers.gang import Bundle
from orchestrator import load_run
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import KEPT, read_job
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.export.hugging_face import export
from orchestrator.launch.preflight import preflight
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir

SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": 5,
}  # fmt: skip
KINDS = {
    "converted": ("auto", False),
    "converted with weights": ("auto", True),
    "as it is": ("transformers", False),
    "as it is with weights": ("transformers", True),
}
QUICK = ("converted",)
TOKENS = torch.arange(6, 22)[None]


def rotary(config: dict[str, Any]) -> None:
    """Another rotary base."""
    config["rope_parameters"]["rope_theta"] = 100.0


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "rotary base": (rotary, r"rope_parameters\.rope_theta is 10000\.0 in this run and 100\.0"),
    "activation": (lambda c: c.update(hidden_act="gelu"), r'hidden_act is "silu" in this run and "gelu"'),
    "eps": (lambda c: c.update(rms_norm_eps=0.5), r"rms_norm_eps is 1e-06 in this run and 0\.5"),
    "tie": (
        lambda c: c.update(tie_word_embeddings=True),
        r"tie_word_embeddings is false in this run and true",
    ),
    "labels": (
        lambda c: c.update(id2label={"0": "b", "1": "a"}),
        r'id2label\.0 is "LABEL_0" in this run and "b"',
    ),
}


def on_lasting_gang(
    workers: int, bundle: Bundle, entry: str, config: dict[str, Any], **_: Any
) -> tuple[list[Any], dict[str, Any]]:
    """As `run_to_the_end`, in a process that has all imports already."""
    gang, deadline = lasting_gang(), time.monotonic() + 300
    try:
        gang.start(workers, bundle, entry, config)
        while (rank := gang.poll(0).ranks[0]).state in ("starting", "running"):
            assert time.monotonic() < deadline, "the rank is not done after 300 s"
            time.sleep(0.05)
        assert rank.state == "done", rank.error
        return [], rank.result
    finally:
        gang.close()


class Made:
    """A run of a kind that was stopped at step 2 of 4, and what it gives while its folder is as it was."""

    def __init__(self, place: Path, implementation: str, has_weights: bool) -> None:
        self.place, self.folder = place, place / "base"
        self.folder.mkdir(parents=True)
        config = LlamaConfig(**SIZES)
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(self.folder) if has_weights else config.save_pretrained(
            self.folder
        )
        tokenizer = place / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer, template=False)
        text = place / "text.txt"
        text.write_text("\n<|endoftext|>\n".join(letters(number) for number in range(120)))
        document = job(str(text), steps=4, optimizer={"lr": 1e-2, "warmup": 0})
        document["workload"] = {"model": f"hf:{self.folder}", "implementation": implementation}
        document["data"] |= {"tokenizer": str(tokenizer), "sequence_length": 16, "validation": {"share": 0.1}}
        document["evaluate"] = {"every": 4, "at_end": False}
        document["resources"] = {"workers": 1}
        document["checkpoint"] = {"every": 2, "export": None}
        self.document, self.run = document, str(place / "run")
        self.drive(self.run, until=2)
        self.logits, self.loss = self.logits_of(self.run), self.evaluated()
        self.losses = self.resumed("whole")

    def drive(self, run: str, until: int | None = None) -> dict[str, Any]:
        """The run, driven on by a controller alone."""
        cache = self.place / "cache"
        return controller_here(self.document, run, cache, gang=lambda: LocalGang([1]), until=until).drive()

    def resumed(self, name: str) -> Any:
        """The losses of a copy of the run that is driven to its end."""
        copy = str(self.place / name)
        shutil.copytree(self.run, copy)
        assert self.drive(copy)["state"] == "done"
        return curve(Path(copy))

    def logits_of(self, run: str) -> torch.Tensor:
        """The logits of the commit at step 2."""
        with torch.no_grad():
            return load_run(run).model(2)(input_ids=TOKENS).logits

    def evaluated(self) -> float:
        """The loss of the commit on the held-out text."""
        place = RunDir(self.run)
        spec, commit = read_job(place), Store(place.commits).manifest(2)
        assert spec is not None
        with patch("orchestrator.evaluate.of_commit.run_to_the_end", on_lasting_gang):
            return float(evaluate_commit(spec, place, commit, {})["sets"]["validation"]["loss"])

    @contextlib.contextmanager
    def edited(self, edit: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """The folder with another configuration."""
        path = self.folder / "config.json"
        before = path.read_text()
        config = json.loads(before)
        edit(config)
        path.write_text(json.dumps(config))
        try:
            yield
        finally:
            path.write_text(before)


@pytest.fixture(
    scope="module",
    params=[kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of each kind."""
    place = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return Made(place, *KINDS[request.param])


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_configuration_changes_nothing_of_a_commit(made: Made, edit: str, tmp_path: Path) -> None:
    change, told = EDITS[edit]
    with made.edited(change):
        assert torch.equal(made.logits_of(made.run), made.logits)
        facts = export(made.run, 2, str(tmp_path / "export"))
        with pytest.raises(InputError, match=told):
            preflight(parse(made.document), RunDir(made.run), None, None)
    assert facts["logits_difference"] < 1e-4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.config.rope_parameters["rope_theta"] == 10000.0
    assert exported.config.id2label.get(0) == "LABEL_0"
    with torch.no_grad():
        assert torch.allclose(exported(input_ids=TOKENS).logits, made.logits, atol=1e-5)
    preflight(parse(made.document), RunDir(made.run), None, None)  # it was put back


def test_an_evaluation_and_a_controller_take_the_configuration_of_the_commit(made: Made) -> None:
    with made.edited(rotary):
        assert made.evaluated() == made.loss
    has_weights = (made.folder / "model.safetensors").exists()
    with made.edited(rotary):
        if has_weights:  # the digest of the base has its configuration
            with pytest.raises(InputError, match="the weights that the run started from have changed"):
                made.resumed("edited")
        else:
            assert made.resumed("edited") == made.losses


def test_a_folder_that_is_gone_is_not_needed(made: Made) -> None:
    away = made.folder.rename(made.place / "away")
    try:
        assert torch.equal(made.logits_of(made.run), made.logits)
        assert made.evaluated() == made.loss
        preflight(parse(made.document), RunDir(made.run), None, None)
        assert made.resumed("gone") == made.losses
    finally:
        away.rename(made.folder)


@pytest.mark.parametrize(
    "made", [name for name, (_, has_weights) in KINDS.items() if not has_weights], indirect=True
)
def test_a_folder_that_only_another_version_wrote_is_the_same(made: Made) -> None:
    """Without weights, for otherwise the digest of the base covers the folder's bytes."""
    assert not (made.folder / "model.safetensors").exists()
    with made.edited(lambda config: config.update(transformers_version="9.9.9", use_cache=False)):
        preflight(parse(made.document), RunDir(made.run), None, None)


def test_commits_of_an_earlier_version_are_read_with_the_folder(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.run, tmp_path / "run")
    store = Store(RunDir(str(tmp_path / "run")).commits)
    manifest = next(Path(store.uri).glob("*2/manifest.json"))
    told = store.manifest(2)
    del told.meta[KEPT]
    manifest.write_bytes(told.to_bytes())
    preflight(parse(made.document), RunDir(str(tmp_path / "run")), None, None)
    assert torch.equal(made.logits_of(str(tmp_path / "run")), made.logits)
    assert model_of_run(str(tmp_path / "run"), 2).commit.meta.get(KEPT) is None
