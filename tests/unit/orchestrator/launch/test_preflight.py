"""What is found wrong with a job before anything is started, and what it is resolved to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from jobs import job, write_job
from letters import write_tokenizer

from orchestrator.config.errors import InputError
from orchestrator.config.records import OBJECTIVES
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.clean import check as cleaning_checks
from orchestrator.data.prepare import record_kind
from orchestrator.data.sources.check import check_sources
from orchestrator.evaluate.config import SAMPLES
from orchestrator.launch.job_checks import JobChecks, check_objective_of, check_workload
from orchestrator.launch.path_checks import check_all_uris
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.resolve.resolved_job import resolve
from orchestrator.storage.run_directory import RunDir
from orchestrator.train import reference_check
from workloads.objectives import NAMES


def spec(**changes: Any) -> JobSpec:
    document = job("a.txt")
    for part, values in changes.items():
        document[part] = {**document.get(part, {}), **values}
    return parse(document)


def check_text(asked: JobSpec, begins: bool = False) -> None:
    check_sources(asked.data, asked.workload.objective, asked.set_sources, begins)


def check_records(asked: JobSpec) -> None:
    record_kind.check_records(asked.data, asked.workload.objective, asked.every_source)


def check_preferences(asked: JobSpec) -> None:
    reference_check.check_preferences(asked.workload, asked.train, asked.data.shuffle)


def check_cleaning(asked: JobSpec) -> None:
    cleaning_checks.check_cleaning(asked.data, asked.workload.objective, asked.workload.adapter is not None)


@pytest.mark.parametrize(
    ("run", "cache"),
    [("/work/runs/small", "/work/runs/_data"), ("memory://bucket/runs/small", "memory://bucket/runs/_data")],
)
def test_runs_beside_each_other_share_their_data(run: str, cache: str) -> None:
    assert data_cache(spec().data, RunDir(run)) == cache
    assert data_cache(spec(data={"cache": "/elsewhere"}).data, RunDir(run)) == "/elsewhere"


def test_the_vocabulary_is_known_before_there_is_data() -> None:
    job = resolve(spec())
    assert job.vocabulary_size == 512
    shape = job.shape
    assert (shape.vocabulary, shape.hidden, shape.layers, shape.sequence_length) == (512, 32, 2, 32)


def test_an_objective_must_fit_the_architecture() -> None:
    check_objective_of(resolve(spec()))
    with pytest.raises(
        InputError, match="masked_lm does not train gpt-tiny, which is a decoder; choose from causal_lm"
    ):
        check_objective_of(resolve(spec(workload={"objective": "masked_lm"})))
    with pytest.raises(InputError, match="no objective 'casual_lm'"):
        check_objective_of(resolve(spec(workload={"objective": "casual_lm"})))
    with pytest.raises(InputError, match="unknown model 'gpt-tinny'"):
        check_objective_of(resolve(spec(workload={"model": "gpt-tinny"})))


@pytest.mark.parametrize(
    ("model", "length", "changes", "words"),
    [
        ("llama-tiny", 512, {}, []),
        (
            "llama-tiny",
            1024,
            {},
            ["1024 tokens exceeds the 512 positions", "max_positions to 1024", "rope_scaling"],
        ),
        ("llama-tiny", 1024, {"max_positions": 1024}, []),
        ("llama-tiny", 1024, {"max_position_embeddings": 1024}, []),
        ("t5-tiny", 1024, {}, []),  # relative distances have no end
    ],
)
def test_a_text_longer_than_the_declared_positions_is_told(
    model: str, length: int, changes: dict[str, int], words: list[str]
) -> None:
    """Rotary positions go on without an end, and an export would say that they do not."""
    workload = {"model": model, "changes": changes}
    workload |= {"objective": "span_corruption"} if model == "t5-tiny" else {}
    notes = resolve(spec(workload=workload, data={"sequence_length": length})).notes
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)


def test_an_objective_that_is_not_there_is_not_said_to_have_metrics_and_columns() -> None:
    """Whatever else the job says of it, the answer is that it does not exist."""
    validation = {"share": 0.1}
    for objective in ("ppo", "casual_lm"):
        for field in ("text", {"prompt": "q", "answer": "a"}):
            sources = [{"uri": "a.jsonl", "field": field}]
            asked = spec(
                workload={"objective": objective},
                data={"sources": sources, "validation": validation, "labels": ["a", "b"]},
                evaluate={"every": 2, "metrics": ["reward_margin"]},
            )
            check_records(asked)
            with pytest.raises(InputError, match=f"there is no objective '{objective}'"):
                check_objective_of(resolve(asked))


def test_the_known_objectives_are_those_that_there_are() -> None:
    assert {*NAMES, SAMPLES} == OBJECTIVES


def test_a_source_without_pairs_is_refused_where_pairs_are_read() -> None:
    pairs = {"uri": "a.jsonl", "field": ["en", "de"]}
    workload = {"model": "bert-tiny", "objective": "translation_lm"}
    check_objective_of(resolve(spec(workload=workload, data={"sources": [pairs]})))
    for single in ({"uri": "b.jsonl"}, {"uri": "b.parquet", "field": "en"}, {"uri": "b.txt"}):
        with pytest.raises(
            InputError, match=r"data\.sources\.1\.field: translation_lm reads pairs; give two keys"
        ):
            check_objective_of(resolve(spec(workload=workload, data={"sources": [pairs, single]})))


ROWS = {"uri": "a.jsonl", "field": {"text": "review", "label": "stars"}}


@pytest.mark.parametrize(
    ("objective", "data", "says"),
    [
        (
            "sequence_classification",
            {"sources": [{"uri": "a.jsonl"}]},
            r"data\.sources\.0\.field: says not what",
        ),
        (
            "dpo",
            {"sources": [{"uri": "a.jsonl"}]},
            r"field: says not what dpo reads; give \{prompt: <column>, chosen: <column>, rejected: <column>\}, without",
        ),
        (
            "causal_lm",
            {"sources": [ROWS]},
            r"data\.sources\.0\.field: names columns, and causal_lm reads text",
        ),
        (
            "sequence_classification",
            {"labels": ["one"]},
            r"data\.labels: sequence_classification predicts one of at least two",
        ),
        (
            "sequence_classification",
            {"labels": ["a", "a"]},
            r"data\.labels: sequence_classification predicts one of",
        ),
        ("regression", {"labels": ["a", "b"]}, r"data\.labels: regression predicts no labels; leave it out"),
        (
            "regression",
            {"tokenizer": {"train_bpe": 512}},
            r"data\.tokenizer: regression reads records, and a tokenizer cannot",
        ),
        (
            "conversation",
            {"sources": [{"uri": "a.jsonl", "field": {"messages": "m"}}]},
            r"data\.tokenizer nowhere: has no chat template; name a Jinja file in data\.chat_template",
        ),
        (
            "regression",
            {"chat_date": "2024-07-26"},
            r"data\.chat_date: this job uses no chat template that could ask for a date; leave it out",
        ),
    ],
)
def test_what_is_wrong_with_records_is_told_before_anything_starts(
    objective: str, data: dict[str, Any], says: str
) -> None:
    found = {"sources": [ROWS], "tokenizer": "nowhere", **data}
    with pytest.raises(InputError, match=says):
        check_records(spec(workload={"model": "gpt-tiny", "objective": objective}, data=found))


def test_rows_are_not_looked_at_before_their_columns_are_said(tmp_path: Path) -> None:
    """That there is no column 'text' in them is no help where other columns are wanted."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 50)
    data = {"sources": [{"uri": str(tmp_path / "a.jsonl")}]}
    check_text(spec(workload={"model": "gpt-tiny", "objective": "dpo"}, data=data))
    with pytest.raises(InputError, match="has no text 'text'"):
        check_text(spec(data=data))


