"""What tells that a folder's configuration is another one than a run's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import job
from transformers import ElectraConfig, LlamaConfig

from orchestrator.checkpoint.identity import KEPT
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.models.kept_config import (
    check_read_config,
    check_same_config,
    config_json,
    config_to_keep,
    kept_config,
)
from workloads.describe import describe
from workloads.hf.files.hf_config import folder_config, read_hf_config
from workloads.model.config import TransformerConfig

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_labels=2, id2label={0: "no", 1: "yes"},
)  # fmt: skip


def commit(spec: JobSpec) -> Any:
    """A commit of a run that begins now, as far as it is looked at."""
    told = json.loads(json.dumps(config_json(config_to_keep(spec.workload))))
    return SimpleNamespace(meta={KEPT: told})


def spec_of(model: str, **workload: Any) -> JobSpec:
    """A job with such a model."""
    return parse(job("a.txt") | {"workload": {"model": model, **workload}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration alone."""
    LLAMA.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def edit(folder: Path, **keys: Any) -> None:
    """Another configuration in the folder."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"rms_norm_eps": 1e-5}, ["rms_norm_eps is 1e-06 in this run and 1e-05"]),
        ({"hidden_act": "gelu"}, ['hidden_act is "silu" in this run and "gelu"']),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings is false in this run and true"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            ["rope_parameters.rope_theta is 10000.0 in this run and 100.0"],
        ),
        (
            {"id2label": {"0": "yes", "1": "no"}},
            ['id2label.0 is "no" in this run and "yes"', 'id2label.1 is "yes" in this run and "no"'],
        ),
        ({"pad_token_id": 3}, ["pad_token_id is null in this run and 3"]),
        ({"model_type": "mistral"}, ['model_type is "llama" in this run and "mistral"']),
    ],
    ids=str,
)
def test_each_key_that_differs_is_named(keys: dict[str, Any], told: list[str], folder: Path) -> None:
    spec = spec_of(f"hf:{folder}")
    begun = commit(spec)
    check_same_config(spec.workload, begun, "run")
    edit(folder, **keys)
    with pytest.raises(InputError) as found:
        check_same_config(spec.workload, begun, "run")
    said = [each.what for each in found.value.each()]
    assert all(any(each.startswith(want) for each in said) for want in told)
    assert f"{folder}/config.json" in said[0]
    check_read_config(spec.workload, begun, "run")  # it is read from the commit


@pytest.mark.parametrize(
    "how", ["as 4.x wrote it", "spaces", "another version", "moved", "gone", "config gone"]
)
def test_what_is_the_same_is_no_other(how: str, folder: Path) -> None:
    spec = spec_of(f"hf:{folder}")
    begun, path = commit(spec), folder / "config.json"
    found = json.loads(path.read_text())
    match how:
        case "as 4.x wrote it":
            rope = found.pop("rope_parameters")
            path.write_text(json.dumps({**found, "rope_theta": rope["rope_theta"], "rope_scaling": None}))
        case "spaces":
            path.write_text(json.dumps(found))
        case "another version":
            edit(folder, transformers_version="9.9.9", dtype="bfloat16", use_cache=False)
        case "moved":
            spec = spec_of(f"hf:{folder.rename(folder.with_name('elsewhere'))}")
        case "gone":
            folder.rename(folder.with_name("away"))
        case "config gone":
            path.unlink()
    check_same_config(spec.workload, begun, "run")


def test_a_damaged_configuration_is_told(folder: Path) -> None:
    spec = spec_of(f"hf:{folder}")
    begun = commit(spec)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="in this run and"):
        check_same_config(spec.workload, begun, "run")


def test_a_commit_of_an_earlier_version_tells_nothing(folder: Path) -> None:
    spec = spec_of(f"hf:{folder}")
    edit(folder, rms_norm_eps=0.5)
    for meta in ({}, {KEPT: None}):
        assert kept_config(SimpleNamespace(meta=meta)) is None  # type: ignore[arg-type]
        check_same_config(spec.workload, SimpleNamespace(meta=meta), "run")  # type: ignore[arg-type]
    assert config_to_keep(spec_of("gpt-tiny").workload) is None


def test_the_kept_text_is_what_is_described(folder: Path) -> None:
    """Of both implementations, whatever becomes of the folder."""
    model, kept = f"hf:{folder}", folder_config(str(folder))
    before = [describe(model, implementation=each) for each in ("auto", "transformers")]  # type: ignore[arg-type]
    edit(folder, rms_norm_eps=0.5, hidden_size=32)
    folder.rename(folder.with_name("away"))
    for each, was in zip(("auto", "transformers"), before, strict=True):
        found = describe(model, implementation=each, kept=kept)  # type: ignore[arg-type]
        assert found == was
        assert isinstance(found, TransformerConfig) or found.hf_config().rms_norm_eps == 1e-6
    assert read_hf_config(str(folder), kept=kept).name_or_path == str(folder)


def test_a_pair_keeps_both_of_its_configurations(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "embedding_size": 16, "num_hidden_layers": 1}
    whole = ElectraConfig(**sizes, hidden_size=32, intermediate_size=64, num_attention_heads=2)
    whole.save_pretrained(tmp_path / "pair")
    half = ElectraConfig(**sizes, hidden_size=16, intermediate_size=32, num_attention_heads=1)
    half.save_pretrained(tmp_path / "pair" / "generator")
    spec = spec_of(f"hf:{tmp_path / 'pair'}")
    begun, before = commit(spec), describe(spec.workload.model)
    edit(tmp_path / "pair" / "generator", layer_norm_eps=0.5)
    with pytest.raises(
        InputError, match=r"layer_norm_eps is 1e-12 in this run and 0\.5 in .*/generator/config\.json"
    ):
        check_same_config(spec.workload, begun, "run")
    assert describe(spec.workload.model, kept=kept_config(begun)) == before


def test_a_class_that_reads_its_folder_itself_is_refused_where_that_is_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit_mae", "layer_norm_eps": 1e-12}))
    spec = spec_of("workloads.vision.mae:Mae", changes={"folder": str(tmp_path)})
    begun = commit(spec)
    check_read_config(spec.workload, begun, "run")
    edit(tmp_path, layer_norm_eps=0.5)
    with pytest.raises(InputError, match=r"layer_norm_eps is 1e-12 in this run and 0\.5"):
        check_read_config(spec.workload, begun, "run")
