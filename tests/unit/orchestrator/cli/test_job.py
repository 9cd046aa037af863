"""init, schema, doctor, plan."""

from __future__ import annotations

import json
import shlex
import uuid
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from jobs import job, write_job, write_text

from orchestrator.cli.try_run import begun_anew, try_directory
from orchestrator.config import chain, spec
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare.chat_template import Template
from orchestrator.data.sources.fields import value_of
from orchestrator.launch.doctor import Finding
from orchestrator.launch.first_job import first_job
from orchestrator.planner.device_profile import FOLDER
from orchestrator.storage import lease
from orchestrator.storage.run_directory import RunDir

NOISY = """
import warnings

import torch


class Model(torch.nn.Module):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary_size, 8)
        self.head = torch.nn.Linear(8, vocabulary_size)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if "Fake" in type(batch["tokens"]).__name__:
            warnings.warn("of a trace")
        logits = self.head(self.tokens(batch["tokens"]))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
"""


def write_and_read(folder: Path) -> str:
    return Path(write_text(folder, 20_000)).read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_job_that_is_whole(command: Any, folder: Path) -> None:
    write_text(folder / "books")
    said = command("init", "mine.yaml", "--text", "books/*.txt")
    assert (said.code, said.err) == (0, "")
    assert "orchestrator plan mine.yaml" in said.out
    written = spec.load(folder / "mine.yaml")
    assert (written.name, written.data.sources[0].uri) == ("mine", "books/*.txt")
    assert command("init", "other.yaml", "--name", "run-7").code == 0
    assert spec.load(folder / "other.yaml").name == "run-7"


def test_init_names_no_tokenizer_that_is_not_there(command: Any, folder: Path) -> None:
    said = command("init", "mine.yaml", "--tokenizer", "nowhere")
    assert (said.code, "there is no tokenizer.json" in said.err) == (2, True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a: b", "größe", ""])
def test_init_writes_no_job_that_is_wrong(command: Any, folder: Path, name: str) -> None:
    said = command("init", "a.yaml", "--name", name)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert f"is not a name (got {name!r}); use 1 to 63 letters a-z" in said.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my job.yaml", "my-job"),
        ("größe é.yaml", "grosse-e"),
        ("-_x (2).yaml", "x-2"),
        ("計画.yaml", "job"),
        ("a" * 70 + ".yaml", "a" * 63),
    ],
)
def test_init_makes_a_name_of_any_file_name(command: Any, folder: Path, file: str, name: str) -> None:
    said = command("init", "--", file)
    assert (said.code, said.err) == (0, "")
    assert spec.load(folder / file).name == name
    assert shlex.join(["orchestrator", "run", file]) in said.out


