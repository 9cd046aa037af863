"""OpenAI's own client talks to the real server; transformers says what is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
import torch
from chat_folder import write_chat_folder
from jobs import command
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.evaluate.model_server import ModelServer
from orchestrator.evaluate.speaker import Speaker, speaker_of_export

TALK: Any = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "some words"},
    {"role": "assistant", "content": "a text"},
    {"role": "user", "content": "äöü?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_chat_folder(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def speaker(folder: str) -> Speaker:
    return speaker_of_export(folder)


@pytest.fixture
def server(speaker: Speaker) -> Iterator[ModelServer]:
    found = ModelServer(speaker, "small", "127.0.0.1", 0, "secret")
    found.start()
    yield found
    found.close()


@pytest.fixture
def client(server: ModelServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0)


def of_transformers(folder: str, ids: torch.Tensor, most: int) -> tuple[str, int]:
    """The most probable text, and the number of its tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
    said = made[0, ids.shape[1] :]
    return tokenizer.decode(said, skip_special_tokens=True), len(said)


def of_talk(folder: str, messages: Any = TALK) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return found["input_ids"]


def test_a_conversation_is_answered_as_by_transformers(client: openai.OpenAI, folder: str) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    ids = of_talk(folder)
    wanted, count = of_transformers(folder, ids, 24)
    found = client.chat.completions.create(model="small", messages=TALK, temperature=0, max_tokens=24)
    assert found.choices[0].message.content == wanted
    assert found.choices[0].finish_reason == ("length" if count == 24 else "stop")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (ids.shape[1], count)
    pieces = list(
        client.chat.completions.create(
            model="small", messages=TALK, temperature=0, max_completion_tokens=24, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert pieces[0].choices[0].delta.role == "assistant"
    texts = [each.choices[0].delta.content or "" for each in pieces if each.choices]
    assert "".join(texts) == wanted
    assert len([text for text in texts if text]) > 3
    assert pieces[-1].usage == found.usage


def test_text_is_continued_and_cut_at_a_stop_string(client: openai.OpenAI, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("some", return_tensors="pt", add_special_tokens=False)["input_ids"]
    wanted, _ = of_transformers(folder, ids, 20)
    whole = client.completions.create(model="small", prompt="some", temperature=0, max_tokens=20)
    assert whole.choices[0].text == wanted
    of_ids = client.completions.create(model="small", prompt=ids[0].tolist(), temperature=0, max_tokens=20)
    assert of_ids.choices[0].text == wanted
    stop = wanted[5:8]
    for streams in (False, True):
        cut: Any = client.completions.create(
            model="small", prompt="some", temperature=0, max_tokens=20, stop=[stop], stream=streams
        )
        pieces = list(cut) if streams else [cut]
        assert "".join(each.choices[0].text for each in pieces) == wanted[: wanted.index(stop)]
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_a_seed_draws_the_same_text(client: openai.OpenAI) -> None:
    def said(seed: int) -> str:
        found = client.completions.create(
            model="small", prompt="a", temperature=1.5, top_p=0.9, seed=seed, max_tokens=12
        )
        return found.choices[0].text

    assert said(1) == said(1)
    assert len({said(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("asked", "status", "wanted"),
    [
        ({"model": "large"}, 404, "there is no model 'large'; this server has 'small'"),
        ({"n": 2}, 400, "n is not supported here"),
        ({"temperature": -1.0}, 400, "temperature is -1.0; give a number from 0 to 10"),
        ({"max_tokens": 0.5}, 400, "max_tokens is 0.5; give a whole number"),
        ({"messages": [{"role": "user"}]}, 400, "messages is a list of objects with role and content"),
    ],
    ids=str,
)
def test_a_wrong_request_is_one_line(
    client: openai.OpenAI, asked: dict[str, Any], status: int, wanted: str
) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(**{"model": "small", "messages": TALK, "max_tokens": 2} | asked)
    assert error.value.status_code == status
    assert wanted in str(error.value)


def test_nobody_is_admitted_without_the_token(server: ModelServer) -> None:
    other = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="serve-model"):
        other.models.list()
    with pytest.raises(openai.NotFoundError, match=r"there is no POST /v1/embeddings; use /v1/models"):
        openai.OpenAI(base_url=str(other.base_url), api_key="secret").embeddings.create(
            model="small", input="a"
        )


def test_no_mass_is_the_most_probable_token(client: openai.OpenAI) -> None:
    def said(**how: Any) -> str:
        return (
            client.completions.create(model="small", prompt="a", max_tokens=12, seed=1, **how).choices[0].text
        )

    assert said(temperature=1.5, top_p=0) == said(temperature=0) != said(temperature=1.5)


def test_an_error_in_a_stream_is_its_last_event(speaker: Speaker) -> None:
    def fails(rows: Any, most: int, sampling: Any, ended: Any) -> list[list[int]]:
        ended(speaker.frame("some words"))
        raise RuntimeError("cannot read s3://me:S3cretS3cret@bucket/x\nnor more")

    found = ModelServer(replace(speaker, generate=fails), "small", "127.0.0.1", 0, None)
    found.start()
    try:
        for path, asked in (("chat/completions", {"messages": TALK}), ("completions", {"prompt": "a"})):
            body = json.dumps({**asked, "stream": True}).encode()
            address = f"http://127.0.0.1:{found.port}/v1/{path}"
            with urlopen(Request(address, body), timeout=60) as answer:
                text = answer.read().decode()
            events = text.removesuffix("\n\n").split("\n\n")
            assert len(events) > 2
            assert all(event.startswith("data: ") for event in events)
            assert "HTTP/1.1" not in text
            assert "S3cretS3cret" not in text
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
            assert error["type"] == "server_error"
            assert error["message"].startswith("RuntimeError: cannot read s3://")
    finally:
        found.close()


@pytest.mark.slow
def test_the_commands(folder: str, tmp_path: Path) -> None:
    """`serve-model` announces itself and ends on Ctrl-C; `chat` sees its history; vLLM takes over where it is."""
    with subprocess.Popen(
        command("serve-model", folder, "--engine", "own"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        client = openai.OpenAI(base_url=about["base_url"], api_key=about["api_key"])
        wanted, _ = of_transformers(folder, of_talk(folder), 16)
        found = client.chat.completions.create(model="model", messages=TALK, temperature=0, max_tokens=16)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert found.choices[0].message.content == wanted

    words = "".join(f"{each['content']}\n" for each in TALK if each["role"] == "user")
    talked = subprocess.run(
        command("chat", folder, "--system", "be short", "--tokens", 6),
        input=words, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert talked.returncode == 0, talked.stderr
    first, _ = of_transformers(folder, of_talk(folder, TALK[:2]), 6)
    history = [*TALK[:2], {"role": "assistant", "content": first}, TALK[3]]
    second, _ = of_transformers(folder, of_talk(folder, history), 6)
    assert talked.stdout == f"{first}\n{second}\n"

    place = tmp_path / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for each in (place, place.parent, place.parent.parent):
        (each / "__init__.py").write_text("")
    shown = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['VLLM_API_KEY']]))\n"
    (place / "api_server.py").write_text(shown)
    (tmp_path / "token").write_text("mine\n")
    done = subprocess.run(
        command("serve-model", folder, "--port", 8123, "--token-file", tmp_path / "token"),
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    arguments, key = json.loads(done.stdout.splitlines()[-1])
    assert (arguments[arguments.index("--model") + 1], key) == (folder, "mine")
    assert arguments[arguments.index("--port") + 1] == "8123"
    assert "mine" not in arguments
