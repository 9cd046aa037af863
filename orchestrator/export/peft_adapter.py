"""Export the adapter of a commit to a folder that peft loads onto its base, and compare the outputs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.config.workload import WorkloadSpec

if TYPE_CHECKING:
    from torch import Tensor

    from workloads.transformer_workload import TransformerWorkload
    from workloads.workload import Batch

WHERE = "checkpoint.export"


def check_adapter_export(workload: Any) -> None:
    """Raise InputError or WorkloadError if the adapter of a workload cannot be exported."""
    from workloads.hf.export.adapter_folder import check_adapter

    if find_spec("peft") is None:
        hint = f"{install('peft')}, or set it to hf for the merged model"
        raise InputError("an adapter is checked with peft, which is not installed", WHERE, hint)
    check_adapter(workload)


def write_adapter(
    spec: WorkloadSpec,
    workload: TransformerWorkload,
    read: Callable[[str], Tensor],
    folder: str,
    batches: Iterable[Batch],
) -> float:
    """Write an adapter in peft's format.

    Args:
        spec: the key `workload` of the job.
        workload: the model with its adapter.
        read: returns a tensor of the commit by its name.
        folder: a local folder.
        batches: batches on which both models are compared.

    Returns:
        The largest difference between the outputs of our model and of the base with the adapter as peft loads it.

    Raises:
        RuntimeError: the difference is too large.
    """
    from workloads.adapters.adapter import PROMPTS
    from workloads.hf.check.compare import TOLERANCE, difference
    from workloads.hf.export import adapter_folder
    from workloads.hf.files.meaning import SETTINGS
    from workloads.inference import with_weights

    adapter = workload.adapter
    if adapter and adapter.kind in ("prefix", *PROMPTS):
        # peft puts these only before a plain mask
        batches = [batch for batch in batches if not batch.keys() & {"attention", "positions", "segments"}]
    adapter_folder.write_adapter(workload, read, folder, _name_of_base(spec))
    with tempfile.TemporaryDirectory(prefix="base-") as base:
        workload.base_to_hf(read, base)
        with contextlib.suppress(FileNotFoundError):  # belongs to a model that does not generate text
            shutil.copyfile(Path(base, SETTINGS), Path(folder, SETTINGS))
        model = with_weights(workload, read)
        taken = adapter.positions if adapter and adapter.kind in PROMPTS else 0
        result = difference(
            workload.config, model, base, batches, lambda hf_model: _with(hf_model, folder, taken)
        )
    if not result <= TOLERANCE:
        raise RuntimeError(f"the adapter on its base differs by {result:.2e}; nothing was published")
    return result


def _with(hf_model: Any, folder: str, taken: int) -> Any:
    """Return the model with the adapter. Its logits are those of tokens alone, without the first `taken` ones of a
    prompt.
    """
    from workloads.adapters.nf4 import silence

    silence()
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers has changed
        result = PeftModel.from_pretrained(hf_model, folder).eval()
    if taken:
        result.register_forward_hook(lambda _, __, out: {"logits": out.logits[:, taken:]})
    return result


def _name_of_base(workload: WorkloadSpec) -> str:
    """Return the location of the base, as far as transformers can load it from there."""
    return workload.init_from or workload.model.removeprefix("hf:")
