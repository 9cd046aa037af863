"""The examples with images: CLIP and a masked autoencoder, the same under every layout and through kills, as
transformers reads them in the end.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_run import LocalGang, drive_here
from PIL import Image

from orchestrator import load_run
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.document import read_document
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.export.hugging_face import export
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.preflight import preflight
from orchestrator.resolve.prepared_data import prepared_before
from orchestrator.storage.run_directory import RunDir

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images, where the examples look for them."""
    found = importlib.util.spec_from_file_location("digits", EXAMPLES / "digits.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("images") / "digits"
    module.main(str(folder))
    return folder


def job(name: str, digits: Path, steps: int | None = 6, **changes: Any) -> dict[str, Any]:
    """The example; with `steps` a short one."""
    found: dict[str, Any] = read_document(EXAMPLES / name)
    found["data"]["samples"]["options"]["uri"] = str(digits)
    found["data"]["cache"] = str(digits.parent / "cache")
    found["checkpoint"]["export"] = None
    if steps is not None:
        found["train"] |= {"steps": steps, "global_batch": 16}
        found["train"]["optimizer"] |= {"eps": 1e-4, "warmup": 2}
        found["data"]["validation"]["share"] = 0.02
        found["evaluate"]["every"] = found["checkpoint"]["every"] = steps // 2
    found["resources"]["workers"] = {"min": 1, "max": changes.pop("workers", 1)}
    return {**found, **changes}


def run(document: dict[str, Any], folder: Path, faults: tuple[str, ...] = ()) -> tuple[Any, list[Any]]:
    """The summary of a run, and its rows."""
    workers = document["resources"]["workers"]["max"]
    cache = Path(document["data"]["cache"])
    summary = drive_here(document, str(folder), cache, gang=lambda: LocalGang([workers]), faults=faults)
    return summary, list(RunDir(str(folder)).rows("metrics.jsonl"))


def last(folder: Path) -> CommitManifest:
    """The last commit."""
    store = Store(str(folder / "checkpoints"))
    return store.manifest(store.steps()[-1])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model of the last commit."""
    manifest = last(folder)
    reader = Store(str(folder / "checkpoints")).reader(manifest)
    return {name: reader.read(name) for name in manifest.tensors if name.startswith("model.")}


def same(one: tuple[Any, list[Any]], two: tuple[Any, list[Any]]) -> None:
    """Both runs have the same samples, losses and evaluations."""
    assert [row["samples"] for row in one[1]] == [row["samples"] for row in two[1]]
    for ours, theirs in zip(one[1], two[1], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    first, second = (found[0]["evaluation"]["sets"]["validation"] for found in (one, two))
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
def test_a_small_clip_learns_the_digits_and_leaves(digits: Path, tmp_path: Path) -> None:
    document = job("digits.yaml", digits, None)
    document["train"]["steps"] = 150  # half of them, for the time that it takes
    leaves = {**document, "checkpoint": {**document["checkpoint"], "export": "hf"}}
    preflight(parse(leaves), RunDir(str(tmp_path / "run")), None, None)
    summary, _ = run(document, tmp_path / "run")
    assert summary["state"] == "done"
    assert summary["evaluation"]["sets"]["validation"]["zero_shot"] > 0.8  # chance is 0.1

    found = export(str(tmp_path / "run"), 150, str(tmp_path / "export"))
    assert found["logits_difference"] < 1e-5
    from transformers import CLIPModel, CLIPProcessor

    theirs: Any = CLIPModel.from_pretrained(tmp_path / "export").eval()
    ours: Any = load_run(tmp_path / "run").model()
    processor = CLIPProcessor.from_pretrained(tmp_path / "export")
    files = [sorted((digits / name).iterdir())[0] for name in ("seven", "two", "nine")]
    read = processor(
        text=[f"a photo of the number {path.parent.name}" for path in files],
        images=[Image.open(path) for path in files],
        padding="max_length",
        return_tensors="pt",
    )
    with torch.no_grad():
        found = theirs(**read).logits_per_image
        texts = ours.text_embeddings(read["input_ids"]).T
        expected = ours.image_embeddings(read["pixel_values"]) @ texts * ours.logit_scale.exp()
    assert float((found - expected).abs().max()) < 1e-5
    assert found.argmax(1).tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def alone(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any], Path]:
    """One process that has the global batch in one piece."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return *run(job("digits.yaml", digits, parallel={"micro_batch": 16}), folder), folder


@pytest.mark.parametrize(
    ("workers", "parallel"),
    [
        pytest.param(1, {"micro_batch": 4}, marks=pytest.mark.slow),
        pytest.param(2, {"micro_batch": 8}, marks=pytest.mark.slow),
        pytest.param(2, {"zero": 1, "micro_batch": 4}, marks=pytest.mark.slow),
        (2, {"zero": 2, "micro_batch": 2, "recompute": "full"}),
        pytest.param(2, {"zero": 3, "micro_batch": 8}, marks=pytest.mark.slow),
        pytest.param(4, {"zero": 3, "micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"micro_batch": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_global_batch_is_compared_under_every_layout(
    digits: Path, tmp_path: Path, alone: Any, workers: int, parallel: dict[str, Any]
) -> None:
    found = run(job("digits.yaml", digits, workers=workers, parallel=parallel), tmp_path / "run")
    same((alone[0], alone[1]), found)
    one, two = weights(alone[2]), weights(tmp_path / "run")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.slow
def test_kills_change_no_bit_of_a_contrastive_run(digits: Path, tmp_path: Path) -> None:
    document = job("digits.yaml", digits, workers=2, parallel={"zero": 2, "micro_batch": 4})
    run(document, tmp_path / "quiet")
    summary, _ = run(document, tmp_path / "killed", ("kill@1:5",))
    assert len(summary["faults"]) == 1
    one, two = weights(tmp_path / "quiet"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_bitwise_has_the_same_bits_at_every_width(digits: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        document = job("digits.yaml", digits, workers=workers)
        document["train"]["determinism"] = "bitwise"
        run(document, tmp_path / str(workers))
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_near_and_a_kill_changes_no_bit(
    digits: Path, tmp_path: Path, alone: Any, precision: str
) -> None:
    document = job("digits.yaml", digits, workers=2, parallel={"zero": 1, "micro_batch": 2})
    document["train"]["precision"] = precision
    quiet = run(document, tmp_path / "quiet")
    for ours, theirs in zip(quiet[1], alone[1], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
    run(document, tmp_path / "killed", ("kill@1:5",))
    one, two = weights(tmp_path / "quiet"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_an_adapter_over_an_export_is_trained_alike_and_merged(
    digits: Path, tmp_path: Path, alone: Any
) -> None:
    export(str(alone[2]), 6, str(tmp_path / "base"))
    document = job("digits.yaml", digits)
    adapter = {"kind": "lora", "rank": 4, "targets": "*q_proj"}
    document["workload"] |= {"init_from": str(tmp_path / "base"), "adapter": adapter}
    one = run(document, tmp_path / "one")
    wide = {"resources": {**document["resources"], "workers": {"min": 1, "max": 2}}}
    same(one, run(document | wide | {"parallel": {"zero": 3, "micro_batch": 2}}, tmp_path / "two"))
    assert export(str(tmp_path / "one"), 6, str(tmp_path / "merged"))["logits_difference"] < 1e-5


@pytest.mark.slow
def test_a_masked_autoencoder_is_trained_alike_by_two_and_leaves(digits: Path, tmp_path: Path) -> None:
    document = job("digits_mae.yaml", digits)
    preflight(parse(document), RunDir(str(tmp_path / "one")), None, None)
    one = run(document, tmp_path / "one")
    gone = job("digits_mae.yaml", digits)
    gone["data"]["samples"]["options"]["uri"] = str(tmp_path / "gone")
    spec = parse(gone)  # what a run has prepared it goes on with, though the images are gone
    assert check_job(
        spec, prepared_before(spec.data, RunDir(str(tmp_path / "one")), last(tmp_path / "one"))
    ).spec
    two = run(
        job("digits_mae.yaml", digits, workers=2, parallel={"zero": 2, "micro_batch": 4}), tmp_path / "two"
    )
    same(one, two)
    assert one[1][-1]["loss"] < one[1][0]["loss"]
    export(str(tmp_path / "one"), 6, str(tmp_path / "export"))
    from transformers import ViTMAEForPreTraining

    theirs: Any = ViTMAEForPreTraining.from_pretrained(tmp_path / "export").eval()
    ours: Any = load_run(tmp_path / "one").model()
    pixels, noise = torch.randn(3, 1, 8, 8), torch.rand(3, 16)
    with torch.no_grad():
        found, expected = (
            theirs(pixel_values=pixels, noise=noise).loss,
            ours.loss({"pixels": pixels, "noise": noise}),
        )
    assert found.item() == pytest.approx(expected.mean().item(), abs=1e-5)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "vit_mae"


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_other_layouts_are_refused_in_one_line(
    digits: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    document = job("digits.yaml", digits, workers=2, parallel=parallel)
    with pytest.raises(InputError) as error:
        preflight(parse(document), RunDir(str(tmp_path / "run")), None, None)
    assert "\n" not in str(error.value)
    assert "an own model that declares neither" in str(error.value)
