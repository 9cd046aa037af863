"""Quantised exports of a commit, made without a run: mixed bits, and the forms that store what a run trained for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import job, write_text
from prepared import prepare_here
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPTNeoXConfig

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.data.store.tokens import Tokens
from orchestrator.export.check import check_export
from orchestrator.export.converted import Conversion, form_option
from orchestrator.export.hugging_face import batches
from orchestrator.export.quantised import (
    BITS,
    _mixed,
    bytes_in_int4,
    hf_weights,
    resolved_form,
    scheme_option,
    with_scheme,
    write_converted,
)
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.resolve.commit_model import CommitModel
from orchestrator.resolve.training_inputs import workload_of
from workloads.errors import WorkloadError
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.scheme import Scheme
from workloads.workload import Vocabulary

SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}


def asked(
    quantize: str | None,
    group: str | None = None,
    activations: str | None = None,
    mean_bits: float | None = None,
    max_bytes: int | None = None,
) -> Any:
    scheme = scheme_option("hf", quantize, group, activations)
    return form_option("hf", None, None, scheme, mean_bits=mean_bits, max_bytes=max_bytes)


def commit_of(folder: Path, **parts: Any) -> CommitModel:
    """A commit with initial weights, four times as large, and real prepared text."""
    document = job(write_text(folder, 20_000))
    document["workload"] = {"model": "llama-tiny", "changes": SMALL}
    document["data"]["validation"] = {"share": 0.2}
    spec = parse(document | parts)
    tokens = Tokens.open(prepare_here(spec, str(folder / "cache")))
    workload = workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens)

    def read(name: str) -> Tensor:
        name = name.removeprefix("model.")
        return workload.initial(name, 3) * (4 if name.endswith("weight") else 1)

    unused: Any = None
    commit: Any = SimpleNamespace(tensors={f"model.{name}" for name in workload.shapes})
    return CommitModel(spec, unused, commit, tokens, workload, SimpleNamespace(read=read))  # type: ignore[arg-type]


def test_a_commit_is_exported_with_mixed_bits(tmp_path: Path) -> None:
    commit = commit_of(tmp_path)
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    out.mkdir()
    commit.workload.to_hf(commit.read, str(plain))
    tried = batches(commit.spec.data, commit.tokens, commit.workload)
    written, facts = write_converted(commit, asked("int4", "32", mean_bits=5), str(plain), str(out), tried)
    assert written.difference is not None
    assert written.difference < 1e-5
    quantized = facts["quantized"]
    assert 4 < quantized["mean_bits"] <= 5
    assert quantized["measured_on"] == "held-out samples"
    rows = [line.split(" | ") for line in (out / BITS).read_text().splitlines()[6:]]
    in_8 = {row[0].removeprefix("| ") for row in rows if row[-1] == "8 |"}
    assert {*quantized["int8"]} == in_8
    assert 0 < len(in_8) < len(rows) == 14
    scheme = Scheme("int4", 32, int8=tuple(quantized["int8"]))
    ours = with_weights(commit.workload, commit.read, scheme=scheme)
    theirs = load(f"hf:{out}", "causal_lm", commit.tokens.vocabulary(), sequence_length=32)
    for name, weight in ours.named_parameters():
        assert torch.equal(theirs.initial(name, 0), weight), name
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {group["weights"]["num_bits"] for group in described["config_groups"].values()} == {4, 8}


def test_an_export_keeps_to_its_bytes(tmp_path: Path) -> None:
    """Counted in the files. With no byte to spare all weights have int4, and with one less it is refused."""
    commit = commit_of(tmp_path)
    plain = tmp_path / "plain"
    plain.mkdir()
    commit.workload.to_hf(commit.read, str(plain))
    tried = [*batches(commit.spec.data, commit.tokens, commit.workload)]

    def written(max_bytes: int, name: str) -> tuple[int, dict[str, Any]]:
        (out := tmp_path / name).mkdir()
        form = asked("int4", "32", max_bytes=max_bytes)
        _, facts = write_converted(commit, form, str(plain), str(out), tried)
        in_files = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
        return in_files, facts["quantized"]

    least = bytes_in_int4(str(plain), [*hf_weights(Scheme("int4", 32), commit.workload)], Scheme("int4", 32))
    for max_bytes in (least, least + 10_000):
        in_files, quantized = written(max_bytes, f"of-{max_bytes}")
        sizes = [commit.workload.shapes[name] for name in quantized.get("int8", [])]
        assert in_files == quantized["bytes"] == least + sum(rows * columns for rows, columns in sizes) // 2
        assert in_files <= max_bytes
    assert in_files - least > 5_000, "what is left is less than the smallest weight, of 4,096 bytes"
    wanted = (
        f"--max-bytes {least - 1}: the export has {least:,} bytes with all in int4; give at least {least}"
    )
    with pytest.raises(InputError, match=re.escape(wanted)):
        written(least - 1, "refused")
    assert not [*(tmp_path / "refused").iterdir()]


def test_whether_a_class_can_be_rounded_is_known_before_the_run(tmp_path: Path) -> None:
    """Also of a class that runs as it is, in a folder that names it without its head."""
    checkpoint, quantize = CheckpointSpec(export="hf"), QuantizeSpec(weights="int8", group="row")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = GPTNeoXConfig(vocab_size=256, pad_token_id=0, **sizes)
    config.architectures = ["GPTNeoXModel"]
    config.save_pretrained(tmp_path)
    words = Vocabulary(256, eos=2, pad=0)
    classes = load(f"hf:{tmp_path}", "sequence_classification", words, sequence_length=16, labels=("a", "b"))
    check_export(checkpoint, classes, quantize)
    check_export(
        checkpoint, load("llama-tiny", "causal_lm", words, changes=SMALL, sequence_length=16), quantize
    )
    refused = load("gpt-tiny", "causal_lm", words, changes=SMALL | {"kv_heads": 4}, sequence_length=16)
    with pytest.raises(InputError, match=r"checkpoint.export: GPT2LMHeadModel .* outside a linear layer"):
        check_export(checkpoint, refused, quantize)


def test_a_loss_that_needs_more_than_the_samples_is_not_measured(tmp_path: Path) -> None:
    spec = SimpleNamespace(workload=SimpleNamespace(objective="dpo"))
    with pytest.raises(
        WorkloadError, match="--mean-bits measures the loss, and that of dpo needs a reference"
    ):
        _mixed(SimpleNamespace(spec=spec), asked("int4", mean_bits=5), {}, "", str(tmp_path))  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_run_that_trained_for_int8_goes_to_onnx(tmp_path: Path) -> None:
    """With rounded activations: each layer agrees (tests of the extension), and the whole model about."""
    commit = commit_of(
        tmp_path,
        workload={"model": "bert-tiny", "changes": SMALL | {"kv_heads": 4}, "objective": "masked_lm"},
        quantize={"weights": "int8", "group": "row", "activations": "dynamic"},
        checkpoint={"export": "onnx"},
    )
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    out.mkdir()
    commit.workload.to_hf(commit.read, str(plain))
    form = resolved_form(None, commit.spec.checkpoint, commit.spec.quantize)
    written, facts = write_converted(commit, form, str(plain), str(out), [])
    assert written.rounding is not None
    assert written.difference is not None
    assert 0 < written.difference < 2 * written.rounding < 0.1
    quantized = facts["quantized"]
    assert (quantized["weights"], quantized["group"], quantized["trained"]) == ("int8", "row", True)
    assert quantized["kept"] == ["cls.predictions.decoder", "cls.predictions.transform.dense"]
    assert facts["versions"].keys() == {"onnx", "onnxruntime", "torch"}
    assert (out / "model.onnx").is_file()


@pytest.mark.parametrize(
    ("options", "mean_bits", "wanted"),
    [
        (("int8",), 5, "is for --quantize int4"),
        (("none",), 5, "is for --quantize int4"),
        ((None,), 5, "is for --quantize int4"),
        (("int4",), 4, "4 is not between 4 and 8"),
        (("int4",), float("nan"), "nan is not between 4 and 8"),
    ],
)
def test_a_mean_of_bits_that_does_not_fit_is_told(
    options: tuple[str | None], mean_bits: float, wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        asked(*options, mean_bits=mean_bits)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"quantize": "int8", "max_bytes": 5}, "--max-bytes: is for --quantize int4"),
        ({"quantize": "int4", "max_bytes": 0}, "--max-bytes: 0 is no number of bytes"),
        ({"quantize": "int4", "max_bytes": 5, "mean_bits": 5}, "--max-bytes: and --mean-bits each say"),
    ],
)
def test_bytes_that_do_not_fit_are_told(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        asked(**options)


@pytest.mark.parametrize(
    ("trained", "conversion", "wanted"),
    [
        (
            {"weights": "int4"},
            Conversion("onnx"),
            "int4 with a scale for each 128, which onnx does not store",
        ),
        (
            {"weights": "int8"},
            Conversion("onnx"),
            "int8 with a scale for each 128, which onnx does not store",
        ),
        ({"weights": "q4_0"}, Conversion("onnx"), "for q4_0, which onnx does not store"),
        ({"weights": "q4_0"}, Conversion("hf"), "for q4_0, which hf does not store"),
        ({"weights": "int4"}, Conversion("dcp"), "which dcp does not store"),
        (
            {"weights": "int8", "group": "row"},
            Conversion("onnx", numbers="int8"),
            "onnx stores the integers that quantize trains for, so int8 has no effect",
        ),
    ],
)
def test_a_form_that_does_not_store_what_was_trained_is_told(
    trained: dict[str, Any], conversion: Conversion, wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        with_scheme(conversion, QuantizeSpec.model_validate(trained))


def test_forms_that_store_what_was_trained_get_its_scheme() -> None:
    rows = QuantizeSpec(weights="int8", group="row", activations="dynamic")
    assert with_scheme(Conversion("onnx"), rows) == Conversion("onnx", scheme=rows.scheme)
    blocks = QuantizeSpec(weights="q8_0")
    assert with_scheme(Conversion("gguf"), blocks) == Conversion("gguf", numbers="q8_0", scheme=blocks.scheme)
