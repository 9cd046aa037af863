"""What the guides tell to type is typed, in order, a folder for each page, with less text and fewer steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import hf_tokenizers
import pytest
import transformers
from jobs import job, orchestrator, started, wait_for, write_job, write_text

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^```(\w*)(?: title="([\w.]+)")?\n(.*?)^```', re.M | re.S)
LINE = re.compile(r"^(?:\$ |    )([a-z]+ .*)$", re.M)
INLINE = re.compile(r"`(orchestrator [a-z-]+ [^`]+)`")
PROGRAMS = (
    "orchestrator",
    "python",
    "cp",
    "make",
    "cat",
    "echo",
    "sbatch",
    "sky",
    "terraform",
    "helm",
    "docker",
    "kubectl",
)
WHOLE = re.compile(r"name:.*workload:", re.S)
"""A job file, and no part of one."""
ELSEWHERE = {
    "make": "the suite itself, and the quickstart, which the suite's own jobs are like: minutes each",
    "cat hosts": "shows a file of the next line",
    "echo": "machines that ssh reaches",
    "orchestrator cluster up --hosts": "machines that ssh reaches: test_ssh_cluster.py has servers of it",
    "orchestrator submit text.yaml --run-dir /shared": "goes to those machines",
    "sbatch": "a Slurm cluster: test_slurm.py has an srun that starts processes",
    "sky": "a cloud: test_skypilot.py runs what sky would",
    "terraform": "a cloud",
    "helm": "a cluster of Kubernetes",
    "docker": "a daemon of Docker",
    "kubectl": "a cluster of Kubernetes",
    "orchestrator status s3://": "a store with a run: test_object_store.py has one",
    "orchestrator stop runs/notes": "a chain that is at work: test_chain.py",
    "orchestrator stop runs/small": "a run that is under way: test_jobs.py",
    "orchestrator chaos": "several runs on nodes, each broken: minutes, in test_chaos.py",
    "orchestrator calibrate --from": "a profile in the user's home: unit/orchestrator/verify/test_calibrate.py",
    "orchestrator serve": "never ends: tests/unit/orchestrator/cli/test_pages.py asks its pages",
    "orchestrator profile": "a run that is under way: tests/dist/test_profile.py",
}  # fmt: skip
"""What is not typed, by how it begins: what it needs, and what stands in for it."""
OF_INIT = {"steps: 200": "steps: 12", "global_batch: 32": "global_batch: 8", "every: 20,": "every: 4,"}
OF_JOB = {"steps: 300": "steps: 12", "global_batch: 32": "global_batch: 8", "every: 20": "every: 4",
          "warmup: 30": "warmup: 2", "train_bpe: 4096": "train_bpe: 512"}  # fmt: skip
NAMED = {
    "RUN RUN...": "runs/small runs/other",
    "RUN": "runs/small",
    "JOB": "job.yaml",
    "--step N": "--step 8",
}
OF_TASKS = OF_INIT | {
    "/somewhere/else": "elsewhere", "trials: 8": "trials: 2", "share: 0.01": "share: 0.1", "every: 50": "every: 4",
    "--until 40": "--until 4", "--step 100": "--step 8", "train.steps=400": "train.steps=24",
    "RUN": "runs/text", "JOB": "job.yaml", "serve runs": "serve",
}  # fmt: skip
FIRST, UP = ["orchestrator run job.yaml"], ["orchestrator cluster up --local 2"]
OF_EVALUATION = {
    "checkpoint list": "checkpoint list runs/small", "<name>": "small", "--step 400": "--step 8",
    "00000400": "00000008",
}  # fmt: skip
EXPORTED = ["orchestrator run job.yaml --set checkpoint.export=hf"]
PAGES: dict[str, tuple[dict[str, str], list[str]]] = {
    "docs/guides/tasks.md": (OF_TASKS, []),
    "docs/guides/run-tasks.md": (OF_TASKS, [
        'orchestrator init text.yaml --data "my/*.txt"',
        "orchestrator run text.yaml",
        'orchestrator run text.yaml --set "data.validation={share: 0.1}" --run-dir runs/held-out',
    ]),
    "docs/guides/clusters.md": ({"gpt-docs": "small", "skypilot job.yaml": "skypilot gpu.yaml"}, []),
    "docs/guides/evaluation.md": (OF_EVALUATION, EXPORTED),
    "docs/guides/evaluation-tasks.md": (OF_EVALUATION, EXPORTED),
    "docs/guides/elasticity.md": (NAMED, FIRST),
    "docs/guides/images.md": ({"digits.yaml": "digits.yaml --set train.steps=30"}, []),
    "docs/guides/spot-cluster.md": ({"--kubeconfig ~/.kube/config ": "", "job.yaml": "gpu.yaml"}, []),
    "docs/guides/own-code.md": ({}, UP),
    "docs/guides/chains.md": (OF_JOB | {"steps: 100": "steps: 8", "every: 50": "every: 4", "share: 0.02": "share: 0.1",
                                        "{keep_best: v": "{every: 4, keep_best: v",
                                        "run --dry-run": "run chain.yaml --dry-run", "<chain>": "notes"}, []),
    "docs/guides/failures.md": (NAMED, FIRST),
    "docs/guides/layouts.md": (NAMED, []),
    "docs/guides/planning.md": (NAMED, FIRST),
    "docs/guides/watching.md": (NAMED, [*FIRST, "orchestrator run job.yaml --run-dir runs/other"]),
    "docs/index.md": ({"RUN": "runs/small"}, []),
    "docs/quickstart.md": (OF_INIT | {"job.yaml": "first.yaml"}, []),
    "README.md": (OF_JOB, UP),
}  # fmt: skip
"""The pages that tell what to type: what is written smaller here, also in job files, and what is typed before."""


def smaller(page: str, text: str) -> str:
    """What the page shows, as it is typed here."""
    for old, new in PAGES[page][0].items():
        text = text.replace(old, new)
    return text


def commands(page: str) -> list[str]:
    """What the page tells to type, in its order: in lines of their own, and within sentences."""
    text = re.sub(r" \\\n\s+", " ", (ROOT / page).read_text())
    found = [(match.start(), match[1]) for match in LINE.finditer(text) if match[1].split()[0] in PROGRAMS]
    prose = BLOCK.sub(lambda block: " " * len(block[0]), text)
    found += [(match.start(), " ".join(match[1].split())) for match in INLINE.finditer(prose)]
    return [smaller(page, re.sub(r"\s+#.*", "", command)) for _, command in sorted(found)]


def why_elsewhere(command: str) -> str:
    """What a command needs that is not here; empty if it is typed."""
    return next((why for begins, why in ELSEWHERE.items() if command.startswith(begins)), "")


def furnish(page: str, folder: Path) -> None:
    """What the commands read: text, rows, a model, a task, a job; and the files that the page shows."""
    for name in ("corpus", "my", "wiki", "notes"):
        write_text(folder / name, 40_000)
    texts = [topics[key][:400] for key in sorted(topics)[:60]]
    talks = [{"messages": [{"role": "user", "content": f"About {number}?"}, {"role": "assistant", "content": text}]}
             for number, text in enumerate(texts)]  # fmt: skip
    for name, rows in (
        ("my/rows.jsonl", [{"text": text} for text in texts]),
        ("my/chat.jsonl", talks),
        ("chats.jsonl", talks),
    ):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "elsewhere").mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    quiz = {"task": "quiz", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}},
            "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "question",
            "doc_to_choice": "choices", "doc_to_target": "label"}  # fmt: skip
    (folder / "quiz.yaml").write_text(json.dumps(quiz))
    (folder / "quiz.jsonl").write_text(
        json.dumps({"question": "The", "choices": [" a", " b"], "label": 0}) + "\n"
    )
    document = job("corpus/*.txt") | {"checkpoint": {"every": 4, "keep": 9, "export": None}}
    document["data"]["validation"] = {"share": 0.1}
    write_job(folder, document)
    document["resources"]["per_worker"] = {"cpu": 1, "gpu": 1}
    write_job(folder, document, "gpu.yaml")
    model = folder / "path" / "to" / "model"
    model.mkdir(parents=True)
    hf_tokenizers.gpt2(model)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(str(model))
    encoder = folder / "path" / "to" / "encoder"
    encoder.mkdir()
    hf_tokenizers.bert(encoder)
    small = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(small).save_pretrained(str(encoder))
    reviews = "".join(f"a film of {n} minutes,{('bad', 'good')[n % 2]}\n" for n in range(80))
    (folder / "my" / "reviews.csv").write_text(f"review,label\n{reviews}")
    shown = BLOCK.findall((ROOT / page).read_text())
    for kind, title, text in shown:
        if title.endswith((".py", ".yaml")):
            (folder / title).write_text(smaller(page, text))
        elif kind == "python" and "class Model" in text:
            (folder / "my_model.py").write_text(text)
    first = next((text for kind, title, text in shown if kind == "yaml" and WHOLE.match(text)), None)
    if first:
        shutil.copy(ROOT / "examples" / "chat.jinja", folder)
        (folder / ("chain.yaml" if "stages:" in first else "job.yaml")).write_text(smaller(page, first))


def test_what_is_elsewhere_is_told_by_a_guide_and_needs_what_is_not_here() -> None:
    told = [command for page in PAGES for command in commands(page)]
    assert [begins for begins in ELSEWHERE if not any(command.startswith(begins) for command in told)] == []
    assert len([command for command in told if not why_elsewhere(command)]) > 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_what_a_guide_tells_to_type_works(page: str, tmp_path: Path) -> None:
    furnish(page, tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        for command in [*PAGES[page][1], *filter(lambda each: not why_elsewhere(each), commands(page))]:
            print(f"$ {command}", flush=True)
            done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=400,
                                  env={**os.environ, "PATH": path})  # fmt: skip
            stopped = 3 if "--until" in command else 0  # a limit ends it, with a checkpoint in place
            assert done.returncode == stopped, f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            for written in tmp_path.glob("*.yaml"):
                written.write_text(smaller(page, written.read_text()))
    finally:
        if any("cluster up --local" in command for command in [*PAGES[page][1], *commands(page)]):
            orchestrator("cluster", "down", cwd=tmp_path)


def newest(commits: Path) -> int:
    """The step of the newest commit."""
    return max(
        (int(each.parent.name.removeprefix("step-")) for each in commits.glob("*/manifest.json")), default=0
    )


@pytest.mark.slow
def test_the_model_of_the_guide_to_own_code_is_killed_and_goes_on(tmp_path: Path) -> None:
    furnish("docs/guides/own-code.md", tmp_path)
    undisturbed = orchestrator("run", "job.yaml", "--run-dir", "runs/quiet", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    commits = tmp_path / "runs" / "digits" / "checkpoints"
    for step in (10, 30):
        with started("run", "job.yaml", cwd=tmp_path):
            wait_for(lambda step=step: newest(commits) >= step, f"the commit at step {step}")
    done = orchestrator("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [
        (tmp_path / "runs" / name / "export" / "model.safetensors").read_bytes()
        for name in ("quiet", "digits")
    ]
    assert ends[0] == ends[1]