def test_init_fills_in_what_it_finds(command: Any, folder: Path) -> None:
    config = transformers.GPT2Config(vocab_size=512, n_positions=96, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "base")
    made = train_bytes([write_and_read(folder)], 300, ())
    (folder / "base/tokenizer.json").write_text(made)
    rows = [{"id": "7", "body": "a long text " * 40}, {"id": "8", "body": "another text " * 40}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = command("init", "mine.yaml", "--from-hf", "base", "--data", "rows.jsonl", "--data", "topics.txt")
    assert (said.code, said.err) == (0, "")
    written = spec.load(folder / "mine.yaml")
    assert (written.workload.model, written.workload.objective) == ("hf:base", "causal_lm")
    assert written.workload.dropouts == (0.1, 0.1)  # GPT-2's
    assert [source.field for source in written.data.sources] == ["body", "text"]
    assert "rows.jsonl: causal_lm reads body; left out: id\n" in said.out
    assert (written.data.tokenizer, written.data.sequence_length) == ("base", 96)
    assert command("plan", "mine.yaml").code == 0


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"id": "7", "payload": {"title": "a title", "body": {"text": "a text"}}}, "payload.body.text"),
        ({"note": "above all the longest", "deep": {"content": "usual"}}, "deep.content"),
        ({"n": 1, "deep": {"x": "short", "y": "longer"}}, "deep.y"),
        ({"text": "a text", "deep": {"text": "another"}}, None),
        (
            {"id": "7", "talk": {"messages": [{"role": "user", "content": "x"}]}},
            {"messages": "talk.messages"},
        ),
    ],
)
def test_init_finds_what_lies_deep_in_a_row(folder: Path, row: dict[str, Any], field: Any) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    written = yaml.safe_load(first_job("mine", ["rows.jsonl"]).text)
    assert written["data"]["sources"][0].get("field") == field
    if isinstance(field, str):
        assert value_of(row, field)  # as preparation reads it


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.txt", None, "there is no such file"),
        ("rows.jsonl", '{"n": 1}\n', "its first row has no text, only n"),
        ("rows.jsonl", "no row\n", "its first row cannot be read"),
        ("rows.parquet", "no table\n", "its first row cannot be read"),
        (
            "rows.jsonl",
            '{"messages": []}\n',
            "--tokenizer: conversation reads records, and a tokenizer cannot be",
        ),
        ("rows.csv", "", "rows.csv: has no rows; give files with rows"),
        ("rows.csv", "text,label\n", "rows.csv: has no rows; give files with rows"),
        (
            "rows.csv",
            "text;label\na;b\n",
            "rows.csv: has one column, 'text;label': ';' does not separate columns",
        ),
        ("rows.csv", b"text,label\ncaf\xe9,b\n", "it is not UTF-8); convert it, as in `iconv -f latin1"),
        ("none.txt", "", "all files are empty; give files with text"),
    ],
)
def test_init_writes_no_job_for_data_that_cannot_be_used(
    command: Any, folder: Path, name: str, text: str | bytes | None, says: str
) -> None:
    if text is not None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = command("init", "mine.yaml", "--data", name)
    assert said.code == 2
    assert says in said.err
    assert not (folder / "mine.yaml").exists()


def test_init_writes_a_chat_template_for_a_model_that_has_none(command: Any, folder: Path) -> None:
    place = folder / "tokenizer"
    place.mkdir()
    (place / "tokenizer.json").write_text(train_bytes([], 300, ["<|endoftext|>"]))
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    said = [{"role": role, "content": text} for role, text in (("user", "a?"), ("assistant", "b"))]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(40)))
    words = ("--data", "chat.jsonl", "--tokenizer", "tokenizer")
    done = command("init", "chat.yaml", *words)
    assert (done.code, done.err) == (0, "")
    assert "chat.jinja is written" in done.out
    assert spec.load(folder / "chat.yaml").data.chat_template == "chat.jinja"
    template = Template((folder / "chat.jinja").read_text(), {"eos_token": "<|endoftext|>"})
    assert template.render(said) == ("user:\na?\nassistant:\nb<|endoftext|>", [(20, 34)])
    (place / "tokenizer_config.json").unlink()  # as the tokenizer of a run: no file names its eos_token
    assert command("init", "bare.yaml", *words).code == 0
    bare = (folder / "bare.jinja").read_text()
    assert Template(bare, {}).render(said) == template.render(said)
    (place / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    rows = [{"messages": said, "tools": []}] * 40
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command("init", "dated.yaml", *words).code == 0
    data = spec.load(folder / "dated.yaml").data
    assert data.sources[0].field == {"messages": "messages", "tools": "tools"}
    assert data.chat_date == date.today()
    (folder / "chat.jsonl").write_text("")
    assert "is empty" in command("init", "other.yaml", *words).err
    assert not list(folder.glob("other.*"))


def test_init_compares_answers_and_writes_a_template_where_they_are_messages(
    command: Any, folder: Path
) -> None:
    config = transformers.GPT2Config(vocab_size=300, n_positions=96, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "base")
    (folder / "base/tokenizer.json").write_text(train_bytes([], 300, ["<|endoftext|>"]))
    for name, asked in (("texts", "a?"), ("turns", [{"role": "user", "content": "a?"}])):
        row = {"by": 1, "prompt": asked, "chosen": "b", "rejected": "c"}
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 40)
        done = command("init", f"{name}.yaml", "--data", f"{name}.jsonl", "--from-hf", "base")
        assert (done.code, done.err) == (0, "")
        assert spec.load(folder / f"{name}.yaml").workload.objective == "dpo"
        assert (folder / f"{name}.jinja").exists() == (name == "turns")
        said = 'reads {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}; left out: by'
        assert f"{name}.jsonl: dpo {said}\n" in done.out


