# ruff: noqa: RUF001
"""GGUF exports, read by llama.cpp itself, by releases of xllamacpp, each in an environment of its own.

    python tests/bench/llama_cpp_by_releases.py [folder for the environments]

Small models of each class that the export supports, in each format. llama.cpp's log-probabilities are compared with
those of our own model with the same rounding, of weights and of what its kernels multiply with them (`INPUTS`), and its
greedy continuation, its tokens of texts in many scripts, its chat templates, and the tokens at which it stops with what
the folder for transformers says. Prints a row for each release and file, and exits with 1 if one disagrees.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import numpy as np
import paths  # noqa: F401
import torch
import transformers
from gguf_models import CASES, SIZES, write
from hf_tokenizers import gpt2
from read_by_releases import environment
from torch import Tensor, nn

from orchestrator.data.prepare.chat_template import named_template
from orchestrator.extensions.gguf.write import TEXTS, export_gguf
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.heads import VocabularyProjection
from workloads.workload import Vocabulary

RELEASES = ("2026.10.11549",)
INPUTS = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "q8_0"}
"""The numbers to which llama.cpp rounds what it multiplies by a matrix of each format."""
TRUE, HALF = 1e-5, 1e-2
"""The largest difference in fp32, as a share of the largest number; and in other formats, where a sum in another order
moves a number over the middle between two."""
SCRIPTS = (
    "北京市的天气很好。今天是2024年11月30日，气温约为12.5℃！", "東京都は日本の首都です。１２３４５人",
    "안녕하세요, 세계! 12345번", "Привет, мир! ёж и Ёлка", "مرحبا بالعالم، ١٢٣٤٥", "नमस्ते दुनिया! १२३४",
    "สวัสดีชาวโลก ๑๒๓", "שלום עולם!", "Größe, œuvre, ΟΔΥΣΣΕΑΣ", "👩‍👩‍👧‍👦 family, 🏳️‍🌈 🙂🙃", "½ ¾ Ⅷ ① ² x² + y³ = ∞ ≤ ≠",
    "It’s we’LL I'M you'RE they'Ve HE'D 'S'T ſ'ſ", "𝒳 𝔘𝔫𝔦 𐍈 🄰 ﷺ ﬁ", "tabs\t\tand  spaces   \n\n\n  lines\r\n\r\n end  ",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg", "1234567890 12 1234 1.5e-10 0x7fFF", "   leading",
    "trailing   ", "\n", " ", "\t", "\r\n", "x\r\ry", "\ufeffBOM", "\x01\x1f\x7f", "''' '''x",
    "£5 €10 ¥100 ₹50",
)  # fmt: skip
TALK = [
    {"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "  And you? 'x' \"y\" <b> é"},
]  # fmt: skip
CUTS = {"qwen2": "qwen2", "mistral": "llama-bpe"}
TEMPLATES = {
    "llama": "llama3", "mistral": "mistral", "qwen2": "qwen2.5", "qwen3": "qwen3", "linear": "deepseek",
    "llama-3.1, tied": "gemma3",
}  # fmt: skip
"""The chat template of each case."""


def rounded(values: Tensor, numbers: str) -> Tensor:
    """The numbers that stand for `values` in a format of GGUF."""
    kind = gguf.GGMLQuantizationType[numbers.upper()]
    found = gguf.quants.dequantize(gguf.quants.quantize(values.detach().numpy(), kind), kind)
    return torch.from_numpy(found.reshape(values.shape).copy())


def ours(plain: Path, numbers: str, tokens: Tensor, inputs: bool) -> Tensor:
    """Our model's log-probabilities [rows, length, V] with rounded matrices, and with rounded `inputs` of these."""
    words = SIZES["vocab_size"]
    workload = load(f"hf:{plain}", "causal_lm", Vocabulary(words, eos=0), sequence_length=128)

    def read(name: str) -> Tensor:
        weight = workload.initial(name, 0)
        of_block = name.startswith("layers.")
        return (
            weight
            if weight.dim() < 2
            else rounded(weight, numbers if of_block or numbers != "q4_0" else "q8_0")
        )

    model = with_weights(workload, read)
    if inputs:
        for module in model.modules():
            if isinstance(module, nn.Linear | VocabularyProjection):
                module.register_forward_pre_hook(
                    lambda _, given: (rounded(given[0], INPUTS[numbers]), *given[1:])
                )
    with torch.no_grad():
        found: Tensor = model({"tokens": tokens}).logits.log_softmax(-1)
    return found


