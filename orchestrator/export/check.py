"""Check that a model can be exported as a job asks for, before the run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.export.converted import Conversion, check_conversion, form_of
from orchestrator.export.peft_adapter import check_adapter_export
from orchestrator.export.quantised import check_quantised, with_scheme
from orchestrator.export.target import check_target
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.resolve.resolved_job import wrong_input
from workloads.errors import WorkloadError


def check_export_target(export_to: str | None) -> None:
    """Check that the target of exports can be written, if the job names one. Raises InputError."""
    if export_to:
        check_target(export_to)


def check_export(checkpoint: CheckpointSpec, workload: Any, quantize: QuantizeSpec | None = None) -> None:
    """Check that the model's checkpoints can be exported in the form that the job asks for.

    Args:
        checkpoint: the key `checkpoint` of the job.
        workload: the model.
        quantize: the key `quantize` of the job; None without one.

    Raises:
        InputError: they cannot.
    """
    if not checkpoint.export:
        return
    with wrong_input("checkpoint.export"):
        workload.check_form(checkpoint.export)
        if checkpoint.export == "safetensors":
            if quantize is not None:
                raise WorkloadError("own models are exported in full precision; set it to null")
            return
        if checkpoint.export == "adapter":
            replace(workload, adapter=None).check_hf()
            check_adapter_export(workload)
        else:
            workload.check_hf()
        form = form_of(checkpoint)
        if quantize is not None:
            conversion = form if isinstance(form, Conversion) else Conversion("hf")
            form = with_scheme(conversion, quantize, "checkpoint.export")
            check_quantised(form, workload)
        if isinstance(form, Conversion) and form.form != "hf":
            check_conversion(form, workload)