def test_init_quotes_the_text(command: Any, folder: Path) -> None:
    (folder / 'the "best" {books}').mkdir()
    write_text(folder / 'the "best" {books}')
    assert command("init", "a.yaml", "--text", 'the "best" {books}/*.txt').code == 0
    assert spec.load(folder / "a.yaml").data.sources[0].uri == 'the "best" {books}/*.txt'


def test_schema_is_what_the_job_file_is(command: Any) -> None:
    said = command("schema")
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == json.loads(chain.schema())


def test_a_plan_is_shown(command: Any, folder: Path) -> None:
    write_job(folder, job(write_text(folder, 20_000)))
    said = command("plan", "job.yaml")
    assert (said.code, said.err) == (0, "")
    assert "dp2 zero0" in said.out
    assert "chosen" in said.out
    assert said.out.count("memory a rank") == 1
    before, after = said.out.split("Tracing the memory of dp2 zero0")
    assert "memory a rank" in before
    assert "Memory of the chosen layout" in after
    # two ranks of so small a model take longer to sum its gradients than the second saves
    assert "By these predictions one worker is faster" in said.out
    assert "Snapshots, if the workers are on several nodes, take up to" in said.out
    assert "worker is faster" not in command("plan", "job.yaml", "--set", "resources.workers.min=2").out


@pytest.mark.parametrize(
    ("words", "width"), [([], 2), pytest.param(["--workers", "1"], 1, marks=pytest.mark.slow)]
)
def test_a_plan_as_json(command: Any, folder: Path, words: list[str], width: int) -> None:
    write_job(folder, job(write_text(folder, 20_000)))
    said = command("plan", "job.yaml", "--json", *words)
    assert said.code == 0
    assert json.loads(said.out)["chosen"]["dp"] == width


def test_a_plan_tells_which_precision_was_chosen_and_why(command: Any, folder: Path) -> None:
    """Of a job that leaves it open; of its run what that has begun with, on devices of which there is none here."""
    write_job(folder, job(write_text(folder, 20_000), precision="auto"))
    words = ("plan", "job.yaml", "--machine", "t4", "--json")
    said = command(*words)
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)["precision"]
    each = {one["precision"]: one for one in found["candidates"]}
    assert list(each) == ["fp32", "bf16", "fp16"]
    assert all(one["fits"] for one in each.values())
    assert found["why"].startswith(f"{found['chosen']}: ")
    assert found["why"].endswith(" s a step") or found["why"].endswith(" counts as equal")
    assert f"Precision {found['why']}." in command(*words[:-1]).out
    named = command(*words, "--set", f"train.precision={found['chosen']}")
    assert "precision" not in json.loads(named.out)
    assert json.loads(named.out)["predicted"] == json.loads(said.out)["predicted"]

    run = folder / "runs" / "small"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("")
    (run / "job.yaml").write_text(dump(parse(job(str(folder / "topics.txt"), precision="fp16"))))
    for begun in (("plan", "job.yaml"), ("run", "job.yaml", "--dry-run")):
        told = json.loads(command(*begun, "--json").out)["precision"]
        assert (told["chosen"], told["why"]) == ("fp16", "fp16, which the run started with")


