"""What a job asks of the machine that it runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch.machine_checks import check_labels, check_machine, check_memory, local_gpus
from orchestrator.planner.device import Machine
from orchestrator.resolve.resolved_job import resolve


def spec(**changes: Any) -> JobSpec:
    document = job("a.txt")
    for part, values in changes.items():
        document[part] = {**document.get(part, {}), **values}
    return parse(document)


def test_labels_are_for_clusters() -> None:
    labelled = spec(resources={"per_worker": {"labels": {"team": "blue"}}})
    check_labels(labelled.resources, "10.0.0.1:6379")
    with pytest.raises(InputError, match="only a cluster's nodes have labels"):
        check_machine(labelled.resources, labelled.all_workers, None)


def test_a_gang_has_the_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spec(resources={"workers": {"min": 2, "max": 8}, "per_worker": {"gpu": 1}})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_gpus(asked.all_workers) == 4
    check_machine(asked.resources, asked.all_workers, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_machine(asked.resources, asked.all_workers, "10.0.0.1:6379")
    with pytest.raises(InputError, match="the smallest gang needs 2 GPUs, but this machine has none"):
        check_machine(asked.resources, asked.all_workers, None)


def test_a_predicted_out_of_memory_is_refused_unless_it_is_forced() -> None:
    wide = {"changes": {"hidden": 1024, "heads": 4, "intermediate": 4096, "layers": 1}}
    resolved = resolve(spec(workload=wide))
    machine = Machine(0.6e9, 1e11)  # the tensors would fit, a process with them would not
    with pytest.raises(InputError, match=r"needs 0\.\d\d GiB per worker, which offers 0\.20 GiB") as found:
        check_memory(resolved, machine)
    assert "resources.must_fit false" in str(found.value)
    check_memory(resolve(spec(workload=wide, resources={"must_fit": False})), machine)
    check_memory(resolved, Machine(8e9, 1e11))