def test_a_record_is_a_sample_however_short_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"p": "a", "c": "b", "r": "c"}\n' * 10)
    fields = {"prompt": "p", "chosen": "c", "rejected": "r"}
    data = {"sources": [{"uri": str(path), "field": fields}], "sequence_length": 512}
    workload = {"model": "gpt-tiny", "objective": "dpo"}
    check_text(spec(workload=workload, data=data))
    with pytest.raises(InputError, match="fewer than one sequence of 512 tokens"):
        check_text(spec(data={**data, "sources": [{"uri": str(path), "field": "p"}]}))
    path.write_text("")
    with pytest.raises(InputError, match=r"data.sources: all files are empty; give files with rows"):
        check_text(spec(workload=workload, data=data))


def test_a_column_that_no_row_has_is_told_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"p": "a", "c": "b", "r": "c", "tools": "[]"}\n')
    fields = {"prompt": "p", "chosen": "c", "rejected": "r"}

    def asked(field: dict[str, str], **more: Any) -> JobSpec:
        source = {"uri": str(tmp_path / "rows.jsonl"), "field": field}
        return spec(workload={"model": "gpt-tiny", "objective": "dpo"}, data={"sources": [source]}, **more)

    check_text(asked({**fields, "tools": "tools"}), begins=True)
    check_text(asked({**fields, "tools": "toolz"}))  # of a run that goes on
    with pytest.raises(InputError, match=r"data.sources.0.field: names 'toolz', .* did you mean 'tools'\?;"):
        check_text(asked({**fields, "tools": "toolz"}), begins=True)
    of_set = {"uri": str(tmp_path / "rows.jsonl"), "field": {**fields, "tools": "tool"}}
    wrong = asked(fields, evaluate={"sets": {"wiki": {"sources": [of_set]}}})
    with pytest.raises(InputError, match=r"evaluate.sets.wiki.sources.0.field: names 'tool'"):
        check_text(wrong, begins=True)


