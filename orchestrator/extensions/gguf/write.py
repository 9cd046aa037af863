"""Export as one GGUF file for llama.cpp: tensors, configuration and tokenizer.

Tensor names are those of the gguf package, metadata keys those of the format (github.com/ggml-org/ggml,
docs/gguf.md), choices those of llama.cpp's own converter (its folder conversion/).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.check.compare import TOLERANCE
from workloads.hf.files.name_maps import to_pairs
from workloads.hf.files.weight_files import Weights
from workloads.model.scheme import BLOCK

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {
    "": "gpt-2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
"""llama.cpp's name for a way to split text, by its regular expression; empty for the byte-level pre-tokenizer itself.
"""
TEXTS = (
    "Hello, world!  It's 12345 o'clock;\n\n\tWE'LL see.",
    " Größe, 東京 and 🙂 at 3.14159 % of café\r\n",
    "def f(x):\n    return x ** 2  # done",
)
HINT = "export it for transformers"


def add_tokenizer(writer: Any, plain: str, config: Mapping[str, Any]) -> None:
    """Add the tokenizer of an export. Raises WorkloadError if llama.cpp has no equivalent."""
    import gguf

    wrapped = _wrapped(plain)
    about = json.loads((Path(plain) / "tokenizer.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut(about))
    added = {token["id"]: token for token in about["added_tokens"]}
    names = {number: token for token, number in wrapped.get_vocab().items()}
    tokens = []
    kinds = []
    for number in range(config["vocab_size"]):
        tokens.append(names.get(number, f"[PAD{number}]"))
        kind = gguf.TokenType.NORMAL if number in names else gguf.TokenType.UNUSED
        if number in added:
            kind = gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = about["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    begins, ends = _frame(wrapped)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    of_ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for number, add in (
        *zip(_ends(wrapped, config), of_ends, strict=False),
        (wrapped.bos_token_id, writer.add_bos_token_id),
        (wrapped.unk_token_id, writer.add_unk_token_id),
        (wrapped.pad_token_id, writer.add_pad_token_id),
    ):  # fmt: skip
        if number is not None:
            add(number)
    if wrapped.chat_template:
        writer.add_chat_template(wrapped.chat_template)


def check_tokenizer(plain: str, folder: str, file: str) -> None:
    """Raise RuntimeError if transformers reads another tokenizer from the GGUF file."""
    from transformers import PreTrainedTokenizerFast

    wanted = _wrapped(plain)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file, local_files_only=True)
    for text in (*TEXTS, *(f"a{token}b" for token in wanted.all_special_tokens)):
        expected, actual = (each(text, add_special_tokens=False)["input_ids"] for each in (wanted, tokenizer))
        if expected != actual:
            raise RuntimeError(
                f"transformers reads a tokenizer from {file} that splits {text!r} differently; nothing was "
                "published"
            )


def _wrapped(plain: str) -> Any:
    """Return the tokenizer in a folder, as the plain class. Some models' own classes split text in their own way,
    whatever the folder says.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(plain, local_files_only=True)