def test_a_plan_says_nothing_of_what_libraries_warn_of(
    command: Any, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (folder / "noisy.py").write_text(NOISY)
    write_job(folder, job(write_text(folder, 20_000)))
    own = ["--set", "workload={model: noisy:Model}", "--set", "parallel={zero: 3}"]
    said = command("plan", "job.yaml", *own)
    assert (said.code, [str(each.message) for each in recwarn if "trace" in str(each.message)]) == (0, [])


def test_a_plan_for_a_machine_that_is_not_here(command: Any, folder: Path) -> None:
    asked = job(write_text(folder, 20_000)) | {"parallel": {"tp": 2, "micro_batch": 1}}
    asked["train"]["global_batch"] = 8
    write_job(folder, asked)
    words = ("plan", "job.yaml", "--machine", "a100-80", "--workers", "4", "--json")
    said = command(*words)
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert (found["chosen"]["dp"], found["chosen"]["tp"]) == (2, 2)
    assert len(found["predicted"]["peak_bytes_by_rank"]) == 4
    parts = found["predicted"]["seconds_by_part"]
    assert found["predicted"]["step_seconds"] == pytest.approx(sum(parts.values()) - parts["commit"])
    assert found["machine"]["name"] == "a100-80"
    points = json.loads(command(*words, "--frontier").out)["frontier"]
    assert {point["workers"] for point in points} <= {2, 4}
    assert "numbers of workers that no other beats" in command(*words[:-1], "--frontier").out
    profile = (FOLDER / "t4.yaml").read_text()
    (folder / "mine.yaml").write_text(profile.replace("name: t4", "name: mine"))
    assert "On mine" in command(*words[:3], "mine.yaml", "--workers", "4", "--html", "plan.html").out
    assert "<svg" in (folder / "plan.html").read_text()
    assert command("plan").code == command("plan", "--audit", str(folder)).code == 2
    refused = command(*words[:3], "z9")
    assert (refused.code, "no device has the name z9" in refused.err) == (2, True)


def test_a_plan_checks_what_a_run_checks_and_tells_all_of_it(command: Any, folder: Path) -> None:
    asked = job("nowhere.txt")
    asked["resources"]["per_worker"] = {"labels": {"zone": "a"}}
    asked["workload"]["objective"] = "masked_lm"
    asked["checkpoint"] = {**asked.get("checkpoint", {}), "export": "hf", "export_to": str(folder)}
    (folder / "mine.txt").write_text("mine")
    write_job(folder, asked)
    for words in (["plan"], ["run", "--dry-run"]):
        said = command(words[0], "job.yaml", *words[1:])
        assert said.code == 2, said.err
        told = said.err.splitlines()
        for part in (
            "nowhere.txt",
            "masked_lm does not train",
            "something other than an export",
            "only a cluster's nodes",
        ):
            assert sum(part in line for line in told) == 1, said.err
        assert len(told) == 4
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "mine.txt"]


def test_wrong_keys_and_what_is_not_there_are_told_together(command: Any, folder: Path) -> None:
    asked = job("nowhere.txt")
    asked["train"]["optimizer"] = {"name": "adam"}
    asked["workload"]["model"] = "gpt-tinny"
    write_job(folder, {**asked, "gradient_accumulation": 4})
    for words in (["plan", "job.yaml"], ["run", "job.yaml"], ["run", "job.yaml", "--smoke"]):
        told = command(*words).err.splitlines()
        parts = (
            "adamw with weight_decay 0",
            "it follows from train.global_batch",
            "nowhere.txt",
            "'gpt-tinny'",
        )
        assert [sum(part in line for line in told) for part in parts] == [1] * 4
        assert len(told) == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint": {"every": 4, "export": "hf", "export_to": "file/x"}}, "checkpoint.export_to"),
        ({"data": {"cache": "file/x"}}, "data.cache"),
        ({"data": {"cache": "memory://x"}}, "the memory of one process"),
        ({"tracking": {"uri": "http://", "experiment": "a"}}, "names no server"),
        ({"workload": {"model": "gpt-tiny", "init_from": "runs/nowhere"}}, "nowhere"),
    ],
)
def test_what_a_run_refuses_its_plan_and_its_dry_run_refuse(
    command: Any, folder: Path, changes: dict[str, Any], says: str
) -> None:
    (folder / "file").write_text("")
    asked = job(write_text(folder, 20_000))
    for key, values in changes.items():
        asked[key] = {**(asked.get(key) or {}), **values}
    write_job(folder, asked)
    said = [command(*words) for words in (["plan", "job.yaml"], ["run", "job.yaml", "--dry-run"])]
    said.append(command("run", "job.yaml"))
    assert [each.code for each in said] == [2, 2, 2]
    assert len({each.err for each in said}) == 1
    assert (says in said[0].err, said[0].err.count("\n")) == (True, 1)


