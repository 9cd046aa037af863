"""Configurations of other trainers become jobs that `plan` accepts, and every key has a place or a reason."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from chat_folder import write_chat_folder
from datasets import Dataset
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.config.paths import resolve_paths
from orchestrator.config.spec import parse
from orchestrator.launch.foreign_jobs.counted import Counted, counted, sequences_in
from orchestrator.launch.foreign_jobs.read import read_foreign
from orchestrator.launch.foreign_jobs.translate import Translated, translate
from orchestrator.launch.labelled_rows import labelled_rows
from orchestrator.launch.planned_job import planned_on_paper

AXOLOTL = """
base_model: ORG/Small
load_in_8bit: false
datasets:
  - path: ORG/rows
    type: alpaca
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
bf16: auto
gradient_checkpointing: true
evals_per_epoch: 4
loss_watchdog_threshold: 5.0
wandb_project: demo
"""
TRL = """
#!/bin/bash
MODEL=ORG/Small
accelerate launch --config_file zero2.yaml trl/scripts/dpo.py \\
    --model_name_or_path $MODEL --dataset_name ORG/pairs --beta 0.05 \\
    --per_device_train_batch_size=4 --gradient_accumulation_steps 2 --learning_rate 5e-7 \\
    --max_steps 30 --warmup_steps 3 --logging_steps 1 --lr_scheduler_type constant_with_warmup \\
    --push_to_hub --output_dir out/small-dpo  # a comment
"""
TITAN = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "models/Small"
[optimizer]
name = "AdamW"
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.5
[training]
local_batch_size = 8
seq_len = 64
steps = 20
dataset_path = "corpus.txt"
max_norm = 1.0
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
[experimental]
custom_import = "mine"
"""
VERL = """
set -x
prompt=64
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files=$HOME/data/rows/train.parquet \\
    data.train_batch_size=8 data.max_prompt_length=$prompt data.max_response_length=$((prompt * 2)) \\
    actor_rollout_ref.model.path=ORG/Small actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm trainer.total_epochs=2 trainer.save_freq=5 \\
    trainer.n_gpus_per_node=8
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what was downloaded: a model, and data of each kind."""
    monkeypatch.chdir(tmp_path)
    write_chat_folder(tmp_path / "models" / "Small", hidden=64)
    talk = [{"role": "user", "content": "a?"}]
    answer = [{"role": "assistant", "content": "b"}]
    rows: dict[str, dict[str, Any]] = {
        "data/rows/default/train/0.parquet": {"instruction": "a", "input": "", "output": "b"},
        "data/pairs/default/train/0.parquet": {"prompt": talk, "chosen": answer, "rejected": answer},
        "data/rows/train.parquet": {"prompt": talk, "reward_model": {"ground_truth": "4"}},
    }
    for name, row in rows.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row] * 40), name)
    Path("corpus.txt").write_text("a text of some words\n" * 400)
    return tmp_path


def told(text: str, name: str) -> Translated:
    Path(name).write_text(text)
    found = translate(Path(name))
    assert parse(yaml.safe_load(found.text(name)), name) == parse(found.document, name)
    planned_on_paper(resolve_paths(parse(found.document, name), Path.cwd()), "h100-80")  # `plan` accepts it
    return found


def test_axolotl() -> None:
    Path("packed.yaml").write_text(AXOLOTL)
    packed = translate(Path("packed.yaml")).document
    assert packed["train"]["steps"] == 2  # 40 short rows become a few sequences, in batches of 4, twice
    found = told(AXOLOTL.replace("sample_packing: true", "sample_packing: false"), "axolotl.yaml")
    job = found.document
    assert job["workload"]["model"] == "hf:models/Small"
    assert job["workload"]["adapter"]["targets"] == ["*.attention.*"]
    assert (job["workload"]["adapter"]["rank"], job["workload"]["adapter"]["alpha"]) == (16, 32.0)
    (source,) = job["data"]["sources"]
    assert source["uri"] == "data/rows/*/train/*.parquet"
    assert source["field"] == {"prompt": "{instruction}\n\n{input}", "completion": "output"}
    assert job["data"]["sequence_length"] == 256  # the positions of the model
    assert (job["train"]["global_batch"], job["train"]["steps"]) == (4, 20)  # 40 rows, twice
    assert job["train"]["optimizer"]["lr"] == 2e-4
    assert (job["train"]["optimizer"]["warmup"], job["train"]["optimizer"]["final_lr"]) == ("10%", 0.0)
    assert job["evaluate"]["every"] == 2  # four times in ten steps
    assert job["parallel"]["recompute"] == "full"
    left = dict(found.left)
    assert {*left} == {"lora_dropout", "loss_watchdog_threshold", "wandb_project"}
    assert left["wandb_project"] == "sinks.wandb, as in {project: demo}"