def _cut(about: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way a tokenizer.json splits text. Raises WorkloadError if it has none."""
    model = about["model"]
    before = about["pre_tokenizer"] or {}
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    last = steps[-1]
    if model["type"] != "BPE" or last.get("type") != "ByteLevel":
        raise WorkloadError(
            f"GGUF export needs byte-level BPE, but this tokenizer is of another kind; {HINT}"
        )
    expression = next((step["pattern"].get("Regex", "?") for step in steps if step["type"] == "Split"), "")
    name = _CUTS.get(expression)
    plain = (
        not last.get("add_prefix_space")
        and last.get("use_regex", True) == (not expression)
        and len(steps) < 3
    )
    normalised = about["normalizer"] is not None and (name, about["normalizer"]["type"]) != ("qwen2", "NFC")
    merges_fit = bool(model.get("ignore_merges")) == (name == "llama-bpe")
    if name is None or not plain or normalised or not merges_fit:
        raise WorkloadError(
            f"llama.cpp splits text as GPT-2, Llama 3 or Qwen 2 do, but this tokenizer does not; {HINT}"
        )
    for token in about["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise WorkloadError(
                "llama.cpp finds added tokens anywhere and keeps the spaces around them, but "
                f"{token['content']!r} of this tokenizer has lstrip, rstrip or single_word; {HINT}"
            )
    return name


def _ends(wrapped: Any, config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text, that of the tokenizer first. Raises WorkloadError for more than three:
    llama.cpp stops at eos, at the end of a turn (eot) and at the end of a message (eom).
    """
    named = config.get("eos_token_id")
    named = named if isinstance(named, list) else [named]
    ends = [number for number in dict.fromkeys([wrapped.eos_token_id, *named]) if number is not None]
    if len(ends) > 3:
        raise WorkloadError(
            f"llama.cpp stops at three tokens at most, but {len(ends)} end a text of this model; {HINT}"
        )
    return ends


def _frame(wrapped: Any) -> tuple[bool, bool]:
    """Return whether a text begins with bos and ends with eos. Raises WorkloadError for other tokens around it."""
    bare, full = (wrapped("a", add_special_tokens=on)["input_ids"] for on in (False, True))
    for begin in (False, True):
        for end in (False, True):
            if full == [*[wrapped.bos_token_id] * begin, *bare, *[wrapped.eos_token_id] * end]:
                return begin, end
    raise WorkloadError(f"this tokenizer adds tokens other than bos and eos around a text; {HINT}")


Numbers: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
BLOCKS = ("q8_0", "q4_0")
"""Formats in which 32 numbers of a row share a scale."""
AROUND = ("model.embed_tokens.weight", "lm_head.weight")
"""The embedding and the output, by transformers' names."""
FILE = "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's architecture for each model_type of transformers."""
TRIED = 24
"""Tokens on which the outputs are compared."""


def export_gguf(plain: str, folder: str, numbers: Numbers, chosen: Collection[str] | None = None) -> float:
    """Write the export in `plain` to `folder`/model.gguf.

    Matrices have the format `numbers`, vectors fp32. Matrices whose rows do not divide into blocks have fp16. With
    q4_0 the embedding and the output have q8_0, as they lose most (llama.cpp keeps more bits there too). If weights
    are `chosen`, by transformers' names, other matrices have fp16.

    Returns the largest difference of its outputs to those of `plain`, as a share of the largest number; rounding
    causes it. Raises WorkloadError if llama.cpp has no such model or tokenizer, RuntimeError if transformers reads
    another model from the file than one with the rounded weights.
    """
    import gguf

    config = json.loads((Path(plain) / "config.json").read_text())
    check_gguf(config)
    writer = gguf.GGUFWriter(str(Path(folder) / FILE), ARCHITECTURES[config["model_type"]])
    file_types = gguf.LlamaFileType
    writer.add_file_type(
        {
            "f32": file_types.ALL_F32, "f16": file_types.MOSTLY_F16, "bf16": file_types.MOSTLY_BF16,
            "q8_0": file_types.MOSTLY_Q8_0, "q4_0": file_types.MOSTLY_Q4_0,
        }[numbers]
    )  # fmt: skip
    if numbers in BLOCKS:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_config(writer, config)
    add_tokenizer(writer, plain, config)
    kind_of = partial(_kind, numbers=numbers, chosen=chosen)
    tensors = {
        name: (kind_of(hf_name, shape), shape, read) for name, hf_name, shape, read in _tensors(plain, config)
    }
    for name, (kind, shape, _) in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(
            name, shape, np.dtype(np.float32), math.prod(shape) // block * size, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for kind, _, read in tensors.values():
        writer.write_tensor_data(gguf.quants.quantize(read(), kind))
    writer.close()
    check_tokenizer(plain, folder, FILE)
    return _difference(plain, folder, kind_of)


def check_gguf(config: Mapping[str, Any]) -> None:
    """Raise WorkloadError if llama.cpp has no model for this config.json, or computes another one."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES or not str(config["architectures"][0]).endswith("ForCausalLM"):
        named = config["architectures"][0]
        raise WorkloadError(
            f"GGUF export supports language models of {', '.join(ARCHITECTURES)}, but this is {named}; "
            "export it for transformers"
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and window < config["max_position_embeddings"]:
        raise WorkloadError(
            f"llama.cpp attends to all positions in a {kind}, but this model only to a window of {window}; "
            "export it for transformers"
        )
    if config["hidden_act"] != "silu" or config.get("attention_bias") or config.get("mlp_bias"):
        raise WorkloadError(
            f"llama.cpp has no {kind} with other activations than silu or with more biases; export it for transformers"
        )
    scaling = config["rope_parameters"].get("rope_type", "default")
    if scaling not in ("default", "linear") and (kind, scaling) != ("llama", "llama3"):
        raise WorkloadError(
            f"GGUF export supports no rotary positions of type {scaling} for a {kind}; export it for transformers"
        )


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    """Add the metadata of the model, see docs/gguf.md of ggml."""
    rope = config["rope_parameters"]
    head = _head(config)
    writer.add_name(config["architectures"][0])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _tensors(
    plain: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, str, torch.Size, Callable[[], np.ndarray]]]:
    """Yield each tensor: its name in the file, transformers' name, its shape, and a function that reads it."""
    import gguf

    weights = Weights(plain)
    kind = config["model_type"]
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name in weights.names:
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise WorkloadError(f"llama.cpp has no tensor for {hf_name}; export it for transformers")
        paired = ARCHITECTURES[kind] == "llama" and re.search(r"self_attn\.[qk]_proj", hf_name)
        head = _head(config) if paired else 0
        yield name, hf_name, weights.shape(hf_name), partial(_read, weights, hf_name, head)
    if config["rope_parameters"].get("rope_type") == "llama3":
        factors = _stretched(plain)
        yield "rope_freqs.weight", "", factors.shape, factors.numpy


def _read(weights: Weights, name: str, head: int) -> np.ndarray:
    return to_pairs(weights.read(name), head).contiguous().float().numpy()


def _stretched(plain: str) -> Tensor:
    """Return the divisor of each rotary frequency of Llama 3.1."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(plain, local_files_only=True)
    slow, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head = 2 * len(slow)
    theta = config.rope_parameters["rope_theta"]
    return (1 / theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)) / slow


def _head(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kind(name: str, shape: torch.Size, numbers: Numbers, chosen: Collection[str] | None) -> Any:
    """Return the format of a tensor by transformers' name, an enumeration of gguf."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2 or numbers == "f32":
        return kinds.F32
    if numbers not in BLOCKS:
        return {"f16": kinds.F16, "bf16": kinds.BF16}[numbers]
    if (chosen is not None and name not in chosen) or shape[-1] % BLOCK:
        return kinds.F16
    in_8_bits = numbers == "q8_0" or (chosen is None and name in AROUND)
    return kinds.Q8_0 if in_8_bits else kinds.Q4_0


def _difference(plain: str, folder: str, kind_of: Callable[[str, torch.Size], Any]) -> float:
    """Return the result of `export_gguf`, from the file as transformers reads it."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()  # in commands, among their own lines
    wanted = AutoModelForCausalLM.from_pretrained(plain, local_files_only=True, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(folder, gguf_file=FILE, local_files_only=True)
    if wanted.config.rope_parameters.get("rope_type") != "default":
        config.rope_parameters = (
            wanted.config.rope_parameters
        )  # transformers does not read these from a file, nor those of a Qwen
    config.head_dim = _head(wanted.config.to_dict())  # nor that of a Qwen
    with contextlib.redirect_stderr(io.StringIO()):  # its own progress bar
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=FILE, config=config, local_files_only=True, dtype=torch.float32
        ).eval()
    tokens = torch.arange(TRIED)[None] % wanted.config.vocab_size
    with torch.no_grad():
        exact = wanted(tokens).logits
        logits = loaded(tokens).logits
        for name, tensor in wanted.named_parameters():  # a tied one appears once
            kind = kind_of(name, tensor.shape)
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            tensor.copy_(torch.from_numpy(rounded.reshape(tensor.shape)))
        apart = _apart(wanted(tokens).logits, logits)
    if not apart <= TOLERANCE:
        raise RuntimeError(
            f"transformers reads a model from {FILE} that differs by {apart:.2e}; nothing was published"
        )
    return _apart(exact, logits)


def _apart(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max() / expected.abs().max().clamp(min=1))


def kept_in_file(folder: str, numbers: str) -> list[str]:
    """Return the matrices of a GGUF file that keep more bits than the format `numbers`."""
    import gguf

    tensors = gguf.GGUFReader(Path(folder) / FILE).tensors
    return sorted(
        each.name for each in tensors if len(each.shape) > 1 and each.tensor_type.name != numbers.upper()
    )
