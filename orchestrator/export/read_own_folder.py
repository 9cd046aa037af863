"""Load an exported own model as a stranger would, and compare its outputs. `own_for_transformers` starts this file.

    python read_own_folder.py FOLDER PROBE PACKAGES

It imports transformers only: packages of the project that trained the model cannot be imported, except PACKAGES, which
the model's code names (separated by commas). PROBE is a file with a batch (`batch.NAME`), `losses`, and `logits` if the
model has them. It prints the largest difference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = ("orchestrator", "workloads", "cluster")


class _Refused(MetaPathFinder):
    """Refuses to import packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError for a refused package."""
        if fullname.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def main(folder: str, probe: str, packages: str) -> None:
    """Print the largest difference between the outputs of the model in `folder` and those in `probe`."""
    sys.meta_path.insert(0, _Refused([name for name in OURS if name not in packages.split(",")]))
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.disable_progress_bar()
    kinds = json.loads((Path(folder) / "config.json").read_text())["auto_map"]
    kind = getattr(transformers, list(kinds)[-1])
    model, report = kind.from_pretrained(
        folder, trust_remote_code=True, local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    if wrong := {name: output for name, output in report.items() if output}:
        raise RuntimeError(f"loads with {wrong}")
    probe_tensors = load_file(probe)
    batch = {
        name.removeprefix("batch."): each for name, each in probe_tensors.items() if name.startswith("batch.")
    }
    model.eval()
    with torch.inference_mode():
        apart = [_difference(probe_tensors["losses"], _losses(model.network, batch))]
        if "logits" in probe_tensors:
            apart.append(_difference(probe_tensors["logits"], model(input_ids=batch["tokens"]).logits))
    print(max(apart))


def _losses(network: Any, batch: dict[str, Any]) -> Any:
    """Return what training computes of a batch, from `loss`, `embed` or `stages`."""
    if hasattr(network, "compare"):
        result = network.embed(batch)
    elif hasattr(network, "stages"):
        first, *others = network.stages()
        result = first(batch)
        for stage in others:
            result = stage(result, batch)
    else:
        result = network.loss(batch)
    return result[0] if isinstance(result, tuple) else result


def _difference(expected: Any, actual: Any) -> float:
    if expected.shape != actual.shape:
        raise RuntimeError(f"outputs of shape {tuple(actual.shape)}, and here of {tuple(expected.shape)}")
    return float((expected.double() - actual.double()).abs().max()) if expected.numel() else 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
