"""XLNet from text to an export that transformers loads, through a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.export.hugging_face import export


@pytest.mark.slow
def test_it_trains_through_a_kill_and_leaves(tmp_path: Path) -> None:
    document: dict[str, Any] = job(write_text(tmp_path / "corpus", 60_000), steps=6)
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "intermediate": 48}
    document["workload"] = {
        "model": "xlnet-base",
        "objective": "permuted_lm",
        "options": {"span": 3},
        "changes": sizes,
    }
    document["train"]["optimizer"] |= {"eps": 1e-4}
    document["checkpoint"] = {"every": 2, "export": None}
    document |= {"parallel": {"pp": 2, "micro_batch": 2}, "resources": {"workers": {"min": 2, "max": 2}}}
    document.pop("tracking", None)
    found = []
    for name, faults in (("quiet", ()), ("killed", ("kill@1:5",))):
        folder = tmp_path / name
        summary = drive_here(
            document, str(folder), tmp_path / "cache", gang=lambda: LocalGang([2]), faults=faults
        )
        assert summary["state"] == "done"
        reader = (store := Store(str(folder / "checkpoints"))).reader(manifest := store.manifest(6))
        found.append({name: reader.read(name) for name in manifest.tensors})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    written = export(str(tmp_path / "quiet"), 6, str(tmp_path / "export"))
    assert written["logits_difference"] <= 1e-5
