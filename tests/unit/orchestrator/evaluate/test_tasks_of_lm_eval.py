"""lm-eval's own task files, as its package installs them: over local data, our model and its export answer alike.

A user's file includes lm-eval's and names local data instead of a hub's. The rows here are made up, in the columns of
the public data sets.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lm_eval
import peers
import pytest
import yaml
from hf_tokenizers import DOCUMENTS
from thin import every
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer as tokenizers
from orchestrator.data.encoding.training import train_bytes
from orchestrator.evaluate import on_tasks
from orchestrator.evaluate.lm_eval_model import WorkloadLM
from orchestrator.evaluate.on_tasks import Subject, evaluate_task
from orchestrator.evaluate.task_files import read_task
from workloads.inference import with_weights
from workloads.load import load
from workloads.workload import Vocabulary

pytestmark = pytest.mark.usefixtures("no_network")

TASKS = Path(lm_eval.__file__).parent / "tasks"
SIZE = 400
SMALL = {"vocab_size": SIZE, "hidden": 32, "layers": 2, "intermediate": 64, "max_positions": 640}
SPLITS = ("train", "validation", "validation_matched", "test", "dev")
FOUR = ["red", "blue", "a green one", "none of them"]
SIDES = {"premise": "It rained all day", "hypothesis": "The ground is wet"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "arc/arc_easy": [
        {"question": "Which is hot?", "choices": {"text": FOUR, "label": list("ABCD")}, "answerKey": "B"},
        {"question": "Which is dry?", "choices": {"text": FOUR[:3], "label": list("123")}, "answerKey": "3"},
    ],
    "hellaswag/hellaswag": [
        {"activity_label": "Running", "ctx_a": "A man runs.", "ctx_b": "then he", "endings": FOUR, "label": "2"},
        {"activity_label": "Tea", "ctx_a": "Water boils.", "ctx_b": "the cup", "endings": FOUR, "label": "0"},
    ],
    "piqa/piqa": [{"goal": "dry a coat", "sol1": "hang it", "sol2": "wash it", "label": 0}],
    "winogrande/default": [
        {"sentence": "The cup fell on the stone and _ broke.", "option1": "cup", "option2": "stone", "answer": "1"}
    ],
    "super_glue/boolq/default": [{"passage": "Ice is cold.", "question": "is ice cold", "label": 1}],
    "super_glue/copa/default": [
        {"premise": "It rained.", "choice1": "The road dried.", "choice2": "The road was wet.",
         "question": kind, "label": 1} for kind in ("cause", "effect")
    ],
    "super_glue/rte/default": [{**SIDES, "label": 0}],
    "super_glue/wic/default": [
        {"sentence1": "a cold day", "sentence2": "a cold look", "start1": 2, "end1": 6, "label": 0}
    ],
    "openbookqa/openbookqa": [
        {"question_stem": "Snow is", "choices": {"text": FOUR, "label": list("ABCD")}, "answerKey": "D"}
    ],
    "sciq/sciq": [
        {"support": " Cells divide.", "question": "What divides?", "distractor1": "Rocks",
         "distractor2": "Salt", "distractor3": "Air", "correct_answer": "Cells"}
    ],
    "commonsense_qa/default": [
        {"question": "Where is a bed?", "answerKey": "E",
         "choices": {"text": [*FOUR, "in a room"], "label": list("ABCDE")}}
    ],
    "logiqa/logiqa": [{"context": "All is one.", "question": "Which?", "options": FOUR, "label": "c"}],
    "mathqa/mathqa": [
        {"Problem": "two and two", "correct": "b", "options": "a ) 3 , b ) 4 , c ) 5 , d ) 6 , e ) 7"}
    ],
    "truthfulqa/truthfulqa_mc1": [
        {"question": "Is it so?", "mc1_targets": {"choices": FOUR, "labels": [1, 0, 0, 0]}}
    ],
    "truthfulqa/truthfulqa_mc2": [
        {"question": "Is it so?", "mc2_targets": {"choices": FOUR, "labels": [1, 1, 0, 0]}}
    ],
    "mmlu/default/mmlu_anatomy": [{"question": " Which bone?", "choices": FOUR, "answer": 2}],
    "blimp/causative": [{"sentence_good": "She fell.", "sentence_bad": "She fell him."}],
    "swag/swag": [
        {"startphrase": "He sits", **{f"ending{n}": text for n, text in enumerate(FOUR)}, "label": 1}
    ],
    "glue/cola/default": [{"sentence": "She sat", "label": 1}, {"sentence": "Sat she she", "label": 0}],
    "glue/sst2/default": [{"sentence": "a fine film", "label": 1}],
    "glue/mnli/default": [{**SIDES, "label": 2}],
    "glue/qqp/default": [
        {"question1": "why?", "question2": "how so?", "label": number % 2} for number in range(4)
    ],
    "lambada/lambada_openai": [{"text": "the cat sat on the mat"}, {"text": "a dog ate the bone"}],
    "wikitext/wikitext": [{"page": " = Rain = \n Rain falls @-@ mostly . \n"}, {"page": "Snow , too ."}],
    "pile/pile_arxiv": [{"text": "We prove a theorem."}, {"text": "It holds."}],
    "gsm8k/gsm8k": [
        {"question": f"What is {n} and {n}?", "answer": f"Add them.\n#### {2 * n}"} for n in range(1, 8)
    ],
    "nq_open/nq_open": [{"question": "who sat on the mat", "answer": ["the cat"]}],
    "triviaqa/default": [{"question": "Who sat", "answer": {"aliases": ["the cat", "a cat"]}}],
    "drop/default": [
        {"passage": "He ran 3 miles.", "question": "How many?", "section_id": "a", "query_id": "b",
         "answer": {"number": "3", "date": {"day": "", "month": "", "year": ""}, "spans": []},
         "validated_answers": {"number": [], "date": [], "spans": []}}
    ],
}  # fmt: skip
"""Rows for tasks of every kind of output, by file."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Any]:
    """A model here, and its export behind lm-eval's own interface to transformers."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    text = train_bytes(DOCUMENTS, SIZE, [])
    tokenizer = Tokenizer.from_str(text)
    roles = {role: n for role, n in tokenizers.roles_of(tokenizer, {}).items() if role != "unk"}
    vocabulary = Vocabulary(SIZE, **roles)
    workload = load("gpt-tiny", "causal_lm", vocabulary, changes=SMALL, sequence_length=32)

    def weights(name: str) -> Any:
        return workload.initial(name, 1) * 4

    folder = str(tmp_path_factory.mktemp("export"))
    workload.to_hf(weights, folder)
    eos = tokenizer.id_to_token(vocabulary.eos)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, eos_token=eos, pad_token=eos
    )
    subject = Subject(workload, with_weights(workload, weights), theirs, 7)
    ours = WorkloadLM(workload, subject.model, theirs, lambda: None)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    given = {"device": "cpu", "batch_size": 4, "prefix_token_id": ours.prefix_token_id}
    return subject, HFLM(pretrained=exported, tokenizer=theirs, **given)


def over_local_data(
    folder: Path, name: str, rows: list[dict[str, Any]], splits: Iterable[str] = SPLITS
) -> Path:
    """A user's file: lm-eval's own, and where the data is."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "include": str(TASKS / f"{name}.yaml"),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": dict.fromkeys(splits, "rows.jsonl")},
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(document))
    return folder / "task.yaml"


