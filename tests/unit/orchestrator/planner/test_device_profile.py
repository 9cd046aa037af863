"""Profiles of devices: each figure has a source, and a wrong file is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.planner import device_profile
from orchestrator.planner.device_profile import (
    Profile,
    check_stores,
    load,
    names,
    profile_of_accelerator,
    read,
    store,
)


@pytest.mark.parametrize("name", names())
def test_a_profile_is_sound(name: str) -> None:
    found = load(name)
    assert found.name == name
    machine = found.machine("bf16")
    assert machine.name == name
    assert machine.flops >= machine.full_flops > 0
    assert found.machine("fp32").matrix(4096, 4096, 4096, 4) >= machine.matrix(4096, 4096, 4096, 2)


def test_the_devices_that_the_docs_name_are_there() -> None:
    wanted = {"cpu-core", "a100-40", "a100-80", "h100", "h200", "b200", "l40s", "l4", "t4"}
    assert wanted <= set(names())


def test_every_figure_has_a_source() -> None:
    document = yaml.safe_load((device_profile.FOLDER / "h100.yaml").read_text())
    assert all("source" in value for value in document.values() if isinstance(value, dict))
    del document["memory"]["source"]
    with pytest.raises(ValueError, match="source"):
        Profile.model_validate(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory": {"value": -1, "source": "data sheet"}}, "memory.value: input should be greater"),
        ({"colour": "green"}, "colour: extra inputs are not permitted"),
        ({"per_node": 0}, "per_node: input should be greater than 0"),
        (
            {"host_bandwidth": {"value": 0, "source": "data sheet"}},
            "host_bandwidth: should have a value above 0",
        ),
        ({"memory": {"value": True, "source": "data sheet"}}, "memory.value: should not be true or false"),
        (
            {"delay": {"value": math.inf, "source": "data sheet"}},
            "delay.value: input should be a finite number",
        ),
        ({"delay": {"value": 1e300, "source": "data sheet"}}, "delay.value: input should be less than"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_key(tmp_path: Path, change: dict, said: str) -> None:
    document = yaml.safe_load((device_profile.FOLDER / "t4.yaml").read_text()) | change
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError) as found:
        load(str(path))
    assert said in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["{", "[1, 2]", ""])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="is not a device profile"):
        read(path)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match=r"no device has the name z9.*a100-80.*h100"):
        load("z9")


@pytest.mark.parametrize(
    ("asked", "found"), [("A100-80", "a100-80"), ("H100", "h100"), ("A100-80G", "a100-80-fused")]
)
def test_a_device_is_found_by_any_case_and_by_rays_name(asked: str, found: str) -> None:
    assert load(asked).name == found


def test_an_accelerator_is_known_by_rays_name() -> None:
    assert profile_of_accelerator("H200").name == "h200"
    assert profile_of_accelerator("A100").memory.value == 40e9
    assert profile_of_accelerator("Z9") is None
    assert profile_of_accelerator("") is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80-fused"),
        ("A100-SXM4-40GB", "a100-40-fused"),
        ("NVIDIA A100 80GB PCIe", "a100-80-fused"),
        ("A100-80G", "a100-80-fused"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_an_accelerator_is_known_by_its_drivers_name_and_the_memory_that_this_tells(
    name: str, found: str
) -> None:
    profile = profile_of_accelerator(name)
    assert profile is not None
    assert profile.name == found
    assert profile_of_accelerator("NVIDIA GeForce RTX 5090") is None  # nor is any other of a maker


def test_where_a_profile_cannot_be_written_is_said_before_it_is_measured(tmp_path: Path) -> None:
    check_stores(tmp_path / "new" / "machine.yaml")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "machine.yaml", tmp_path / "file"):
        with pytest.raises(InputError, match="give another with --to"):
            check_stores(path)
    store(load("cpu-core"), tmp_path / "machine.yaml")
    check_stores(tmp_path / "machine.yaml")


@pytest.mark.parametrize("name", ["element_share", "optimizer_share"])
def test_a_share_is_one_at_most(tmp_path: Path, name: str) -> None:
    document = load("h100").model_dump(mode="json")
    document[name]["value"] = 80.0
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match=rf"{name}.*1 at most"):
        read(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("device: 2024-13-45", "month must be in 1..12"),
        ("device: a\ndevice: b", "device"),
        ("per_node: 010", "010 is one number in YAML 1.1"),
        ("device: " + "[" * 5000, "is not a device profile"),
    ],
)
def test_a_file_is_read_as_strictly_as_a_job(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match="is not a device profile") as error:
        read(path)
    assert says in str(error.value)
