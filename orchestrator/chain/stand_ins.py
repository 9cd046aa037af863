"""The jobs of a chain's stages before the first of them runs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.chain.stage_run import StageRun
from orchestrator.config.chain import ChainSpec
from orchestrator.config.spec import JobSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.resolve.prepared_data import EXCERPT
from orchestrator.resolve.resolved_job import special_tokens_of


@contextlib.contextmanager
def stand_ins(chain: ChainSpec, stages: Mapping[str, StageRun]) -> Iterator[dict[str, JobSpec]]:
    """Yield the jobs of the stages, by name, as far as they are known before the first stage runs.

    A tokenizer that an earlier stage will train is replaced by an untrained one of the same kind, in a folder that
    exists during this context.
    """
    from orchestrator.data.encoding import training

    with tempfile.TemporaryDirectory(prefix="chain-") as folder:
        jobs = {}
        for name, stage in stages.items():
            origin, jobs[name] = chain.tokenizer_origin(stage.stage), stage.job
            wanted = origin.job.data.tokenizer
            kept = stages[origin.name].run.exists(f"{EXCERPT}/tokenizer.json")
            if origin.name == name or not isinstance(wanted, TrainedTokenizer) or kept:
                continue
            path = Path(folder, origin.name)
            path.mkdir(exist_ok=True)
            text = training.train_bytes(
                (), wanted.recipe.vocabulary, special_tokens_of(origin.job.data, origin.job.workload)
            )
            (path / "tokenizer.json").write_text(text)
            data = stage.job.data.model_copy(update={"tokenizer": str(path)})
            jobs[name] = stage.job.model_copy(update={"data": data})
        yield jobs
