"""What the model says after prompts at every evaluation: the same under any layout, and training unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import InputError
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.evaluate.samples import continue_prompts
from orchestrator.export.hugging_face import export
from orchestrator.resolve.prepared_data import data_of
from orchestrator.resolve.training_inputs import workload_of
from orchestrator.storage.run_directory import RunDir
from workloads.workload import Sampling

PROMPTS = ["The ", "an object of class", "if"]
MODELS = {
    "gpt": {"model": "gpt-tiny", "changes": {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}},
    "mixtral": {"model": "mixtral-tiny"},
    "t5": {"model": "t5-tiny", "objective": "span_corruption"},
}
SWITCH = {"model": "switch-tiny", "objective": "span_corruption"}
TOKENS = 8
DRAWN = {"t5": {"temperature": 1.0, "seed": 5}}
"""One that has hardly begun to train says nothing, most likely."""


def sampled(text: str, model: str = "gpt", **samples: Any) -> dict[str, Any]:
    document = job(text)
    document["workload"] = MODELS[model]
    document["train"] |= {"steps": 6, "optimizer": {"lr": 3e-3, "eps": 1e-4}}
    document["checkpoint"] |= {"every": 3}
    asked = {"prompts": PROMPTS, "tokens": TOKENS, **DRAWN.get(model, {}), **samples}
    return document | {"evaluate": {"every": 3, "at_start": True, "samples": asked}}


def said(run: Path) -> dict[int, list[str]]:
    """The texts of each evaluation, by its step."""
    found = {}
    for row in rows(run, "evals.jsonl"):
        assert row["sets"] == {}
        assert [sample["prompt"] for sample in row["samples"]] == PROMPTS
        found[row["step"]] = [sample["text"] for sample in row["samples"]]
    return found


def of_commit(run: Path, step: int, **sampling: Any) -> list[str]:
    """What the generator with a cache says for a commit."""
    place = RunDir(str(run))
    spec, store = read_job(place), Store(place.at("checkpoints"))
    assert spec is not None
    commit = store.manifest(step)
    data, reader = data_of(place, commit.meta["data"]), store.reader(commit)
    return continue_prompts(
        workload_of(spec.workload, spec.data, spec.train, spec.seed, data),
        lambda name: reader.read(f"model.{name}"),
        data.tokenizer(),
        PROMPTS,
        TOKENS,
        Sampling(**sampling),
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 60_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(text: str, folder: Path) -> Callable[[str], Path]:
    """The run of a model on one worker, trained when it is first asked for."""

    @cache
    def run_of(model: str) -> Path:
        drive_here(sampled(text, model), str(folder / model), folder / "cache", gang=lambda: LocalGang([1]))
        return folder / model

    return run_of


@pytest.mark.parametrize("model", ["gpt", "t5", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_it_is_what_the_generator_says_token_for_token(alone: Callable[[str], Path], model: str) -> None:
    found = said(alone(model))
    assert list(found) == [0, 3, 6]
    again = {step: of_commit(alone(model), step, **DRAWN.get(model, {})) for step in (3, 6)}
    assert again == {step: found[step] for step in (3, 6)}
    assert found[0] != found[6]


def test_the_sample_of_an_export_continues_the_first_prompt(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    sample = export(str(alone("gpt")), 6, str(tmp_path / "model"))["sample"]
    assert sample.startswith(PROMPTS[0] + said(alone("gpt"))[6][0])


def test_training_does_not_notice(
    alone: Callable[[str], Path], text: str, folder: Path, tmp_path: Path
) -> None:
    document = sampled(text)
    del document["evaluate"]
    drive_here(document, str(tmp_path / "run"), folder / "cache", gang=lambda: LocalGang([1]))
    assert curve(tmp_path / "run") == curve(alone("gpt"))
    assert weights(tmp_path / "run", 6) == weights(alone("gpt"), 6)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("gpt", {"zero": 3, "micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param("gpt", {"tp": 2, "sequence": True}, marks=pytest.mark.slow),
        ("gpt", {"pp": 2, "micro_batch": 4}),
        pytest.param("gpt", {"cp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt", {"engine": "deepspeed", "zero": 3, "micro_batch": 4}, marks=pytest.mark.slow),
        pytest.param("gpt", {"zero": 2, "micro_batch": 1}, marks=pytest.mark.slow),
        ("mixtral", {"ep": 2, "micro_batch": 2}),
        pytest.param("mixtral", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("t5", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("t5", {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_says_the_same(
    model: str,
    parallel: dict[str, Any],
    alone: Callable[[str], Path],
    text: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    drive_here(sampled(text, model) | {"parallel": parallel}, str(tmp_path / "run"), folder / "cache")
    assert said(tmp_path / "run") == said(alone(model))


@pytest.mark.slow
def test_experts_of_an_encoder_decoder_say_the_same_wherever_they_are(
    text: str, folder: Path, tmp_path: Path
) -> None:
    """What fills up a rank's micro-batch takes no room from the prompts."""
    found = []
    for number, parallel in enumerate(({"micro_batch": 1}, {"micro_batch": 4}, {"ep": 2, "micro_batch": 2})):
        document = sampled(text, temperature=1.0) | {"workload": SWITCH, "parallel": parallel}
        workers = 2 if "ep" in parallel else 1
        drive_here(
            document, str(tmp_path / str(number)), folder / "cache", gang=lambda n=workers: LocalGang([n])
        )
        found.append(said(tmp_path / str(number)))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_class_run_as_it_is_says_what_its_own_generate_does(
    text: str, folder: Path, tmp_path: Path
) -> None:
    from transformers import GPTNeoXConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = GPTNeoXConfig(vocab_size=512, max_position_embeddings=64, **sizes)
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(tmp_path / "neox")
    document = sampled(text) | {"workload": {"model": f"hf:{tmp_path / 'neox'}"}}
    document["parallel"] = {"zero": 3, "micro_batch": 2}
    drive_here(document, str(tmp_path / "run"), folder / "cache")
    found = said(tmp_path / "run")
    assert {step: of_commit(tmp_path / "run", step) for step in (3, 6)} == {s: found[s] for s in (3, 6)}


@pytest.mark.slow
def test_what_is_drawn_is_drawn_alike_and_through_faults(text: str, folder: Path, tmp_path: Path) -> None:
    """Killed within the samples of step 3, and with an average of the weights: what is said is by that."""
    document = sampled(text, temperature=0.8, seed=5)
    document["checkpoint"]["average"] = {"ema": 0.5}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    drive_here(document, str(quiet), folder / "cache", gang=lambda: LocalGang([1]))
    drive_here(document, str(killed), folder / "cache", gang=lambda: LocalGang([1]), faults=("kill@0:3e",))
    assert said(killed) == said(quiet)
    assert max(row["attempt"] for row in rows(killed)) == 2
    place = RunDir(str(quiet))
    spec, commit = read_job(place), Store(place.at("checkpoints")).manifest(6)
    assert spec is not None
    row = evaluate_commit(spec, place, commit, {})
    assert [sample["text"] for sample in row["samples"]] == said(quiet)[6]
    raw = evaluate_commit(spec, place, commit, {}, raw=True)
    assert [sample["text"] for sample in raw["samples"]] == of_commit(quiet, 6, temperature=0.8, seed=5)


def test_prompts_without_room_are_refused_before_anything_starts(
    text: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"prompt 1 has \d+ tokens; with 30 generated tokens .* lower tokens"
    ):
        drive_here(sampled(text, tokens=30), str(tmp_path / "run"), folder / "cache")
