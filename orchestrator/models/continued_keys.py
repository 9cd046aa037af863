"""Which keys of a job may change when its run continues another run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.checkpoint.identity import ABSENT, differences, shown
from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.data.prepared import EXCERPT
from orchestrator.models.named_commit import split_tag
from workloads.hf.files.hf_config import FOLDER

WHERE = "train.continue_from"
MODEL = re.compile(r"workload\.(model|objective|mup|changes|adapter)\b|train\.(freeze|thaw)\b|data\.labels\b")
"""Keys that decide which weights exist and what they mean."""
SIZE = "workload.changes.vocab_size"
"""Keys that may be written or may follow from the tokenizer. The shapes of the weights show a difference."""
OPTIMIZER = re.compile(r"train\.optimizer\.name\b")
DATA = re.compile(r"seed$|data\.")
"""Keys that decide which sample is at which position."""
AVERAGE = "checkpoint.average.ema"
WEIGHTS_ALONE = "set it back; or start with the weights alone, by workload.init_from"
OTHER_DATA = "set it back; or read the data from their beginning, by train.continue_from.position restart"


def check_keys(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    source: str,
    *,
    workload: WorkloadSpec,
    data: DataSpec,
    reads_base: bool,
    keeps_position: bool,
) -> None:
    """Raise InputError if a job differs from that of the `source` in what must not change between phases.

    Args:
        ours: the identity of the job, see `JobSpec.identity`.
        theirs: the identity of the source's job.
        source: the name of the source, for messages.
        workload: the model of the job.
        data: the data of the job.
        reads_base: whether commits lack weights, which are read from where the run began.
        keeps_position: whether the job keeps the position in the data.
    """
    differing = differences(ours, theirs)
    for key, before, now in differing:
        hint = ""
        if MODEL.match(key) and key != SIZE:
            hint = WEIGHTS_ALONE
        elif OPTIMIZER.match(key):
            hint = f"the checkpoint has the state of {before}: {WEIGHTS_ALONE}"
        elif key == "seed" and _draws_what_it_keeps(workload, data.add_tokens, reads_base):
            hint = f"it draws the weights that are not trained: {WEIGHTS_ALONE}"
        elif key == AVERAGE and ABSENT in (before, now):
            hint = "a moving average cannot begin or end between phases: set it back"
        elif DATA.match(key) and keeps_position:
            hint = OTHER_DATA
        elif key == "train.global_batch" and keeps_position and data.is_mixed:
            hint = f"it decides the order of samples of a mixture: {OTHER_DATA}"
        if hint:
            raise InputError(
                f"{key} is {shown(before)} in {source} and {shown(now)} in the job file", WHERE, hint
            )
    top_level_keys = {key.partition(".")[0] for key, _, _ in differing}
    if isinstance(data.tokenizer, TrainedTokenizer) and "data" in top_level_keys:
        source_uri = split_tag(source)[0]
        problem = f"a tokenizer trained on other data has other tokens than that of {source_uri}"
        raise InputError(problem, "data.tokenizer", f"set it to {source_uri}/{EXCERPT}")


def _draws_what_it_keeps(workload: WorkloadSpec, added: Sequence[str], reads_base: bool) -> bool:
    """Return whether the job's seed draws some of the untrained weights that commits leave out."""
    begins_anew = workload.init_from is None and not workload.model.startswith(FOLDER)
    return reads_base and (begins_anew or bool(added) or "vocab_size" in workload.changes)
