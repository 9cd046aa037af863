"""The routes of OpenAI's API for a loaded model: requests and answers as JSON, without HTTP.

https://platform.openai.com/docs/api-reference: models, chat completions, completions.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.evaluate.speaker import GeneratedAnswer, Speaker
from workloads.workload import Sampling

MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MOST = 256
"""Tokens of an answer for which the request sets no limit."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "logprobs": (None, False), "top_logprobs": (None, 0), "echo": (None, False),
    "suffix": (None, ""), "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "logit_bias": (None, {}),
    "tools": (None, []), "functions": (None, []), "response_format": (None, {"type": "text"}),
}  # fmt: skip
"""Fields that would change the answer and are not supported, with the values that change nothing."""


class Refused(Exception):
    """A request that gets no answer: the HTTP status, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": None}}


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request.

    Attributes:
        chat: whether it is a conversation.
        prompt: its token ids.
        max_tokens: the maximum number of tokens of the answer.
        sampling: how they are chosen.
        stop: strings that end it.
        streams: whether the answer is wanted in pieces.
        counts: whether a stream ends with the number of tokens.
    """

    chat: bool
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stop: Sequence[str]
    streams: bool
    counts: bool


def models(name: str, made: int) -> dict[str, Any]:
    """Return the answer to /v1/models. `made` is the time at which the server began, in seconds."""
    model = {"id": name, "object": "model", "created": made, "owned_by": "orchestrator"}
    return {"object": "list", "data": [model]}


def parse_request(speaker: Speaker, name: str, path: str, body: Any) -> CompletionRequest:
    """Check a request. Raises Refused with what is wrong."""
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    if body.get("model") not in (None, name):
        raise Refused(404, f"there is no model {body['model']!r}; this server has {name!r}")
    for field, values in NEUTRAL.items():
        if field in body and body[field] not in values:
            raise Refused(400, f"{field} is not supported here; leave it out, or serve the export with vLLM")
    stop = body.get("stop") or ()
    stops = [stop] if isinstance(stop, str) else list(stop)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or MOST
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, 0.0, 10.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 2**31))),  # -1 is all of them for vLLM
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        seed=int(_number(body, "seed", secrets.randbits(31), 0, 2**62)),
    )
    if not isinstance(limit, int) or limit < 1:
        raise Refused(400, f"max_tokens is {limit!r}; give a whole number of at least 1")
    if not all(isinstance(each, str) for each in stops):
        raise Refused(400, "stop is a string or a list of strings")
    try:
        row = _conversation(speaker, body) if path == CHAT else _text(speaker, body)
    except InputError as error:
        raise Refused(400, str(error)) from None
    options = body.get("stream_options") or {}
    return CompletionRequest(
        chat=path == CHAT,
        prompt=row,
        max_tokens=limit,
        sampling=sampling,
        stop=stops,
        streams=bool(body.get("stream")),
        counts=bool(options.get("include_usage")),
    )


def _number(body: Mapping[str, Any], field: str, default: float, low: float, high: float) -> float:
    result = body.get(field)
    if result is None:
        return default
    if isinstance(result, bool) or not isinstance(result, int | float) or not low <= result <= high:
        raise Refused(400, f"{field} is {result!r}; give a number from {low:g} to {high:g}")
    return result


def _conversation(speaker: Speaker, body: Mapping[str, Any]) -> list[int]:
    messages = body.get("messages")
    good = isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str | list)
        for each in messages
    )  # fmt: skip
    if not messages or not good:
        raise Refused(400, "messages is a list of objects with role and content")
    return speaker.conversation(messages)


def _text(speaker: Speaker, body: Mapping[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return speaker.frame(prompt)
    size = speaker.tokenizer.get_vocab_size()
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < size for i in prompt):
        return prompt
    raise Refused(400, "prompt is one text, or one list of token ids")


class Answer:
    """Writes the answer to one request."""

    def __init__(self, name: str, request: CompletionRequest) -> None:
        self._request = request
        kind = "chat.completion" if request.chat else "text_completion"
        object_name = kind if not (request.chat and request.streams) else f"{kind}.chunk"
        begin = "chatcmpl" if request.chat else "cmpl"
        self._head = {
            "id": f"{begin}-{secrets.token_hex(12)}", "object": object_name, "created": int(time.time()), "model": name
        }  # fmt: skip

    def whole(self, answer: GeneratedAnswer) -> dict[str, Any]:
        """Return the answer in one piece."""
        message = {"message": {"role": "assistant", "content": answer.text}}
        body = message if self._request.chat else {"text": answer.text}
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": answer.finish}
        return {**self._head, "choices": [choice], "usage": _usage(answer)}

    def begin(self, send: Callable[[dict[str, Any]], object]) -> None:
        """Send what comes before the first piece of a stream."""
        if self._request.chat:
            send(self._chunk({"role": "assistant", "content": ""}, None))

    def piece(self, text: str) -> dict[str, Any]:
        """Return the stream chunk for `text`, in OpenAI's format."""
        return self._chunk({"content": text} if self._request.chat else text, None)

    def end(self, answer: GeneratedAnswer, send: Callable[[dict[str, Any]], object]) -> None:
        """Send what ends a stream."""
        send(self._chunk({} if self._request.chat else "", answer.finish))
        if self._request.counts:
            send({**self._head, "choices": [], "usage": _usage(answer)})

    def _chunk(self, text: Any, finish: str | None) -> dict[str, Any]:
        body = {"delta": text} if self._request.chat else {"text": text}
        return {**self._head, "choices": [{"index": 0, **body, "logprobs": None, "finish_reason": finish}]}


def _usage(answer: GeneratedAnswer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total}
