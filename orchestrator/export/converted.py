"""Exports in the formats of others than transformers: each is made from a checked export for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from orchestrator.job.errors import InputError
from orchestrator.resolve.resolved_job import wrong_input

Converted: TypeAlias = Literal["dcp"]
Names: TypeAlias = Literal["hf", "torchtitan", "olmo"]
FORM, NAMES = "--form", "--names"


@dataclass(frozen=True)
class Conversion:
    """A format that is no folder for transformers. names: those of the tensors in a DCP folder."""

    form: Converted
    names: Names = "hf"


def asked_form(form: str | None, names: Names) -> Any:
    """What `export` takes for these options of the command. Raises InputError if they do not go together."""
    if names != "hf" and form != "dcp":
        raise InputError(f"names of {names} are for --form dcp", NAMES, "leave it out, or add --form dcp")
    return Conversion("dcp", names) if form == "dcp" else form


def convert(asked: Conversion, plain: str, folder: str) -> None:
    """Write what is in `plain`, an export for transformers, to `folder` in another format, and check it.

    Raises InputError if the format has no such model, RuntimeError if what was written is not what was to be written.
    """
    from workloads.hf.dcp_export import export_dcp

    with wrong_input(FORM):
        export_dcp(plain, folder, asked.names)
