"""Take the weights out of a sharded checkpoint that Megatron-LM wrote: one file of each rank of tensor and pipeline
parallelism (`--ckpt-format torch`), or a folder of torch.distributed.checkpoint (`torch_dist`).

The files are pickles. A separate process reads them, see `megatron_unpickle`; this one unpickles nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.export.target import new_folder
from orchestrator.extensions.importers.megatron_files import ABOUT, AGAIN, COMMON, LATEST, RANK
from orchestrator.extensions.importers.reading_process import ask

CHILD = "orchestrator.extensions.importers.megatron_unpickle"


def import_megatron(
    source: str, target: str, iteration: int | None = None, vocabulary: int | None = None
) -> dict[str, Any]:
    """Write `target`/model.safetensors and config.json of GPT-2 or Llama as transformers has them, so that the folder
    is trained as `hf:<target>`. Weights keep their type; optimiser state is not imported.

    vocabulary: rows of the tables that are kept; by default all, with those that Megatron adds to divide them. Returns
    {"iteration", "tensor_parallel", "pipeline_parallel", "version", "model_type", "tensors"}, the last by name with
    their shapes. Raises InputError if the folder is not such a checkpoint, or neither class computes its model.
    """
    folder = _folder(Path(source), iteration)
    with new_folder(target) as draft:
        return ask(CHILD, {"folder": str(folder.resolve()), "target": draft, "vocabulary": vocabulary})


def _folder(source: Path, iteration: int | None) -> Path:
    """The folder of one iteration."""
    if iteration is None and (source / LATEST).is_file():
        latest = (source / LATEST).read_bytes()[:80].decode(errors="replace").strip()
        if latest != "release" and not latest.isdecimal():
            raise InputError(f"it names no iteration ({latest!r})", str(source / LATEST), "give --iteration")
        folder = source / (latest if latest == "release" else f"iter_{int(latest):07d}")
    else:
        folder = source if iteration is None else source / f"iter_{iteration:07d}"
    if (folder / ABOUT).is_file() and (folder / COMMON).is_file():
        return folder
    if not any(RANK.fullmatch(path.name) for path in folder.glob("mp_rank_*")):
        problem = f"there is no checkpoint of Megatron-LM (mp_rank_..., or {COMMON} beside {ABOUT})"
        raise InputError(problem, str(folder), AGAIN)
    return folder
