"""Check that a model can be exported as a job asks for, before the run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.export.converted import Conversion, check_conversion, form_of
from orchestrator.export.peft_adapter import check_adapter_export
from orchestrator.export.target import check_target
from orchestrator.resolve.resolved_job import wrong_input


def check_export_target(export_to: str | None) -> None:
    """Check that the target of exports can be written, if the job names one. Raises InputError."""
    if export_to:
        check_target(export_to)


def check_export(checkpoint: CheckpointSpec, workload: Any) -> None:
    """Check that the model's checkpoints can be exported in the form that the job asks for. Raises InputError."""
    if not checkpoint.export:
        return
    with wrong_input("checkpoint.export"):
        workload.check_form(checkpoint.export)
        if checkpoint.export == "safetensors":
            return
        if checkpoint.export == "adapter":
            replace(workload, adapter=None).check_hf()
            check_adapter_export(workload)
        else:
            workload.check_hf()
        if isinstance(form := form_of(checkpoint), Conversion):
            check_conversion(form, workload)