def test_a_column_of_a_cleaning_step_that_no_row_has_is_told_before_anything_is_prepared(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 200, "score": 1}) + "\n")

    def asked(column: str) -> JobSpec:
        steps = [{"own": {"function": "own:keep", "columns": [column]}}]
        return spec(data={"sources": [{"uri": str(tmp_path / "rows.jsonl")}], "clean": steps})

    check_text(asked("score"), begins=True)
    check_text(asked("scroe"))  # of a run that goes on
    with pytest.raises(InputError, match=r"data.clean.own.columns: names 'scroe', .* did you mean 'score'\?"):
        check_text(asked("scroe"), begins=True)


PAIRS = {"uri": "a.jsonl", "field": {"prompt": "p", "chosen": "c", "rejected": "r"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"workload": {"init_from": None}}, "compares with the initial model, and"),
        ({"workload": {"init_from": None, "model": "hf:"}}, r"workload\.init_from: dpo compares"),
        ({"workload": {"objective": "orpo"}, "train": {"z_loss": 0.1}}, r"train\.z_loss: orpo has no z-loss; set it"),
        (
            {"workload": {"objective": "orpo"}, "train": {"label_smoothing": 0.1}},
            r"train\.label_smoothing: orpo has no smoothing over a vocabulary; set it to 0",
        ),
        ({"data": {"sources": [{**PAIRS, "field": {"chosen": "c"}}]}}, r"sources\.0\.field: lacks rejected, which dpo"),
        ({"data": {"sources": [{**PAIRS, "field": {"text": "c"}}]}}, r"sources\.0\.field: lacks chosen, rejected"),
        ({"data": {"shuffle": "sections"}}, "of all records before it trains; set train.reference to held"),
        ({"data": {"chat_template": "no.jinja"}}, r"data\.chat_template no\.jinja: there is no such file; give"),
        ({"workload": {"model": "bert-tiny"}}, r"workload\.objective: dpo does not train bert-tiny, which is a"),
        ({"evaluate": {"metrics": ["perplexity"]}}, "perplexity is not a metric of dpo, which has loss, accuracy"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_preferences_is_told_before_anything_starts(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    transformers.LlamaConfig(
        vocab_size=600, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    ).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, template=False)
    workload = {
        "model": "gpt-tiny",
        "objective": "dpo",
        "init_from": "runs/base",
        **changes.get("workload", {}),
    }
    if workload["model"] == "hf:":  # a configuration without weights
        workload |= {"model": f"hf:{tmp_path}", "changes": {}}
    data = {
        "sources": [PAIRS],
        "tokenizer": str(tmp_path),
        "validation": {"share": 0.1},
        **changes.get("data", {}),
    }
    more = {key: changes[key] for key in ("train", "evaluate") if key in changes}

    def check() -> None:
        found = spec(workload=workload, data=data, **more)
        check_records(found)
        check_preferences(found)
        check_objective_of(resolve(found))

    with pytest.raises(InputError, match=says):
        check()


def test_what_only_prepares_data_checks_all_but_the_loaded_model(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some words " * 90)
    document = write_job(tmp_path, job(str(text)))
    code = f"""
import sys
from orchestrator.config.spec import load
from orchestrator.launch.job_checks import JobChecks

JobChecks(load({str(document)!r})).without_model()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
    wrong = job(str(tmp_path / "b.txt"))
    wrong["workload"] |= {"model": "gpt-tny"}
    with pytest.raises(InputError) as found:
        JobChecks(parse(wrong)).without_model()
    told = [str(error) for error in found.value.each()]
    assert len(told) == 2
    assert "b.txt" in told[0]
    assert "gpt-tny" in told[1]
    wrong = job(str(text)) | {"resources": {"workers": {"min": 90, "max": 90}}}
    with pytest.raises(InputError, match="no legal layout uses 90 workers"):
        JobChecks(parse(wrong)).without_model()


def held_out(folder: Path, sources: list[dict[str, Any]], **changes: Any) -> JobSpec:
    """A job with a set of its own text."""
    (folder / "a.txt").write_text("some words " * 90)
    document = spec(**changes).model_dump(mode="json")
    document["data"]["sources"][0]["uri"] = str(folder / "a.txt")
    return parse(document | {"evaluate": {"sets": {"wiki": {"sources": sources}}}})


def test_text_of_a_set_is_checked_as_that_of_training_is(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    key = r"evaluate\.sets\.wiki\.sources"
    check_text(held_out(tmp_path, [{"uri": str(tmp_path / "a.txt")}]))
    for name, told in (
        ("nowhere.txt", rf"{key}\.0\.uri \S+: there is no such file"),
        ("empty.txt", f"{key}: all files"),
    ):
        with pytest.raises(InputError, match=told):
            check_text(held_out(tmp_path, [{"uri": str(tmp_path / name)}]))
    with pytest.raises(InputError, match=rf"{key}\.0\.uri: memory://a\.txt is the memory of one process"):
        check_all_uris(held_out(tmp_path, [{"uri": "memory://a.txt"}]), RunDir(str(tmp_path)))
    pairs = [{"uri": "a.jsonl", "field": ["en", "de"]}]
    workload = {"model": "bert-tiny", "objective": "translation_lm"}
    wanting = held_out(tmp_path, [*pairs, {"uri": "b.jsonl"}], workload=workload, data={"sources": pairs})
    with pytest.raises(InputError, match=rf"{key}\.1\.field: translation_lm reads pairs; give two keys"):
        check_objective_of(resolve(wanting))


SIZES = {"vocab_size": 600, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}


def foreign(folder: Path, theirs: Any, objective: str = "causal_lm", **options: Any) -> dict[str, Any]:
    """The workload of a class run as it is."""
    theirs.save_pretrained(folder)
    return {"model": f"hf:{folder}", "objective": objective, "changes": {}, "options": options}


def test_a_class_run_as_it_is_is_tried_and_what_it_loses_is_told(tmp_path: Path) -> None:
    theirs = transformers.GPTNeoXConfig(**SIZES, intermediate_size=64, hidden_dropout=0.1)
    workload = foreign(tmp_path, theirs, documents="isolate")
    check_workload(resolve(spec(workload=workload)))
    assert resolve(spec(workload=workload)).shape.no_recompute == ""
    (note,) = resolve(spec(workload=workload)).notes
    assert "is trained without classifier_dropout, hidden_dropout: what a class draws" in note
    assert resolve(spec()).notes == []


def test_a_class_is_divided_where_the_job_says_so_and_a_plan_that_is_wrong_is_refused(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2}
    fine = foreign(tmp_path / "ministral", transformers.MinistralConfig(**sizes, head_dim=8))
    for parallel in ({"tp": 2}, {"pp": 2}):
        check_workload(resolve(spec(workload=fine, parallel=parallel)))
    assert "as it is" in resolve(spec(workload=fine)).shape.no_model_split  # not by the planner alone
    shape = resolve(spec(workload=fine, parallel={"tp": 2})).shape
    assert Layout(tp=2).problems(shape, 8) == []
    for wrong, says in (
        (Layout(tp=4), "key-value heads"), (Layout(pp=3), "can be cut into 2"), (Layout(cp=2), "set cp to 1"),
        (Layout(ep=2, dp=2), "set ep to 1"), (Layout(tp=2, sequence=True), "set sequence to false"),
    ):  # fmt: skip
        assert says in wrong.problems(shape, 8)[0]
    # Its activation has numbers of its own, which no entry of the plan names.
    wrong_plan = foreign(tmp_path / "apertus", transformers.ApertusConfig(**sizes))
    check_workload(resolve(spec(workload=wrong_plan)))
    with pytest.raises(InputError, match=r"by the plan of transformers, .*alpha_p differs; set parallel"):
        check_workload(resolve(spec(workload=wrong_plan, parallel={"tp": 2})))


def test_a_class_that_shows_what_it_must_not_is_refused(tmp_path: Path) -> None:
    theirs = transformers.OPTConfig(
        **SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0, pad_token_id=1
    )
    check_workload(resolve(spec(workload=foreign(tmp_path, theirs))))
    with pytest.raises(
        InputError, match=r"of other documents or later ones; set workload\.options\.documents to pack"
    ):
        check_workload(resolve(spec(workload=foreign(tmp_path, theirs, documents="isolate"))))


def test_layers_that_cannot_be_told_apart_are_neither_recomputed_nor_compiled(tmp_path: Path) -> None:
    theirs = transformers.XLMConfig(
        vocab_size=600, emb_dim=32, n_layers=1, n_heads=4, max_position_embeddings=64, n_langs=1, pad_index=1
    )
    workload = foreign(tmp_path, theirs, "masked_lm")
    shape = resolve(spec(workload=workload)).shape
    assert Layout().problems(shape, 8) == []
    (problem,) = Layout(recompute="full").problems(shape, 8)
    assert problem.endswith("set recompute to none")
    check_workload(resolve(spec(workload=workload)))
    with pytest.raises(InputError, match="no layers that could be compiled alone"):
        check_workload(resolve(spec(workload=workload, train={"compile": True})))
    with pytest.raises(InputError, match="muon updates the matrices of layers"):
        check_workload(resolve(spec(workload=workload, train={"optimizer": {"name": "muon"}})))


@pytest.mark.parametrize("objective", ["regression", "sequence_classification", "span_extraction"])
def test_a_z_loss_is_of_logits_of_a_vocabulary(objective: str) -> None:
    document = job("a.jsonl", z_loss=0.1)
    document["workload"] = {"model": "bert-tiny", "objective": objective}
    with pytest.raises(InputError, match=rf"train\.z_loss: {objective} has no z-loss; set it to 0"):
        check_preferences(parse(document))


def test_an_adapter_adds_no_tokens() -> None:
    document = job("a.txt")
    document["workload"] |= {"init_from": "runs/base", "adapter": {"kind": "lora", "rank": 2}}
    document["data"] |= {"tokenizer": "folder", "add_tokens": ["<end>"]}
    with pytest.raises(
        InputError, match=r"data\.add_tokens: an adapter does not train the rows of added tokens"
    ):
        check_cleaning(parse(document))


def test_groups_of_parameters_have_some() -> None:
    document = job("a.txt", optimizer={"groups": [{"match": ["token.*"], "lr_scale": 0.1}]})
    with pytest.raises(
        InputError, match=r"train\.optimizer\.groups: 'token\.\*' matches no trained parameter"
    ):
        check_workload(resolve(parse(document)))
