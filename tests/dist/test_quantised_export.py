"""A run's quantised exports: transformers, llama.cpp's reader and onnxruntime compute what our model with fake
quantisation does, and the run that trained for them has the integers that training used."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
import yaml
from jobs import job, write_text
from local_run import LocalGang, drive_here
from safetensors.torch import load_file

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.evaluate.of_export import spec_of_export
from orchestrator.evaluate.on_tasks import subject_of_export
from orchestrator.export.converted import Conversion, form_option
from orchestrator.export.hugging_face import batches, export
from orchestrator.export.quantised import scheme_option
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.trial_values import bytes_of, parameters_of
from workloads.hf.check.compare import load
from workloads.inference import with_weights
from workloads.model.fake_quantise import fake_quantised
from workloads.model.scheme import Scheme

STEPS = 3
SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
QUANTIZE = {"weights": "int4", "group": 32, "from_step": 1, "keep": ["layers.0.attention.query.*"]}


def document(text: str, **fields: Any) -> dict[str, Any]:
    found = job(text, steps=STEPS, optimizer={"lr": 3e-3, "warmup": 0})
    found["workload"] = {"model": "llama-tiny", "changes": SMALL}
    found["data"]["validation"] = {"share": 0.1}
    found["evaluate"] = {"every": STEPS}
    return found | fields


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def run_of(text: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run that trains for int4 on two ranks, one for q4_0, and an encoder in full precision (bert), each trained when
    it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    encoder = document(text)
    encoder["workload"] = {"model": "bert-tiny", "changes": SMALL | {"kv_heads": 4}, "objective": "masked_lm"}
    two = {"parallel": {"tp": 2, "micro_batch": 2}}
    jobs = {
        "int4": (document(text, quantize=QUANTIZE, **two), 2),
        "q4_0": (document(text, quantize={"weights": "q4_0"}), 1),
        "bert": (encoder, 1),
    }

    @cache
    def trained(name: str) -> Path:
        asked, ranks = jobs[name]
        drive_here(asked, str(folder / name), folder / "cache", gang=lambda: LocalGang([ranks]))
        return folder / name

    return trained


def latent(run: Path, name: str) -> torch.Tensor:
    """A weight of a run in full precision."""
    store = Store(RunDir(str(run)).commits)
    return store.reader(store.manifest(STEPS)).read(f"model.{name}")


def facts(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "export.json").read_text())
    return found


def test_a_run_that_trained_for_int4_is_loaded_by_transformers(
    run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Asked for in axolotl#3394 and llm-compressor#2509."""
    told = export(str(run_of("int4")), STEPS, str(tmp_path / "out"))
    assert told["logits_difference"] < 1e-5
    assert told["rounding"] > 1e-3
    about = facts(tmp_path / "out")
    assert about["quantized"]["weights"] == "int4"
    assert about["quantized"]["trained"] is True
    assert about["quantized"]["kept"] == ["lm_head", "model.layers.0.self_attn.q_proj"]
    assert about["versions"].keys() == {"compressed-tensors", "transformers", "torch"}
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert bytes_of(RunDir(str(run_of("int4")))) == sum(each.nbytes for each in stored.values()), (
        "as tune counts"
    )
    model = load(str(tmp_path / "out"))
    model(torch.zeros(1, 1, dtype=torch.long))  # decompresses
    scheme = Scheme("int4", 32)
    for ours, theirs in (("feedforward.down", "mlp.down_proj"), ("attention.value", "self_attn.v_proj")):
        assert stored[f"model.layers.1.{theirs}.weight_packed"].dtype is torch.int32
        whole = latent(run_of("int4"), f"layers.1.{ours}.weight")
        found = model.get_submodule(f"model.layers.1.{theirs}").weight
        assert torch.equal(found, fake_quantised(whole, scheme))


