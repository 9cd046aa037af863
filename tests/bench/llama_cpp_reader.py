"""What llama.cpp makes of the GGUF files in some folders. It imports no part of the project, only xllamacpp and numpy.

    python llama_cpp_reader.py FOLDER...

Each folder has model.gguf and asked.json. read.npy gets the log-probabilities of all tokens after each token of `rows`;
read.json has the ids of `texts` without and with the tokens around them, those of the conversations `talks`, a greedy
continuation of the first row, and which of the tokens `forced` end a text.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp


def server(path: Path) -> Any:
    """A server of one model that rounds no keys and values."""
    given = xllamacpp.CommonParams()
    given.model.path = str(path)
    given.n_ctx, given.n_parallel, given.warmup, given.cache_prompt, given.use_jinja = (
        512,
        1,
        False,
        False,
        True,
    )
    given.cpuparams.n_threads = 1
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(given)


def post(address: str, route: str, **body: Any) -> Any:
    """The answer of a route."""
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(address + route, json.dumps(body).encode(), head), timeout=120
    ) as answer:
        return json.load(answer)


def read(folder: Path) -> None:
    """Write what the server says of the file in a folder."""
    asked = json.loads((folder / "asked.json").read_text())
    served = server(folder / "model.gguf")
    at, words = served.listening_address, asked["vocabulary"]

    def complete(prompt: list[int], count: int, forced: int | None = None, **more: Any) -> Any:
        bias = [] if forced is None else [[forced, 1000.0]]
        more |= {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "logit_bias": bias,
            "return_tokens": True,
        }
        return post(at, "/completion", **more)

    found = np.full((*np.shape(asked["rows"]), words), np.nan, np.float32)
    for number, row in enumerate(asked["rows"]):
        for end in range(len(row)):
            # Probabilities of tokens that are half a character are held back, so a letter is forced.
            answer = complete(row[: end + 1], 1, asked["letter"], n_probs=words)
            (written,) = answer["completion_probabilities"]
            for each in written["top_logprobs"]:
                found[number, end, each["id"]] = each["logprob"]
    np.save(folder / "read.npy", found)

    def tokens(text: str, framed: bool) -> Any:
        return post(at, "/tokenize", content=text, add_special=framed)["tokens"]

    ids = [[tokens(text, framed) for framed in (False, True)] for text in asked["texts"]]
    # The template's text lacks a bos that the tokenizer adds.
    talks = [tokens(post(at, "/apply-template", messages=talk)["prompt"], True) for talk in asked["talks"]]
    greedy = complete(asked["rows"][0], 48, ignore_eos=True)["tokens"] if asked["rows"] else []
    ends = [complete([asked["letter"]], 2, number)["stop_type"] == "eos" for number in asked["forced"]]
    (folder / "read.json").write_text(
        json.dumps({"ids": ids, "talks": talks, "greedy": greedy, "ends": ends})
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        read(Path(name))