@pytest.mark.contract
@pytest.mark.parametrize("name", every(5, ROWS))
def test_the_export_answers_what_we_do(name: str, both: tuple[Subject, Any], tmp_path: Path) -> None:
    """Likelihoods within 1e-5, the same texts, and the same metrics."""
    from lm_eval.evaluator import evaluate

    subject, theirs = both
    task = read_task(str(over_local_data(tmp_path, name, ROWS[name])))
    with on_tasks._prepared():
        found = evaluate_task(subject, task)
        ours = WorkloadLM(subject.workload, subject.model, subject.tokenizer, lambda: None)
        answers = []
        for model in (ours, theirs):
            loaded = on_tasks._loaded(task, str(tmp_path / "cache"))
            result = evaluate(model, {"tasks": {task.name: loaded}}, bootstrap_iters=0, log_samples=True)
            answers.append([row["resps"] for row in result["samples"][task.name]])
            measured = on_tasks._metrics(result, task.name, "")
    filters = len(loaded._filters)
    assert len(answers[0]) == filters * found["examples"] > 0
    assert flat(answers[0]) == pytest.approx(flat(answers[1]), abs=1e-4, rel=1e-5)
    assert measured == pytest.approx(found, abs=1e-4, rel=1e-4)


def flat(answers: Any) -> list[Any]:
    """Numbers of likelihoods and texts, one after the other; texts become the numbers of their letters."""
    if isinstance(answers, str):
        return [len(answers), *answers.encode()]
    if isinstance(answers, list | tuple):
        return [number for each in answers for number in flat(each)]
    return [float(answers)]


def refusal(folder: Path, name: str) -> str:
    """The key of a file that is not taken, without the numbers of a list; empty if the file is taken."""
    splits = [*SPLITS]
    while True:
        try:
            read_task(str(over_local_data(folder, name, [{}], splits)))
            return ""
        except InputError as error:
            if not (lacking := re.fullmatch(r"there is no split (.+)", error.what)):
                return re.sub(r"\.\d+", "", error.where.rpartition(": ")[2])
            splits.append(lacking[1].partition("[")[0])


@pytest.mark.slow
def test_nearly_every_task_file_may_be_included(tmp_path: Path) -> None:
    """Of every tenth: what is refused is a group, a Python class, a metric of a hub, or has other settings."""
    names = sorted(str(path.relative_to(TASKS).with_suffix("")) for path in TASKS.rglob("*.yaml"))
    found = Counter(refusal(tmp_path, name) for name in names[::10])
    assert (found.pop(""), dict(found)) == (peers.TASK_FILES, peers.REFUSED_TASK_FILES)
