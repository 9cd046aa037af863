"""A job that is filled in from another trainer's keys: the parts that all trainers have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.records import COLUMNS, LABELLED, PREFERENCES, TALKING
from orchestrator.launch.first_job import GPUS, OF_LABELLED, rows_for
from orchestrator.launch.foreign_jobs.counted import counted, is_local_source, sequences_in
from orchestrator.launch.foreign_jobs.read import Arguments
from orchestrator.launch.labelled_rows import Labelled, labelled_rows, labels_of_sources
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.kinds import KINDS

STEPS = 1000
"""Steps of a job whose rows cannot be counted."""
SCHEDULES = {
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine", "linear": "linear",
    "polynomial": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "wsd", "rex": "linear", "one_cycle": "cosine",
    "sqrt": "cosine",
}  # fmt: skip
IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit")
"""AdamW with moments in 8 bits, by bitsandbytes or torchao."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv", "query", "value", "wq", "wv", "c_attn", "Wqkv")
TARGETS = ["*.attention.*"]
ALL_LINEAR = ["*.attention.*", "*.feedforward.*"]


@dataclass
class ForeignJob:
    """The job so far, and what its reader should know.

    Attributes:
        arguments: the keys of the other trainer.
        asked: the objective that the user asks for; None for that of the configuration.
        document: the job file as an object.
        lines: what was assumed, and what is to do before the run.
        by_source: rows of the training data, by source; None for a source whose rows are not known.
        epoch_steps: steps of an epoch; None if the rows are not known, or steps are given.
        uncounted: why the rows of a source are not known.
        label_column: the column with the label; None if the configuration names none.
    """

    arguments: Arguments
    asked: str | None = None
    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    by_source: list[int | None] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    label_column: str | None = None
    epoch_steps: int | None = None
    _labelled: dict[str, Labelled | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.document = {
            "name": "job", "seed": 17, "workload": {}, "data": {}, "train": {"optimizer": {}},
            "parallel": {"rest": "auto"}, "resources": {}, "checkpoint": {"every": 100, "keep": 3, "export": "hf"},
        }  # fmt: skip

    def part(self, name: str) -> dict[str, Any]:
        """Return a section of the job."""
        result: dict[str, Any] = self.document[name]
        return result

    def model(self, named: Any) -> None:
        """Start from a model: a folder, or a name on the Hub, which is to be downloaded."""
        if not named:
            raise InputError(
                "the configuration names no model",
                "--from",
                "add the model's key, as base_model or model_name_or_path",
            )
        folder = str(named)
        if not Path(folder).expanduser().is_dir():
            folder = f"models/{str(named).strip('${}/').rsplit('/', 1)[-1]}"
            if not Path(folder).is_dir() and "$" in str(named):
                self.lines.append(f"to do: put the model of {named} into {folder}")
            elif not Path(folder).is_dir():
                self.lines.append(f"to do: hf download {named} --local-dir {folder}")
        self.part("workload")["model"] = f"hf:{folder}"
        self.part("data")["tokenizer"] = folder

    @property
    def rows(self) -> int | None:
        """Return the rows of the training data; None if those of a source are not known."""
        counts = [rows for rows in self.by_source if rows is not None]
        return sum(counts) if len(counts) == len(self.by_source) and counts else None

    def default(self, key: str, value: float, whose: str) -> float:
        """Return a value that the configuration does not give, and say so."""
        self.lines.append(f"{key}: {value:g}, the default of {whose}, because the configuration gives none")
        return value

    @property
    def folder(self) -> Path:
        """Return the folder of the model or the tokenizer."""
        return Path(str(self.part("data").get("tokenizer", "")))

    @property
    def is_encoder(self) -> bool:
        """Return whether the model is an encoder; False if its folder is not here or its class is unknown."""
        described = _described(self.folder)
        return described is not None and described.architecture == "encoder"

    def source(self, named: Any, split: str = "train", config: str | None = None, files: Any = None) -> str:
        """Return the URI of a data set: files that are here, or a name on the Hub, which is to be downloaded."""
        path = str(files or named)
        if files or "://" in path or Path(path).expanduser().exists() or glob(path):
            return path
        if re.search(r"\.(jsonl?|parquet|csv|txt|arrow)$", path) or path.startswith(("/", "./", "~", "$")):
            return path
        folder = f"data/{path.rstrip('/').rsplit('/', 1)[-1]}"
        plain = re.sub(r"\[.*\]$", "", split)
        uri = f"{folder}/{config or '*'}/{plain}/*.parquet"
        if plain != split:
            self.lines.append(f"{named}: all of {plain} is read; {split} took a part of it")
        if not glob(uri):
            todo = f"to do: hf download {path} --repo-type dataset --revision refs/convert/parquet --local-dir {folder}"
            self.lines.extend([todo] if todo not in self.lines else [])
        return uri

    def labelled(self, uri: str) -> Labelled | None:
        """Return what the rows of a source with labels are for; None without labels. The rows are read once."""
        if uri not in self._labelled:
            self._labelled[uri] = labelled_rows([uri], self.asked, False, self.label_column)
        return self._labelled[uri]

    def sources(self, objective: str, sources: Sequence[tuple[str, Any, float]]) -> None:
        """Set the training data: URI, `field` (None to find out), and weight of each source."""
        made: list[dict[str, Any]] = []
        found: dict[str, Labelled] = {}
        unknown: list[str] = []
        for uri, columns, weight in sources:
            count = counted(uri)
            self.by_source.append(count.rows)
            self.uncounted.extend([count.why_not] if count.why_not else [])
            labelled = self.labelled(uri) if objective in OF_LABELLED and is_local_source(uri) else None
            if labelled:
                found[uri] = labelled
                objective, columns = labelled.objective, labelled.field
            elif columns is None and is_local_source(uri):
                rows = rows_for(uri, self.asked)
                fits = rows is not None and (rows.objective == objective or objective not in COLUMNS)
                columns = rows.field if rows and fits else None
            if not labelled and objective in LABELLED:
                unknown.append(uri)
            if columns is None and objective in COLUMNS:
                columns = _default_columns(objective)
                self.lines.append(
                    f"data.sources.{len(made)}.field: assumed of {uri}; check it when the files are here"
                )
            source: dict[str, Any] = {"uri": uri}
            if columns is not None:
                source["field"] = columns
            if weight != 1.0:
                source["weight"] = weight
            made.append(source)
        if found and (labels := labels_of_sources(found)):
            self.part("data")["labels"] = [*labels]
        if unknown:
            self.part("data").setdefault("labels", ["0", "1"])
            known = f"those of {', '.join(found)} alone" if found else "assumed"
            self.lines.append(f"data.labels: {known}; list them, or run `init` again when the files are here")
        self.part("data")["sources"] = made
        self.part("workload")["objective"] = objective

    def held_out(self, uri: str) -> None:
        """Evaluate on files of their own, whose rows have the columns of the training data."""
        source: dict[str, Any] = {"uri": uri}
        if (columns := self.part("data")["sources"][0].get("field")) is not None:
            source["field"] = columns
        self.part("data")["validation"] = {"sources": [source]}

    def chat_template(self, named: Any) -> None:
        """Name a chat template, if the tokenizer has none of its own."""
        if self.part("workload")["objective"] not in TALKING or _has_template(self.folder):
            return
        shipped = {"llama3": "llama3", "gemma": "gemma", "gemma3": "gemma3", "mistral_v1": "mistral", "phi_3": "phi3",
                   "phi_35": "phi3", "qwen_25": "qwen2.5", "qwen3": "qwen3", "chatml": "qwen2.5",
                   "deepseek_v3": "deepseek", "llama2": "llama2", "inst": "llama2"}  # fmt: skip
        if str(named) in shipped:
            self.part("data")["chat_template"] = f"shipped:{shipped[str(named)]}"
        elif self.folder.is_dir():
            self.lines.append(
                "the tokenizer has no chat template: set data.chat_template, for example shipped:qwen3"
            )

    def length(self, tokens: Any) -> None:
        """Set the tokens of a sequence, as many as the model has positions for."""
        wanted = int(tokens or 1024)
        positions = _positions(self.folder)
        if positions and wanted > positions:
            remark = f"; {wanted} were asked for" if tokens else ""
            self.lines.append(f"data.sequence_length: {positions}, the positions of the model{remark}")
        self.part("data")["sequence_length"] = min(wanted, positions or wanted)

    def batch(self, micro: float, accumulation: float, devices: float) -> None:
        """Set the global batch and the micro-batch."""
        total = int(micro * accumulation * devices)
        self.part("train")["global_batch"] = max(1, total)
        self.lines.append(
            f"train.global_batch: {total} = {micro:g} per device x {accumulation:g} accumulation steps "
            f"x {devices:g} devices"
        )
        if not self.arguments.flag("auto_find_batch_size"):
            self.part("parallel")["micro_batch"] = max(1, int(micro))

    def steps(self, max_steps: float | None, epochs: float | None) -> None:
        """Set the number of steps: `max_steps`, or `epochs` passes over the rows or over sequences packed from them."""
        train, passes = self.part("train"), epochs or 1
        if max_steps and max_steps > 0:
            train["steps"] = int(max_steps)
            return
        # A step with generated answers has several to each row, and a later step may learn from them again.
        rollout = self.document.get("rollout", {})
        batch = train["global_batch"] // rollout.get("group", 1)
        uses = rollout.get("epochs", 1)
        length = self.part("data")["sequence_length"] if self._packs() else None
        packed = self._sequences(length) if length else None
        if packed is not None:
            train["steps"] = max(1, math.ceil(packed * passes / batch))
            self.epoch_steps = max(1, math.ceil(packed / batch))
            self.lines.append(
                f"train.steps: {train['steps']:,} = {_epochs(passes)} of about {packed:,.1f} sequences "
                f"/ {batch} a step; a sequence packs rows into {length} tokens, and "
                "`data inspect JOB` counts sequences"
            )
        elif self.rows:
            train["steps"] = max(1, math.ceil(self.rows * passes / batch)) * uses
            self.epoch_steps = max(1, math.ceil(self.rows / batch)) * uses
            again = f" x rollout.epochs {uses}" if uses > 1 else ""
            self.lines.append(
                f"train.steps: {train['steps']:,} = {_epochs(passes)} of {self.rows:,} rows / {batch} a step{again}"
            )
        else:
            train["steps"] = STEPS
            unit = "sequences" if length else "rows"
            self.lines.append(
                f"train.steps: {STEPS:,}, because {self.uncounted[0] if self.uncounted else 'there are no rows'}; "
                f"for {_epochs(passes)} set it to {passes:g} x {unit} / {batch}"
            )
        if length and packed is None:
            self.lines.append(
                f"data.sequence_length: rows shorter than {length} tokens are packed, so {train['steps']:,} steps "
                f"may be more than {_epochs(passes)}; `data inspect JOB` counts the sequences; set "
                f"train.steps to {passes:g} x sequences / {batch}"
            )

    def _packs(self) -> bool:
        """Return whether a sequence holds several rows."""
        workload = self.part("workload")
        if workload["objective"] == "conversation":
            return workload.get("options", {}).get("pack") != "no"
        return workload["objective"] not in COLUMNS

    def _sequences(self, length: int) -> float | None:
        """Return about how many sequences the training data fills; None if that cannot be known here."""
        whole_rows = self.part("workload")["objective"] == "conversation"
        result = [
            sequences_in(
                source["uri"],
                source.get("field"),
                rows=rows,
                folder=self.folder,
                length=length,
                whole_rows=whole_rows,
            )
            for source, rows in zip(self.part("data")["sources"], self.by_source, strict=True)
        ]
        counts = [count for count in result if count is not None]
        return sum(counts) if len(counts) == len(result) else None

    def optimizer(
        self, name: Any, lr: Any, schedule: Any, min_ratio: float | None, default: str = "linear"
    ) -> None:
        """Set the optimizer and its schedule."""
        made = self.part("train")["optimizer"]
        wanted = str(name or "adamw").lower()
        kind = next((ours for ours in KINDS if ours in wanted), None)
        if wanted in IN_8_BITS:
            kind = "adamw_8bit"
        made["name"] = kind or "adamw"
        if wanted not in ("adamw_torch", "adamw_torch_fused", *IN_8_BITS, kind):
            self.lines.append(f"train.optimizer.name: {made['name']}, in fp32; {name} was asked for")
        if lr is None:
            lr = self.default(
                "train.optimizer.lr", OptimizerSpec.model_fields["lr"].default, whose="this project"
            )
        made["lr"] = float(lr)
        schedule_name = str(schedule or default).rsplit(".", 1)[-1].lower()
        made["schedule"] = SCHEDULES.get(schedule_name, "cosine")
        if schedule_name not in SCHEDULES:
            self.lines.append(f"train.optimizer.schedule: cosine; {schedule} was asked for")
        if made["schedule"] in ("linear", "cosine", "wsd"):
            made["final_lr"] = float(min_ratio or 0.0)
        if made["schedule"] == "wsd":
            made["decay"] = "20%"

    def warmup(self, steps: float | None, share: float | None) -> None:
        """Set the warm-up, shorter than the training."""
        made, total = self.part("train")["optimizer"], self.part("train")["steps"]
        if steps and 0 < steps < 1:
            steps, share = None, steps
        if steps and steps < total:
            made["warmup"] = int(steps)
        elif steps or share:
            made["warmup"] = f"{min(share or 0.1, 0.9) * 100:g}%"
            if steps:
                self.lines.append(f"train.optimizer.warmup: 10%; {steps:g} of {total} steps were asked for")

    def adapter(
        self, rank: Any, alpha: Any, targets: Any, nf4: bool, dora: bool = False, scaled: bool = False
    ) -> None:
        """Train low-rank matrices."""
        names = [targets] if isinstance(targets, str) else list(targets or ())
        wide = any(not any(part in str(name) for part in ATTENTION) for name in names)
        patterns = ALL_LINEAR if wide else TARGETS
        if (described := _described(self.folder)) and described.as_transformer is None:
            patterns = [f"*{name}" for name in names if "." not in str(name) and "all" not in str(name)] or [
                "*_proj"
            ]
        made: dict[str, Any] = {
            "kind": "dora" if dora else "rslora" if scaled else "lora",
            "rank": int(rank or 8),
            "alpha": float(alpha or 16),
            "targets": [*patterns],
        }
        if nf4:
            made["quantize"] = "nf4"
        self.part("workload")["adapter"] = made
        if names:
            self.lines.append(
                f"workload.adapter.targets: {', '.join(patterns)}, for {', '.join(map(str, names))}"
            )

    def workers(self) -> None:
        """Ask for as many workers as the layout divides over, on GPUs if there are some."""
        layout = self.part("parallel")
        min_workers = math.prod(int(layout.get(name, 1)) for name in ("tp", "pp", "cp"))
        gpus = len(glob(GPUS))
        worker: dict[str, Any] = {"cpu": 1, "gpu": int(gpus > 0)}
        self.document["resources"] = {
            "workers": {"min": min_workers, "max": max(min_workers, gpus, 2)},
            "per_worker": worker,
        }


def _epochs(passes: float) -> str:
    return f"{passes:g} epoch{'' if passes == 1 else 's'}"


def _default_columns(objective: str) -> dict[str, str]:
    """Return the columns that data sets for an objective usually have."""
    if objective == "conversation":
        return {"messages": "messages"}
    if objective in PREFERENCES and objective != "kto":
        return {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    return {name: name for name in COLUMNS[objective].needed}


def _positions(folder: Path) -> int | None:
    """Return the positions of the model in a folder; None if it is not here, or if they are not bounded."""
    described = _described(folder)
    return int(described.max_positions) if described and described.max_positions < 2**40 else None


def _described(folder: Path) -> Any:
    """Return the description of the model in a folder; None if it is not here, or not known."""
    if not (folder / "config.json").is_file():
        return None
    from workloads.describe import describe
    from workloads.errors import WorkloadError

    try:
        return describe(f"hf:{folder}")
    except WorkloadError:  # the check of the job says why
        return None


def _has_template(folder: Path) -> bool:
    from orchestrator.data.prepare.chat_template import templates_in
    from orchestrator.data.store.data_folder import DataFolder

    return folder.is_dir() and bool(templates_in(DataFolder(str(folder))))
