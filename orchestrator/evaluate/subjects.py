"""The models that tasks are evaluated of: that of a commit, or of a folder in the Hugging Face format."""

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
    """What is evaluated: a model with its weights, the tokenizer of transformers that fits it, of which step it is, and
    what `facts_of` says of the weights."""

    workload: Workload
    model: nn.Module
    tokenizer: Any
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def subject_of_commit(
    run_uri: str, step: int, device: torch.device | None = None, best: bool = False, raw: bool = False
) -> Subject:
    """The model of the commit at `step` of a run, with the tokenizer that an export of it would have.

    With `best` it is that of the commit which is best by checkpoint.keep_best, if there is one. The weights are
    averaged, if the job has an average of them, unless `raw`.

    Raises InputError if there is no such run, or its data is gone.
    """
    from tokenizers import Tokenizer

    from orchestrator.checkpoint.averaged import facts_of
    from orchestrator.data.encoding.auto_tokenizer import FILE
    from orchestrator.export.tokenizer import write_tokenizer
    from orchestrator.resolve.commit_model import model_of_run
    from workloads.load import with_weights

    found = model_of_run(run_uri, step, best, raw)
    workload = found.workload
    model = with_weights(workload, found.read, device)
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        write_tokenizer(found.tokens, workload, found.spec, folder)
        tokenizer = Tokenizer.from_file(str(Path(folder, FILE)))
        return Subject(workload, model, _for_lm_eval(tokenizer), found.commit.step, facts_of(found.reader))


def subject_of_export(
    folder: str, overrides: Sequence[str] = (), device: torch.device | None = None
) -> Subject:
    """The model in a folder in the Hugging Face format. Raises InputError if it cannot be read."""
    from workloads.load import with_weights

    spec, step = spec_of_export(folder, {}, overrides)
    workload = workload_of_export(spec)
    model = with_weights(workload, lambda name: workload.initial(name, spec.seed), device)
    return Subject(workload, model, _for_lm_eval(tokenizer_of_export(spec)), step)


def _for_lm_eval(tokenizer: Tokenizer) -> Any:
    """The tokenizer that training reads as one of transformers, whose AutoTokenizer may make another one of the folder
    (see `orchestrator.data.encoding.auto_tokenizer`)."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
