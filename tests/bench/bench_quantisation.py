"""What rounding to 4 bits costs a decoder: after training alone, with quantisation-aware training, and with a teacher.

    orchestrator data corpus corpus
    python tests/bench/bench_quantisation.py FOLDER corpus/*.txt

A Llama of 0.7 M parameters trains on the text. From its weights it trains `--more` steps in full precision,
quantisation-aware, and quantisation-aware with the run in full precision as its teacher; the seeds give the order of
these steps' samples. The perplexity of each export is what `orchestrator evaluate` computes with it on the last 4 % of
each file. llama.cpp's files are read by transformers for it. A second call with the same folder trains what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from local_run import LocalGang, drive_here
from prepared import prepare_here, prepare_sets_here

LENGTH, BATCH, WORDS = 64, 16, 1024
SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 384}
FORMATS: dict[str, dict[str, Any]] = {
    "int4, 32": {"weights": "int4", "group": 32},
    "int4, a row": {"weights": "int4", "group": "row"},
    "q4_0": {"weights": "q4_0"},
}
WAYS = ("rounded", "aware", "distilled")
SAME = {"labels": 0.5, "logits": {"weight": 0.5, "temperature": 1.0}}
"""The loss of a student whose teacher has its size."""
HELD_OUT = 0.04


def split(folder: Path, files: list[Path]) -> None:
    """Write the text that is trained on and the end of each file, which is held out, to two folders."""
    for name in ("train", "held"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for file in files:
        text = file.read_text()
        cut = text.rfind("\n", 0, round(len(text) * (1 - HELD_OUT))) + 1
        (folder / "train" / file.name).write_text(text[:cut])
        (folder / "held" / file.name).write_text(text[cut:])


class Seed:
    """The runs and exports of one seed."""

    def __init__(self, folder: Path, seed: int, options: argparse.Namespace) -> None:
        self._folder, self._seed, self._options = folder, seed, options
        self._runs = folder / f"seed-{seed}"
        self._model: dict[str, Any] = {"model": "llama-tiny", "changes": SIZES | options.changes}
        self._tokenizer: Any = {"train_bpe": WORDS}

    def train(self, name: str, steps: int, lr: float, **parts: Any) -> Path:
        """Train a run to its end, which one that has ended has done."""
        run = (self._folder if name == "base" else self._runs) / name
        document = {
            "name": name,
            "seed": 1 if name == "base" else self._seed,
            "workload": self._model,
            "data": {
                "sources": [{"uri": str(self._folder / "train" / "*.txt")}],
                "tokenizer": self._tokenizer,
                "sequence_length": LENGTH,
            },
            "train": {
                "steps": steps,
                "global_batch": BATCH,
                "optimizer": {"lr": lr, "warmup": min(50, steps // 10), "schedule": "cosine"},
            },
            "resources": {"workers": 1},
            "checkpoint": {"every": steps, "keep": 1, "export": None},
            "tracking": None,
            **parts,
        }  # fmt: skip
        if not (run / "summary.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            drive_here(document, str(run), self._folder / "cache", gang=lambda: LocalGang([1]))
        return run

    def rows(self) -> Iterator[dict[str, Any]]:
        """Train, export and evaluate."""
        base = self.train("base", self._options.steps, 3e-3)
        more = {"steps": self._options.more, "lr": self._options.lr}
        self._model = self._model | {"init_from": str(base)}
        full = self.train("full", **more)
        yield {"way": "full", "format": "fp32", "perplexity": self.perplexity(full, "full", None)}
        for name in self._options.formats:
            quantize = FORMATS[name]
            short = name.replace(", ", "-").replace(" ", "-")
            aware = self.train(f"aware-{short}", **more, quantize=quantize)
            distill = {"teacher": str(full), **SAME}
            distilled = self.train(f"distilled-{short}", **more, quantize=quantize, distill=distill)
            for way, run in zip(WAYS, (full, aware, distilled), strict=True):
                found = self.perplexity(run, f"{way}-{short}", quantize)
                yield {"way": way, "format": name, "perplexity": found}

    def perplexity(self, run: Path, name: str, quantize: dict[str, Any] | None) -> float:
        """Export the last commit of a run, rounded, and return its perplexity on held-out text."""
        from orchestrator.evaluate.of_export import evaluate_export, spec_of_export
        from orchestrator.resolve.prepared_data import PreparedData

        target, step = self._runs / "exports" / name, self._options.more
        self.export(run, target, step, quantize)
        spec, _ = spec_of_export(
            str(target), {"held": str(self._folder / "held" / "*.txt")},
            [f"data.sequence_length={LENGTH}", f"train.global_batch={BATCH}"],
        )  # fmt: skip
        cache = str(self._folder / "cache")
        data = prepare_here(spec, cache)
        row = evaluate_export(
            spec.model_dump(mode="json"), PreparedData(data, prepare_sets_here(spec, cache, data)), step,
            model=spec.workload.model, global_batch=BATCH, worker=spec.resources.per_worker,
        )  # fmt: skip
        return math.exp(row["sets"]["held"]["loss"])

    def export(self, run: Path, target: Path, step: int, quantize: dict[str, Any] | None) -> None:
        """Export a commit of a run for transformers, rounded if it is asked for."""
        from orchestrator.export.converted import form_option
        from orchestrator.export.hugging_face import export
        from orchestrator.export.quantised import scheme_option

        shutil.rmtree(target, ignore_errors=True)
        of_gguf = quantize is not None and quantize["weights"] == "q4_0"
        if of_gguf:
            form = form_option("gguf", None, "q4_0" if run.name == "full" else None)
        else:
            given = (quantize["weights"], str(quantize["group"])) if quantize else (None, None)
            form = form_option("hf", None, None, scheme_option("hf", *given, None))
        export(str(run), step, str(target), form=form)
        if of_gguf:
            as_read_by_transformers(target)


def as_read_by_transformers(folder: Path) -> None:
    """Read the GGUF file of a folder with transformers, and save the model in the same folder in full precision."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    given = {"gguf_file": "model.gguf", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    model.hf_quantizer = None  # with it transformers does not save a model that it read from a GGUF file
    del model.config.quantization_config
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(folder, **given).save_pretrained(folder)


def main() -> None:
    """Print the rows and the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("files", type=Path, nargs="+")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--more", type=int, default=300)
    options.add_argument("--lr", type=float, default=3e-4, help="learning rate of the --more steps")
    options.add_argument("--changes", type=json.loads, default={}, help="other sizes of the model, as JSON")
    options.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    given = options.parse_args()
    split(given.folder, given.files)
    rows = []
    for seed in given.seeds:
        for row in Seed(given.folder.absolute(), seed, given).rows():
            rows.append({"seed": seed, **row})
            print(json.dumps(rows[-1]), flush=True)
    full = {row["seed"]: row["perplexity"] for row in rows if row["way"] == "full"}
    for name, way in dict.fromkeys((row["format"], row["way"]) for row in rows):
        found = {row["seed"]: row["perplexity"] for row in rows if (row["format"], row["way"]) == (name, way)}
        lost = [100 * (value / full[seed] - 1) for seed, value in found.items()]
        mean = statistics.mean(found.values())
        print(
            f"{name:12} {way:10} {mean:8.2f}  {statistics.mean(lost):+5.2f} %",
            [f"{each:+.2f}" for each in lost],
        )


if __name__ == "__main__":
    main()