def made(folder: Path, case: str, numbers: str) -> dict[str, Any]:
    """Write a model and its file, and what is asked of the file; return what the answers are compared with."""
    kind, changes = CASES[case]
    plain = write(
        folder / "hf",
        kind,
        CUTS.get(kind, "gpt-2"),
        frame="<|begin|> $A" if kind == "llama" else "",
        **changes,
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(plain)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|over|>"]})
    tokenizer.chat_template = named_template(f"shipped:{TEMPLATES[case]}")
    tokenizer.save_pretrained(plain)
    over = tokenizer.convert_tokens_to_ids("<|over|>")
    described = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(described | {"eos_token_id": [0, over]}))
    export_gguf(str(plain), str(folder), numbers)  # type: ignore[arg-type]
    rows = ((np.arange(48).reshape(6, 8) * 7 + 11) % 300 + 5).tolist()
    return asking(folder, tokenizer, rows) | {"plain": plain, "ends": [True, True, False]}


def asking(folder: Path, tokenizer: Any, rows: list[list[int]]) -> dict[str, Any]:
    """Write asked.json of a folder, and return the ids that transformers gives."""
    letter = tokenizer.convert_tokens_to_ids("y")
    texts = [
        *TEXTS,
        *SCRIPTS,
        *(topics[name][:1500] for name in sorted(topics)[:40]),
        "a <|endoftext|>b <|over|>",
    ]
    talks = [TALK[:1], TALK] if tokenizer.chat_template else []
    forced = [0, tokenizer.convert_tokens_to_ids("<|over|>"), letter] if rows else []
    asked = {
        "vocabulary": SIZES["vocab_size"],
        "letter": letter,
        "rows": rows,
        "texts": texts,
        "talks": talks,
        "forced": forced,
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    framed = [[tokenizer(text, add_special_tokens=on)["input_ids"] for on in (False, True)] for text in texts]
    written = [
        tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in talks
    ]
    of_talks = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in written]
    return {"rows": rows, "ids": framed, "talks": of_talks, "ends": []}


def real_tokenizer(folder: Path) -> dict[str, Any]:
    """GPT-2's own tokenizer in a file, of which only tokens are asked."""
    plain = folder / "hf"
    plain.mkdir(parents=True)
    gpt2(plain)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(plain)
    config = transformers.AutoConfig.for_model(
        "llama", **(SIZES | {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1})
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    export_gguf(str(plain), str(folder), "f16")
    return asking(folder, tokenizer, [])


def judged(folder: Path, numbers: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's answers differ by; `wrong` names what disagrees."""
    found = json.loads((folder / "read.json").read_text())
    wrong = [name for name in ("ids", "talks", "ends") if found[name] != wanted[name]]
    if not wanted["rows"]:
        return {"wrong": wrong}
    read = np.load(folder / "read.npy")
    tokens = torch.tensor(wanted["rows"])
    alone, both = (ours(wanted["plain"], numbers, tokens, inputs).numpy() for inputs in (False, True))
    apart = abs(read - both).max(-1) / abs(both).max()
    row = {"weights": float(abs(read - alone).max() / abs(alone).max()), "both": float(apart.max())}
    row["median"] = float(np.median(apart))
    written = torch.tensor([wanted["rows"][0] + found["greedy"]])
    chances = ours(wanted["plain"], numbers, written, True)[0, len(wanted["rows"][0]) - 1 : -1]
    chosen = chances.gather(-1, torch.tensor(found["greedy"])[:, None])[:, 0]
    row["greedy"] = float((chances.amax(-1) - chosen).max() / abs(both).max())
    most = TRUE if numbers == "f32" else HALF
    wrong += [name for name in ("weights", "both", "greedy") if not row[name] <= most]
    # A row in which no number is moved over the middle is as exact as fp32.
    if numbers in ("q8_0", "q4_0") and not row["median"] <= TRUE:
        wrong.append("median")
    return {**row, "same": int((chances.argmax(-1) == torch.tensor(found["greedy"])).sum()), "wrong": wrong}


def main(kept: str | None) -> int:
    """Return 0 if every release reads every file as our model computes."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as scratch:
        work = Path(scratch)
        files = {(case, numbers): work / f"{case} {numbers}" for case in CASES for numbers in INPUTS}
        wanted = {key: made(folder, *key) for key, folder in files.items()}
        files["gpt2's tokenizer", "f16"] = folder = work / "gpt2"
        wanted["gpt2's tokenizer", "f16"] = real_tokenizer(folder)
        for release in RELEASES:
            python = environment(Path(kept) if kept else work / "environments", [f"xllamacpp=={release}"])
            for (case, numbers), folder in files.items():
                for name in ("read.npy", "read.json"):
                    (folder / name).unlink(missing_ok=True)
                reader = Path(__file__).with_name("llama_cpp_reader.py")
                done = subprocess.run(
                    [python, reader, folder], capture_output=True, text=True, timeout=600, errors="replace"
                )
                row = {"release": release, "case": case, "numbers": numbers}
                if (folder / "read.json").exists():
                    row |= judged(folder, numbers, wanted[case, numbers])
                else:
                    row["wrong"] = [line for line in done.stderr.splitlines() if "Error" in line][-1:] or [
                        f"exit code {done.returncode}"
                    ]
                failed += bool(row["wrong"])
                print(json.dumps(row), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [None]))
