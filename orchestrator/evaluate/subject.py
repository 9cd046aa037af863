"""The models that tasks are evaluated on: of a commit, or of an export."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.evaluate.of_export import spec_of_export, tokenizer_of_export, workload_of_export

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn

    from workloads.workload import Workload


@dataclass(frozen=True)
class Subject:
    """The model to evaluate: its weights, its transformers tokenizer, its step, and the facts of `average_fields` about
    the weights.
    """

    workload: Workload
    model: nn.Module
    tokenizer: Any
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def subject_of_commit(
    run_uri: str, step: int, device: torch.device | None = None, best: bool = False, raw: bool = False
) -> Subject:
    """Return the model of a run's commit, with the tokenizer that an export of it would have.

    Args:
        run_uri: the run directory.
        step: the step of the commit.
        device: where to put the model; None for the CPU.
        best: whether to take the best commit by checkpoint.keep_best instead, if there is one.
        raw: whether to take the weights of training instead of their average, if the job has one.

    Raises:
        InputError: the run or its data is missing.
    """
    from tokenizers import Tokenizer

    from orchestrator.data.encoding.auto_tokenizer import FILE
    from orchestrator.data.encoding.framing import unframed
    from orchestrator.export.tokenizer import write_tokenizer
    from orchestrator.models.averaged import average_fields
    from orchestrator.resolve.commit_model import model_of_run
    from orchestrator.resolve.prepared_data import EARLIER
    from orchestrator.resolve.resolved_job import is_framed
    from workloads.inference import with_weights

    loaded = model_of_run(run_uri, step, best, raw)
    workload = loaded.workload
    model = with_weights(workload, loaded.read, device, loaded.scheme)
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        write_tokenizer(loaded.tokens, workload, loaded.spec.data, folder)
        tokenizer = Tokenizer.from_file(str(Path(folder, FILE)))
        if loaded.tokens.manifest.format <= EARLIER and is_framed(loaded.spec.data, loaded.spec.workload):
            tokenizer = unframed(tokenizer)
        return Subject(
            workload, model, _for_lm_eval(tokenizer), loaded.commit.step, average_fields(loaded.reader)
        )


def subject_of_export(
    folder: str, overrides: Sequence[str] = (), device: torch.device | None = None
) -> Subject:
    """Return the model in a folder in the Hugging Face format.

    Args:
        folder: the local folder.
        overrides: changes of the job that evaluates it, of the form a.b=c.
        device: where to put the model; None for the CPU.

    Raises:
        InputError: the model cannot be read.
    """
    from workloads.inference import with_weights

    spec, step = spec_of_export(folder, {}, overrides)
    workload = workload_of_export(spec)
    scheme = spec.quantize.scheme if spec.quantize else None
    model = with_weights(workload, lambda name: workload.initial(name, spec.seed), device, scheme)
    return Subject(workload, model, _for_lm_eval(tokenizer_of_export(spec.data, spec.workload)), step)


def _for_lm_eval(tokenizer: Tokenizer) -> Any:
    """Return training's tokenizer as a transformers tokenizer.

    transformers' AutoTokenizer may make another one from the folder (see
    `orchestrator.data.encoding.auto_tokenizer`).
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
