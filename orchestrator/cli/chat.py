"""The commands chat and serve-model: talk to a model in the terminal, or through the routes of OpenAI's API."""

from __future__ import annotations

import json
import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.cli.checkpoint import RawWeights, Step
from orchestrator.cli.evaluate import Model, load_speaker
from orchestrator.cli.options import finite, on_this_machine
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.evaluate.speaker import Speaker
    from workloads.workload import Sampling

LOOPBACK = "127.0.0.1"
Temperature = Annotated[
    float,
    typer.Option(min=0.0, callback=finite, help="0 takes the likeliest token; above 0 tokens are sampled"),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(chat)
    app.command("serve-model")(serve_model)


def chat(
    model: Model,
    step: Step = None,
    system: Annotated[str | None, typer.Option(help="a system message before the conversation")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="maximum number of tokens per answer")] = 512,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="seed of the sampling")] = 0,
    raw_weights: RawWeights = False,
) -> None:
    """Talk to a model that learnt from conversations. It sees the whole conversation, written by its chat template. An
    answer appears as it is generated; Ctrl-C stops it, and an empty line, /exit or Ctrl-D ends. /new starts again."""
    from workloads.workload import Sampling

    speaker = load_speaker(model, step, raw_weights)
    opening = [] if system is None else [{"role": "system", "content": system}]
    speaker.conversation([*opening, {"role": "user", "content": "?"}])  # a model of texts is refused at once
    talk: list[dict[str, Any]] = list(opening)
    while (line := _line()) not in ("", "/exit", "/quit"):
        if line == "/new":
            talk = list(opening)
            continue
        talk.append({"role": "user", "content": line})
        answer = _answer(speaker, talk, tokens, Sampling(temperature=temperature, seed=seed))
        if answer is None:
            talk.pop()
        else:
            talk.append({"role": "assistant", "content": answer})


def _line() -> str:
    """The next message; empty at the end of the input, and after Ctrl-C at the prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _answer(speaker: Speaker, talk: list[dict[str, Any]], max_tokens: int, sampling: Sampling) -> str | None:
    """Print an answer while it is generated and return it; None if the model cannot answer."""
    pieces: list[str] = []

    def hear(piece: str) -> None:
        pieces.append(piece)
        print(piece, end="", flush=True)

    try:
        answer = speaker.say(speaker.conversation(list(talk)), max_tokens, sampling, hear)
        print()
        if answer.finish == "length":
            print(f"orchestrator: cut after {answer.tokens} tokens; raise --tokens", file=sys.stderr)
        return answer.text
    except KeyboardInterrupt:
        print("\norchestrator: stopped", file=sys.stderr)
        return "".join(pieces)
    except InputError as error:
        print(f"orchestrator: {error}; /new starts a new conversation", file=sys.stderr)
        return None


def serve_model(
    model: Model,
    step: Step = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 picks a free one")] = 0,
    name: Annotated[str | None, typer.Option(help="name of the model [default: that of the folder]")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            parser=on_this_machine,
            help="file with the token that clients send as API key [default: a new one]",
        ),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="admit everyone")] = False,
    engine: Annotated[
        Literal["auto", "vllm", "own"],
        typer.Option(
            help="vllm serves exports, for production; own, one request at a time; auto: vllm if installed"
        ),
    ] = "auto",
    raw_weights: RawWeights = False,
) -> None:
    """Serve a model through the routes of OpenAI's API: /v1/models, /v1/chat/completions and /v1/completions, streams
    too. Clients send the token that is printed as their API key. Ctrl-C ends it."""
    from orchestrator.evaluate.of_export import is_export

    token = _token(token_file, no_token)
    served = name or Path(model.rstrip("/")).name
    installed = find_spec("vllm") is not None
    fits = is_export(model) and not (Path(model) / "own.json").exists()
    if engine == "vllm" and not (installed and fits):
        why = "serves exports for transformers" if installed else "is not installed"
        raise InputError(
            f"vllm {why}", "--engine", "export the run, or leave it out" if installed else "pip install vllm"
        )
    if engine != "own" and installed and fits:
        _become_vllm(model, served, host, port, token)
    _serve(load_speaker(model, step, raw_weights), served, host, port=port, token=token)


def _token(file: Path | None, none: bool) -> str | None:
    """The token of clients; None if everyone is admitted. Raises InputError."""
    if none:
        if file is not None:
            raise InputError("is given, but everyone is admitted", "--token-file", "leave out one of the two")
        return None
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", str(file), "give a file with a token"
        ) from None
    if not token or not token.isprintable() or " " in token:
        raise InputError("holds no token", str(file), "write one line without blanks into it")
    return token


def _become_vllm(folder: str, name: str, host: str, port: int, token: str | None) -> None:
    """Replace this process by vLLM's server, so that whoever ends it ends vLLM."""
    chosen = port or 8000
    _announce(name, f"http://{host}:{chosen}/v1", token, "vLLM")
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    program += ["--served-model-name", name, "--host", host, "--port", str(chosen)]
    environment = {**os.environ, **({} if token is None else {"VLLM_API_KEY": token})}
    sys.stdout.flush()
    os.execve(sys.executable, program, environment)


def _serve(speaker: Speaker, name: str, host: str, port: int, token: str | None) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    from orchestrator.evaluate.model_server import ModelServer

    try:
        server = ModelServer(speaker, name, host, port=port, token=token)
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
        raise InputError(problem, f"--host {host} --port {port}", "give others, or none") from None
    _announce(name, f"http://{host}:{server.port}/v1", token, "own generation, one request at a time")
    try:
        server.serve()
    except KeyboardInterrupt:
        return


def _announce(name: str, address: str, token: str | None, engine: str) -> None:
    """Print where the server is, as one JSON line for programs, and how it answers."""
    print(json.dumps({"base_url": address, "model": name, "api_key": token}), flush=True)
    print(f"orchestrator: {engine}; Ctrl-C ends it", file=sys.stderr, flush=True)