def test_the_script_of_a_trainer() -> None:
    found = told(TRL, "dpo.sh")
    job = found.document
    assert (job["workload"]["objective"], job["workload"]["options"]["beta"]) == ("dpo", 0.05)
    assert (job["train"]["steps"], job["train"]["global_batch"]) == (30, 8)
    assert job["train"]["optimizer"]["warmup"] == 3
    assert job["train"]["optimizer"]["schedule"] == "constant"
    assert job["name"] == "small-dpo"
    assert "checkpoint.push" in dict(found.left)["push_to_hub"]


def test_torchtitan() -> None:
    found = told(TITAN, "debug.toml")
    job = found.document
    assert (job["workload"]["model"], job["data"]["sources"]) == (
        "llama-tiny",
        [{"uri": "corpus.txt", "field": "text"}],
    )
    assert (job["parallel"]["tp"], job["parallel"]["zero"], job["parallel"]["recompute"]) == (
        2,
        3,
        "selective",
    )
    assert (job["train"]["optimizer"]["schedule"], job["train"]["optimizer"]["decay"]) == ("wsd", 10)
    assert [key for key, _ in found.left] == ["experimental.custom_import"]


def test_verl() -> None:
    found = told(VERL, "grpo.sh")
    job = found.document
    assert (job["workload"]["objective"], job["workload"]["options"]) == (
        "grpo",
        {"beta": 0.002, "loss_type": "dapo", "delta": 3.0},
    )
    assert job["rollout"] == {"group": 4, "max_tokens": 128, "temperature": 1.0}
    assert job["data"]["sources"][0]["field"] == {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert (job["train"]["global_batch"], job["train"]["steps"], job["checkpoint"]["every"]) == (32, 10, 5)
    assert dict(found.left)["actor_rollout_ref.rollout.name"] == "rollout.engine: vllm, with rollout.workers"
    assert dict(found.left)["trainer.n_gpus_per_node"].startswith("resources.workers ")


def test_several_updates_of_verl_and_trl_on_the_same_answers() -> None:
    """A step of verl is a rollout, and one of TRL an update."""
    actor = "actor_rollout_ref.actor"
    more = f" {actor}.ppo_mini_batch_size=4 {actor}.ppo_epochs=3 {actor}.optim.lr_warmup_steps=2"
    job = told(VERL.rstrip() + more, "grpo.sh").document
    assert (job["rollout"]["steps"], job["rollout"]["epochs"], job["train"]["global_batch"]) == (2, 3, 16)
    # 40 prompts twice, 8 a rollout, each with 6 updates
    assert (job["train"]["steps"], job["checkpoint"]["every"]) == (60, 30)
    assert job["train"]["optimizer"]["warmup"] == 12
    job = told(f"{VERL.rstrip()}{more} trainer.total_training_steps=4", "grpo.sh").document
    assert job["train"]["steps"] == 24
    start = "trl grpo --model_name_or_path ORG/Small --dataset_name data/rows --max_completion_length 64"
    given = f"{start} --gradient_accumulation_steps 2 --steps_per_generation 4 --num_iterations 3 --num_train_epochs 2"
    found = told(given, "grpo.sh")
    rollout, batch = found.document["rollout"], found.document["train"]["global_batch"]
    assert (rollout["steps"], rollout["epochs"]) == (2, 3)
    prompts = batch // rollout["group"]
    assert f"epochs of 80 rows / {prompts} a step x rollout.epochs 3" in " ".join(found.lines)
    assert found.document["train"]["steps"] == 2 * 80 // prompts * 3
    assert not dict(found.left)


def test_the_loss_of_trl_and_verl_is_taken_with_their_defaults() -> None:
    """Both average over all tokens by default; this project's default averages over each answer first."""
    start = "trl grpo --model_name_or_path ORG/Small --dataset_name data/rows --max_steps 3 --max_completion_length 64"
    assert told(start, "grpo.sh").document["workload"]["options"] == {"loss_type": "dapo"}
    given = f"{start} --loss_type dr_grpo --beta 0.1 --scale_rewards false --epsilon_high 0.3 --delta 2"
    assert told(given, "grpo.sh").document["workload"]["options"] == {
        "loss_type": "dr_grpo",
        "beta": 0.1,
        "epsilon_high": 0.3,
        "delta": 2,
        "scale_rewards": "none",
    }
    other = told(f"{start} --loss_type cispo --num_iterations 4", "grpo.sh")
    assert "workload.options: loss_type cispo is not here; dapo in its place" in other.lines
    assert other.document["rollout"]["epochs"] == 4
    assert (other.document["train"]["steps"], other.document["checkpoint"]["every"]) == (4, 100)
    assert "train.steps: 4, whole rollouts of 4 steps" in other.lines
    actor = "actor_rollout_ref.actor"
    more = f" {actor}.loss_agg_mode=seq-mean-token-mean {actor}.kl_loss_type=mse {actor}.clip_ratio_high=0.3"
    options = told(VERL.rstrip() + more, "verl.sh").document["workload"]["options"]
    assert options == {"beta": 0.002, "loss_type": "grpo", "kl": "k2", "epsilon_high": 0.3, "delta": 3.0}
    trl = {"beta": 0.001, "num_generations": 4, "max_completion_length": 64, "sync_ref_model": True}
    axolotl = {"base_model": "ORG/Small", "rl": "grpo", "trl": trl, "sequence_len": 64, "max_steps": 3}
    of_section = told(yaml.safe_dump(axolotl | {"datasets": [{"path": "data/rows"}]}), "grpo.yaml")
    assert of_section.document["workload"]["options"] == {"loss_type": "dapo", "beta": 0.001}
    assert any(line.startswith("trl.sync_ref_model: not translated; not here") for line in of_section.lines)


def write_encoder() -> str:
    """Write the configuration of a small BERT, and return its folder."""
    folder = Path("models/Encoder")
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "bert", **sizes, "intermediate_size": 16, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("row", "objective"),
    [({"body": "a b", "label": "x"}, "sequence_classification"), ({"body": "a b"}, "masked_lm")],
)
def test_an_encoder_learns_the_labels_of_rows_or_hidden_words(row: dict[str, str], objective: str) -> None:
    folder = write_encoder()
    Path("labelled.jsonl").write_text("".join(json.dumps({**row, "number": n}) + "\n" for n in range(20)))
    arguments = {"model_name_or_path": folder, "train_file": "labelled.jsonl", "max_steps": 5}
    Path("arguments.json").write_text(json.dumps(arguments))
    found = translate(Path("arguments.json"))
    assert found.document["workload"]["objective"] == objective
    assert "pack" not in found.document["workload"].get("options", {})
    assert not any("were asked for" in each for each in found.lines)