def test_a_dry_run_for_a_cluster_is_planned_for_its_workers(command: Any, folder: Path) -> None:
    asked = job(write_text(folder, 20_000), precision="bf16")
    asked["resources"]["per_worker"] = {"gpu": 1, "labels": {"ray.io/accelerator-type": "H100"}}
    write_job(folder, asked)
    said = command("run", "job.yaml", "--dry-run", "--address", "127.0.0.1:1", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["machine"]["name"] == "h100"


def test_a_plan_tells_what_does_not_fit_the_run_of_its_name(command: Any, folder: Path) -> None:
    asked = job(write_text(folder, 20_000))
    write_job(folder, asked)
    begun = RunDir(str(folder / "runs" / asked["name"]))
    begun.create()
    begun.write_text("job.yaml", spec.dump(spec.parse({**asked, "seed": 99})))
    begun.append("events.jsonl", [{"time": 1e9, "phase": "prepare", "attempt": 1}])
    said = command("plan", "job.yaml")
    assert (said.code, "tokens per step" in said.out) == (0, True)
    assert "`run` would refuse this without another --run-dir" in said.err
    assert "seed is 99 in this run and 3 in the job file" in said.err


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warning", 0), ("missing", 1)])
def test_doctor_fails_where_something_is_missing(
    command: Any, monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    found = [Finding("ok", "Python", "3.11"), Finding(verdict, "the moon", "none", "look up")]
    monkeypatch.setattr("orchestrator.launch.doctor.examine", lambda: found)
    shown, listed = command("doctor"), command("doctor", "--json")
    assert (shown.code, listed.code) == (code, code)
    assert "the moon" in shown.out
    assert json.loads(listed.out)[1] == {
        "verdict": verdict,
        "what": "the moon",
        "found": "none",
        "hint": "look up",
    }


def test_doctor_reads_a_job_as_other_commands_do(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.launch.doctor.examine", list)
    path = write_job(tmp_path, job("corpus.txt"))
    assert "onnx" not in command("doctor", path).out
    assert (
        "checkpoint.export onnx needs onnx" in command("doctor", path, "--set", "checkpoint.export=onnx").out
    )
    said = command("doctor", "--set", "checkpoint.export=onnx")
    assert (said.code, said.err) == (2, "orchestrator: --set: there is no job to change; give a job file\n")


def test_a_try_begins_anew_on_an_object_store() -> None:
    tried = RunDir(f"memory://{uuid.uuid4().hex}/small-smoke")
    for _ in range(3):
        with begun_anew(tried):
            assert not tried.rows("events.jsonl")
            with tried.lock():
                tried.append("events.jsonl", [{"time": 1.0, "attempt": 1, "phase": "done"}])
                tried.write_json("summary.json", {})


def test_a_try_begins_anew_and_takes_no_other_run_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOCK_TIMEOUT", 0.2)
    tried = RunDir(str(tmp_path / "runs" / "small-smoke"))
    with begun_anew(tried):
        tried.append("events.jsonl", [{"time": 1.0, "attempt": 1, "phase": "done"}])
    with pytest.raises(InputError, match="another controller is active"), tried.lock(), begun_anew(tried):
        pass
    assert tried.rows("events.jsonl")
    with begun_anew(tried):
        assert not tried.rows("events.jsonl")
    other = RunDir(str(tmp_path / "runs" / "other-smoke"))
    other.create()
    other.append("events.jsonl", [{"time": 1.0, "attempt": 1, "phase": "done"}])
    with pytest.raises(InputError, match="this is a run, not an earlier try"), begun_anew(other):
        pass
    assert other.rows("events.jsonl")
    refused = RunDir(str(tmp_path / "runs" / "refused-smoke"))
    with pytest.raises(InputError, match="is wrong"), begun_anew(refused):
        raise InputError("is wrong")
    assert refused.is_gone()
    assert try_directory("s3://b/runs/a/") == "s3://b/runs/a-smoke"


def test_init_classifies_texts(command: Any, folder: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(folder / "base")
    (folder / "base/tokenizer.json").write_text(train_bytes([], 300, ["[CLS]", "[SEP]", "[PAD]", "[MASK]"]))
    rows = [{"review": f"a film {n}", "label": ("bad", "good")[n % 2]} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = command("init", "mine.yaml", "--from-hf", "base", "--data", "rows.jsonl")
    assert (said.code, said.err) == (0, "")
    columns = '{"text": "review", "label": "label"}'
    assert f"sequence_classification reads {columns}; 40 rows; labels: bad (20), good (20)\n" in said.out
    written = spec.load(folder / "mine.yaml")
    assert (written.workload.objective, written.data.labels) == ("sequence_classification", ["bad", "good"])
    assert command("plan", "mine.yaml").code == 0