@pytest.mark.slow
def test_the_run_is_evaluated_as_it_was_trained(run_of: Callable[[str], Path]) -> None:
    """Not with the weights in full precision, nor those of a job without the key."""
    run = RunDir(str(run_of("int4")))
    spec = parse(yaml.safe_load((run_of("int4") / "job.yaml").read_text()))
    commit = Store(run.commits).manifest(STEPS)
    row = evaluate_commit(spec, run, commit, {})
    (trained,) = map(json.loads, (run_of("int4") / "evals.jsonl").read_text().splitlines())
    found = row["sets"]["validation"]["loss"]
    assert found == pytest.approx(trained["sets"]["validation"]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "group"),
    [(("int8", None, None), 128), (("int4", "16", None), 16), (("int8", "row", "dynamic"), 0)],
)
def test_any_run_is_quantised_by_rounding_alone(
    options: tuple[str, str | None, str | None], group: int, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    if group == 128:
        with pytest.raises(InputError, match="rows of 64, which is not a multiple of the group of 128"):
            export(str(run_of("bert")), STEPS, str(tmp_path / "out"), form=asked(*options))
        options = ("int8", "32", None)
    told = export(str(run_of("bert")), STEPS, str(tmp_path / "out"), form=asked(*options))
    assert told["logits_difference"] < 1e-5
    assert facts(tmp_path / "out")["quantized"]["trained"] is False
    run = RunDir(str(run_of("bert")))
    assert bytes_of(run) == 4 * parameters_of(run)


def asked(quantize: str | None, group: str | None = None, activations: str | None = None) -> Any:
    return form_option("hf", None, None, scheme_option("hf", quantize, group, activations))


def test_full_precision_is_asked_for(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    told = export(str(run_of("int4")), STEPS, str(tmp_path / "out"), form=asked("none"))
    assert "quantized" not in told
    with pytest.raises(
        InputError,
        match="quantize trains weights for int4 with a scale for each 32, which gguf does not store",
    ):
        export(str(run_of("int4")), STEPS, str(tmp_path / "other"), form=Conversion("gguf"))


@pytest.mark.slow
def test_a_run_that_trained_for_q4_0_has_its_numbers_in_the_file(
    run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    told = export(str(run_of("q4_0")), STEPS, str(tmp_path / "out"))
    assert told["quantized"]["kept"] == ["output.weight", "token_embd.weight"]
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    sizes = [
        each.n_bytes if each.tensor_type.name == "Q4_0" else 4 * each.n_elements for each in tensors.values()
    ]
    assert bytes_of(RunDir(str(run_of("q4_0")))) == sum(sizes), "as tune counts, others in fp32"
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == "Q4_0"
    wanted = fake_quantised(latent(run_of("q4_0"), "layers.1.feedforward.down.weight"), Scheme("q4_0", 32))
    assert np.array_equal(gguf.quants.dequantize(found.data, found.tensor_type), wanted.numpy())


def test_any_run_goes_to_q4_0(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    told = export(
        str(run_of("int4")),
        STEPS,
        str(tmp_path / "out"),
        form=Conversion("gguf", numbers="q4_0", scheme="none"),
    )
    kinds = {
        each.name: each.tensor_type.name
        for each in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
        if len(each.shape) > 1
    }
    assert {kinds["token_embd.weight"], kinds["output.weight"]} == {"Q8_0"}
    assert {kinds[name] for name in kinds if name.startswith("blk")} == {"Q4_0"}
    assert 0 < told["rounding"] < 0.5


@pytest.mark.parametrize("activations", [None, "dynamic"])
def test_a_quantised_export_is_evaluated(
    activations: str | None, run_of: Callable[[str], Path], text: str, tmp_path: Path
) -> None:
    """As the same commit with fake quantisation is."""
    target = str(tmp_path / "out")
    export(str(run_of("bert")), STEPS, target, form=asked("int8", "row", activations))
    subject = subject_of_export(target)
    spec = parse(yaml.safe_load((run_of("bert") / "job.yaml").read_text()))
    found = model_of_run(RunDir(str(run_of("bert"))).uri, STEPS)
    scheme = Scheme("int8", 0, activations == "dynamic")
    ours = with_weights(found.workload, found.read, scheme=scheme)
    batch = next(batches(spec.data, found.tokens, found.workload))
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    one, other = (model.double()(given).logits for model in (ours, subject.model))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    spec, step = spec_of_export(target, {"held": text})
    assert (spec.quantize is not None, step) == (activations == "dynamic", STEPS)


@pytest.mark.parametrize("numbers", ["int8", "int8_static"])
def test_an_encoder_goes_to_onnx_in_int8(numbers: Any, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    told = export(str(run_of("bert")), STEPS, str(tmp_path / "out"), form=Conversion("onnx", numbers=numbers))
    assert 0 < told["rounding"] < 0.1
    about = facts(tmp_path / "out")
    assert about["quantized"]["weights"] == numbers
    assert about["versions"].keys() == {"onnx", "onnxruntime", "torch"}
    assert "plain.onnx" not in about["files"]
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    wanted = latent(run_of("bert"), "layers.1.feedforward.down.weight").numpy()
    scale = abs(wanted).max(1) / 127
    integers = np.rint(wanted / scale[:, None])
    same = [each for each in stored.values() if each.dtype == np.int8 and each.shape == wanted.T.shape]
    assert any(np.abs(each.T - integers).max() <= 1 and (integers == each.T).mean() > 0.99 for each in same)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("gguf", "int8", None, None), "name the format by --numbers"),
        (("dcp", "int4", None, None), "int4 is for --form hf"),
        (("hf", None, "32", None), "is for --quantize"),
        (("hf", "int4", "many", None), "--group"),
    ],
)
def test_options_that_do_not_fit_are_told(options: tuple[Any, ...], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        scheme_option(*options)
