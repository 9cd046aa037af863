"""The optional libraries that a job needs, and the extra that installs each."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.config.extensions import extra_libraries
from orchestrator.config.extras import install
from orchestrator.config.spec import JobSpec
from orchestrator.data.clean.plan import BY_DATATROVE, SIMPLIFIED
from orchestrator.data.config import DataSpec
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.export.kinds import OF_THE_CORE, form_named
from orchestrator.launch.doctor import Finding
from orchestrator.launch.job_paths import read_paths, written_paths
from orchestrator.observe.sinks.check import libraries_of
from orchestrator.storage.uri import LIBRARIES, protocol_of


@dataclass(frozen=True)
class Need:
    """A library that a key of the job needs. `extra` is empty if the default install has the library."""

    key: str
    library: str
    extra: str = ""

    @property
    def finding(self) -> Finding:
        """Whether the library is installed here."""
        subject = f"{self.key} needs {self.library}"
        try:
            version = importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            hint = install(self.extra) if self.extra else f"pip install {self.library}"
            return Finding("missing", subject, "not installed", hint)
        return Finding("ok", subject, f"{version}, of the extra {self.extra}" if self.extra else version)


def store_libraries(uri: str) -> Iterator[Need]:
    """Yield the library for the store of a URI, if the default install does not have it."""
    if store := LIBRARIES.get(protocol_of(uri)):
        yield Need(f"{protocol_of(uri)}://", store.library, store.extra)


def _export_libraries(export: str | None) -> Iterator[Need]:
    if export == "adapter":
        yield Need("checkpoint.export adapter", "peft", "peft")
    if export is not None and export not in OF_THE_CORE:
        form = form_named(export)
        for package in form.packages:
            yield Need(f"checkpoint.export {export}", package, form.extra)


def needed_libraries(spec: JobSpec) -> Iterator[Need]:
    """Yield the libraries that the job needs in addition to those of every rank."""
    for uri in (*read_paths(spec), *written_paths(spec).values()):
        yield from store_libraries(uri)
    yield from _data_libraries(spec.data)
    if spec.evaluate is not None:
        yield from _evaluation_libraries(spec.evaluate)
    yield from _export_libraries(spec.checkpoint.export)
    if spec.workload.adapter and spec.workload.adapter.quantize != "none":
        yield Need("workload.adapter.quantize", "bitsandbytes", "qlora")
    if spec.rollout is not None and spec.rollout.engine == "vllm":
        yield Need("rollout.engine vllm", "vllm", "vllm")
    if spec.tracking:
        yield Need("tracking", "mlflow")
    if spec.sinks is not None:
        for key, module in libraries_of(spec.sinks).items():
            # These libraries are named after their modules. An installed name has a hyphen for a dot (PEP 503).
            yield Need(f"sinks.{key}", module.replace(".", "-"), "sinks")
    if spec.tune:
        yield Need("tune", "optuna")


def _data_libraries(data: DataSpec) -> Iterator[Need]:
    for step in data.clean:
        if step.name in (*BY_DATATROVE, *SIMPLIFIED):
            yield Need(f"data.clean.{step.name}", "datatrove", "clean")
        if step.name == "near_duplicates":
            yield Need("data.clean.near_duplicates", "rensa", "data")
        if step.name == "language":
            yield Need("data.clean.language", "py3langid", "data")
        if step.name == "normalize" and step.options.fix:
            yield Need("data.clean.normalize.fix", "ftfy", "data")
    if data.samples is not None:
        for library, extra in extra_libraries(data.samples.use).items():
            yield Need("data.samples", library, extra)


def _evaluation_libraries(evaluate: EvaluateSpec) -> Iterator[Need]:
    if evaluate.tasks:
        yield Need("evaluate.tasks", "lm-eval", "eval")
    if predicted := set(evaluate.of_predictions) - {"spearman"}:
        yield Need(f"evaluate.metrics {min(predicted)}", "scikit-learn")