def mixed(labels: dict[str, list[Any]]) -> Translated:
    """The job from a mixture of files whose rows have these labels in turn."""
    for name, values in labels.items():
        rows = [{"text": f"a b {n}", "label": values[n % len(values)]} for n in range(20)]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"id": name} for name in labels]
    arguments = {
        "model_name_or_path": write_encoder(),
        "dataset_mixture": {"datasets": sources},
        "max_steps": 5,
    }
    Path("mixed.json").write_text(json.dumps(arguments))
    return translate(Path("mixed.json"))


def test_labels_are_those_of_all_sources() -> None:
    """Sorted; in the order of the sources where the dataset card of one gives an order."""

    def labels(a: list[Any], b: list[Any]) -> list[str]:
        found: list[str] = mixed({"named/a.jsonl": a, "b.jsonl": b}).document["data"]["labels"]
        return found

    Path("named").mkdir()
    assert labels(["good", "bad"], ["fair", "good"]) == ["bad", "fair", "good"]
    assert labels([1, 10, 2], [3, 1]) == ["1", "2", "3", "10"]
    card = "---\ndataset_info: {features: [{name: label, dtype: {class_label: {names: {'0': neg, '1': amb}}}}]}\n---\n"
    Path("named/README.md").write_text(card)
    assert labels([0, 1], ["neg", "far"]) == ["neg", "amb", "far"]


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        ([0, 1], "its labels are 0, 1, and those of a.jsonl are bad, good"),
        ([0.5, 1.5], "its rows fit regression, and those of a.jsonl fit sequence_classification"),
    ],
)
def test_sources_whose_labels_contradict_are_refused(labels: list[Any], refused: str) -> None:
    with pytest.raises(InputError, match=f"^b.jsonl: {refused}"):
        mixed({"a.jsonl": ["good", "bad"], "b.jsonl": labels})


def test_the_column_of_the_label_is_the_one_that_is_named() -> None:
    """Also where another column has a usual name."""
    rows = [{"text": "a b", "label": "x", "mood": "good" if n % 2 else "bad"} for n in range(20)]
    Path("moods.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"model_name_or_path": "ORG/Other", "train_file": "moods.jsonl", "max_steps": 5}
    path = Path("moods.json")
    path.write_text(json.dumps({**arguments, "label_column_name": "mood"}))
    data = translate(path).document["data"]
    assert data["sources"][0]["field"] == {"text": "text", "label": "mood"}
    assert sorted(data["labels"]) == ["bad", "good"]
    path.write_text(json.dumps({**arguments, "label_column_name": "tone"}))
    with pytest.raises(InputError, match="has no column tone, only text, label, mood"):
        translate(path)


def test_evaluations_read_the_file_that_is_named_once_an_epoch() -> None:
    for name in ("train", "held"):
        Path(f"{name}.jsonl").write_text('{"body": "a b", "mood": "x"}\n' * 40)
    keys = {"model_name_or_path": "ORG/Other", "train_file": "train.jsonl", "label_column_name": "mood"}
    more = {
        "validation_file": "held.jsonl",
        "eval_strategy": "epoch",
        "num_train_epochs": 2,
        "shuffle_train_dataset": True,
    }
    Path("epochs.json").write_text(json.dumps(keys | more))
    found = translate(Path("epochs.json"))
    field = {"text": "body", "label": "mood"}
    assert found.document["data"]["validation"] == {"sources": [{"uri": "held.jsonl", "field": field}]}
    assert (found.document["train"]["steps"], found.document["evaluate"]) == (10, {"every": 5})
    text = found.text("epochs.json")
    assert text.count("label: mood") == 2
    assert "&id" not in text
    best = more | {"load_best_model_at_end": True, "metric_for_best_model": "eval_f1", "save_steps": 7}
    Path("best.json").write_text(json.dumps(keys | best))
    found = translate(Path("best.json"))
    assert found.document["evaluate"] == {"every": 5, "metrics": ["loss", "f1"]}
    assert found.document["checkpoint"] == {
        "every": 5,
        "keep": 3,
        "export": "hf",
        "keep_best": "validation.f1",
    }
    assert found.left == ()
    once = {"do_eval": True, "num_train_epochs": 2}  # the Trainer evaluates after training then
    Path("once.json").write_text(json.dumps(keys | once))
    assert translate(Path("once.json")).document["evaluate"] == {"every": 10}
    assert found.left == ()


def test_what_is_not_here_is_to_be_downloaded() -> None:
    Path("other.json").write_text(
        json.dumps({"model_name_or_path": "ORG/Other", "dataset_name": "ORG/none", "max_steps": 5})
    )
    found = translate(Path("other.json"))
    assert "to do: hf download ORG/Other --local-dir models/Other" in found.lines
    assert any(line.startswith("to do: hf download ORG/none --repo-type dataset") for line in found.lines)
    assert any("assumed" in line for line in found.lines)
    parse(found.document, "other.json")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.yaml", "optimizer: adam\n", "a.yaml: is not for a supported trainer: axolotl"),
        ("a.yaml", "- a\n", "has no keys"),
        ("a.py", "TrainingArguments(learning_rate=1e-5)\n", "is a Python file, and no code is run"),
        (
            "a.yaml",
            "learning_rate: 1e-5\nper_device_train_batch_size: 4\n",
            "the configuration names no model",
        ),
        ("a.toml", "a = \n", "cannot be read"),
        ("a.yaml", "base_model: ORG/Small\n", "names no data"),
        ("a.sh", "python train.py --model_name_or_path ORG/Small\n", "names no data"),
    ],
)
def test_a_file_that_is_none_is_one_line(name: str, text: str, wanted: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(InputError, match=wanted):
        translate(Path(name))


def test_arguments_of_a_shell() -> None:
    Path("run.sh").write_text(
        'A=${B:-4}\nN=$((A * 2))\npython x/train.py --n $N --flag --list a b --path="$HOME/x" +c.d=null e.f=1e-3\n'
    )
    given = read_foreign(Path("run.sh"))
    assert (given.number("n"), given.flag("flag"), given.take("list")) == (8, True, ["a", "b"])
    assert (given.take("path"), given.take("c.d"), given.number("e.f")) == ("$HOME/x", None, 1e-3)


@pytest.mark.parametrize(
    ("launcher", "script", "devices"),
    [
        ("torchrun --nproc_per_node 8", "x/sft.py", 8),
        ("torchrun --nnodes 2 --nproc-per-node 4 --standalone", "x/sft.py", 8),
        ("torchrun --nnodes 1:4 --nproc_per_node=8", "x/sft.py", 8),
        ("accelerate launch --num_processes 4", "x/sft.py", 4),
        ("accelerate launch --num_processes 4", "$SCRIPT", 4),
        ("accelerate launch --num_processes 4", "bin/sft", 4),
        ("deepspeed --num_gpus 2", "x/sft.py", 2),
    ],
)
def test_the_script_follows_the_options_of_a_launcher(launcher: str, script: str, devices: int) -> None:
    Path("run.sh").write_text(
        f"{launcher} {script} --model_name_or_path models/Small --dataset_name ORG/rows "
        "--per_device_train_batch_size 2 --learning_rate 1e-5 --bf16 --max_steps 7 $EXTRA\n"
    )
    found = translate(Path("run.sh"))
    assert (found.document["train"]["global_batch"], found.document["train"]["steps"]) == (2 * devices, 7)
    given = read_foreign(Path("run.sh"))
    assert given.take("script") == ("sft" if script.endswith(".py") else None)
    Path("run.sh").write_text("python train.py --max_steps -1 $EXTRA --num_train_epochs 2 $EXTRA --x $A\n")
    given = read_foreign(Path("run.sh"))
    assert (given.number("max_steps"), given.number("num_train_epochs"), given.take("x")) == (-1, 2, "$A")


def clm(**more: Any) -> Translated:
    """A job of run_clm for corpus.txt, of 3 sequences of 32 tokens per step."""
    keys = {"model_name_or_path": "models/Small", "train_file": "corpus.txt", "block_size": 32}
    Path("clm.json").write_text(json.dumps(keys | {"per_device_train_batch_size": 3} | more))
    return translate(Path("clm.json"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_epochs_of_packed_rows_are_counted_in_sequences(kind: str) -> None:
    texts = ["a text of some words"] * 400
    if kind == "jsonl":
        Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = clm(train_file=f"corpus.{kind}", num_train_epochs=2)
    assert found.document["workload"]["objective"] == "causal_lm"
    tokenizer = Tokenizer.from_file("models/Small/tokenizer.json")
    end = "\n" if kind == "txt" else ""
    tokens = 400 * (len(tokenizer.encode(f"{texts[0]}{end}").ids) + (kind == "jsonl"))
    wanted = 2 * tokens / 32 / 3
    assert found.document["train"]["steps"] == pytest.approx(wanted, rel=0.03)
    assert any("= 2 epochs of about" in line and "into 32 tokens" in line for line in found.lines)


def test_whole_conversations_fill_sequences() -> None:
    row = {"prompt": "a text of some words", "completion": "a text of some words"}
    Path("talks.jsonl").write_text(f"{json.dumps(row)}\n" * 400)
    tokenizer = Tokenizer.from_file("models/Small/tokenizer.json")
    tokens = 2 * (len(tokenizer.encode(row["prompt"]).ids) + 5)
    field = {"prompt": "prompt", "completion": "completion"}
    folder = Path("models/Small")
    for length, fit in ((2 * tokens + 1, 2), (3 * tokens, 3), (tokens - 1, 1)):
        found = sequences_in("talks.jsonl", field, 400, folder=folder, length=length, whole_rows=True)
        assert found == pytest.approx(400 / fit, rel=0.01)


def test_steps_of_rows_that_cannot_be_known_say_so() -> None:
    Path("corpus.jsonl").write_text('{"text": "short"}\n' * 30)
    found = clm(train_file="corpus.jsonl", model_name_or_path="ORG/Other", num_train_epochs=1)
    assert found.document["train"]["steps"] == 10
    assert any("10 steps may be more than 1 epoch;" in line for line in found.lines)
    found = clm(train_file="none.jsonl", num_train_epochs=1)
    assert any("1,000, because none.jsonl is not here" in line for line in found.lines)


def test_rows_of_every_kind_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"a, {n}\nb"} for n in range(7)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("a.jsonl").write_text(f"{lines}\n")
    Path("a.json").write_text(json.dumps(rows, indent=1))
    Path("b.json").write_text(lines)
    with gzip.open("a.jsonl.gz", "wt") as file:
        file.write(lines)
    with Path("a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(rows)
    Dataset.from_list(rows).save_to_disk("saved")
    Dataset.from_list(rows).to_parquet("a.parquet")
    names = ("a.jsonl", "a.json", "b.json", "a.jsonl.gz", "a.csv", "saved", "a.parquet")
    assert {name: counted(name).rows for name in names} == dict.fromkeys(names, 7)
    monkeypatch.setattr("orchestrator.launch.foreign_jobs.counted.MOST", 40)
    monkeypatch.setattr("orchestrator.launch.first_rows.PEEK", 40)
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.json"):
        assert counted(name) == Counted(None, f"{name} is too long to count its rows")


TRL_KEYS = {"model_name_or_path": "models/Small", "dataset_name": "ORG/rows"}


@pytest.mark.parametrize(
    ("keys", "lr", "whose", "epochs"),
    [
        (TRL_KEYS | {"output_dir": "x-sft"}, 2e-5, "TRL", 3),
        (TRL_KEYS | {"output_dir": "x-dpo", "dataset_name": "ORG/pairs"}, 1e-6, "TRL", 3),
        (TRL_KEYS | {"train_file": "corpus.txt", "block_size": 64}, 5e-5, "Hugging Face's Trainer", 3),
        (TRL_KEYS, 3e-4, "this project", 3),
        ({"base_model": "models/Small", "datasets": [{"path": "ORG/rows", "type": "alpaca"}]}, 3e-4,
         "this project", 1),
    ],
)  # fmt: skip
def test_what_is_not_given_is_the_trainers_default_and_said(
    keys: dict[str, Any], lr: float, whose: str, epochs: int
) -> None:
    Path("job.json").write_text(json.dumps(keys | {"per_device_train_batch_size": 1}))
    found = translate(Path("job.json"))
    assert found.document["train"]["optimizer"]["lr"] == lr
    said = f"the default of {whose}, because the configuration gives none"
    assert f"train.optimizer.lr: {lr:g}, {said}" in found.lines
    assert any(line.startswith(f"epochs: {epochs}, the default of ") for line in found.lines)
    if "block_size" not in keys:
        assert found.document["train"]["steps"] == 40 * epochs
    Path("job.json").write_text(json.dumps(keys | {"learning_rate": 1e-4, "max_steps": 5}))
    assert not any(
        "because the configuration gives none" in line for line in translate(Path("job.json")).lines
    )


def saved(kind: Any, **more: Any) -> Translated:
    """The job of the arguments that a trainer's library saves, with everything that nobody set."""
    arguments = kind(output_dir="out", use_cpu=True, bf16=False, report_to="none", **more)
    keys = arguments.to_dict() | {"model_name_or_path": "models/Small", "train_file": "rows.jsonl"}
    Path("saved.json").write_text(json.dumps(keys))
    return translate(Path("saved.json"))


def test_saved_arguments_list_only_what_the_user_set() -> None:
    """Asked of the libraries themselves, so that a changed default is missed here and not by users."""
    from transformers import TrainingArguments

    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    assert [key for key, _ in saved(TrainingArguments).left] == ["use_cpu"]
    set_by_user = saved(
        TrainingArguments, ddp_timeout=60, dataloader_prefetch_factor=3, dataloader_num_workers=2
    )
    assert {key for key, _ in set_by_user.left} == {
        *("use_cpu", "ddp_timeout", "dataloader_prefetch_factor", "dataloader_num_workers")
    }


@pytest.mark.slow
def test_so_do_saved_arguments_of_trl() -> None:
    import trl

    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    assert saved(trl.SFTConfig).document["workload"]["objective"] == "conversation"
    for kind, others in (
        (trl.SFTConfig, []),
        (trl.RewardConfig, []),
        (trl.DPOConfig, []),
        (trl.GRPOConfig, ["generation_batch_size"]),
    ):
        assert [key for key, _ in saved(kind).left] == ["use_cpu", *others], kind


def test_an_objective_that_is_asked_for() -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    Path("job.yaml").write_text(
        json.dumps(TRL_KEYS | {"train_file": "rows.jsonl", "dataset_name": None, "max_steps": 5})
    )
    found = translate(Path("job.yaml"), asked="seq2seq").document
    assert found["workload"]["objective"] == "seq2seq"
    assert found["data"]["sources"][0]["field"] == {"source": "prompt", "target": "completion"}
    with pytest.raises(InputError, match="its rows fit conversation, not dpo"):
        translate(Path("job.yaml"), asked="dpo")
    with pytest.raises(InputError, match="there is no objective dpoo"):
        translate(Path("job.yaml"), asked="dpoo")
    Path("axolotl.yaml").write_text(AXOLOTL)
    with pytest.raises(InputError, match="a configuration of axolotl says its objective itself"):
        translate(Path("axolotl.yaml"), asked="dpo")


def test_reinforce_in_place_of_grpo_takes_no_keys_of_the_clipped_ratio() -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    clipped = {"epsilon": 0.3, "epsilon_high": 0.28, "importance_sampling_level": "sequence"}
    keys = TRL_KEYS | {"train_file": "rows.jsonl", "dataset_name": None, "max_steps": 5, "beta": 0.1}
    Path("job.yaml").write_text(json.dumps(keys | {"reward_funcs": "accuracy_reward"} | clipped))
    common = {"loss_type": "dapo", "beta": 0.1}
    for objective, options in (("grpo", common | clipped), ("reinforce", common)):
        found = translate(Path("job.yaml"), asked=objective)
        assert found.document["workload"] | {"model": ""} == {
            "model": "",
            "objective": objective,
            "options": options,
        }
        assert clipped.keys() & dict(found.left).keys() == (clipped.keys() - options.keys())


def test_labelled_rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.launch.foreign_jobs import job

    read = Mock(wraps=labelled_rows)
    monkeypatch.setattr(job, "labelled_rows", read)
    test_an_encoder_learns_the_labels_of_rows_or_hidden_words(
        {"body": "a b", "label": "x"}, "sequence_classification"
    )
    assert [call.args[0] for call in read.call_args_list] == [["labelled.jsonl"]]
