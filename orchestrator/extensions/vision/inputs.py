"""Files with which transformers prepares images and captions; CLIPProcessor and AutoProcessor read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN = "<|startoftext|>"
END = "<|endoftext|>"
BICUBIC = 3
"""Pillow's number of bicubic resampling."""


def processor_config(size: int, channels: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """Return the image processor that does what `orchestrator.extensions.vision.files.decoded` does, and normalises."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer that matches `samples.byte_tokens`: UTF-8 bytes between 256 and 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    # Bytes are spelled as by GPT-2: visible ones as themselves, the others as characters from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    result = Tokenizer(models.BPE(vocab=letters, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([BEGIN, END])
    result.post_processor = processors.TemplateProcessing(
        single=[BEGIN, "$A", END], special_tokens=[(BEGIN, 256), (END, 257)]
    )
    return result


def write_inputs(folder: str, processor: Mapping[str, Any], tokenizer: Tokenizer | None, tokens: int) -> None:
    """Write the image processor, and the tokenizer of captions of `tokens` tokens if there is one."""
    target = Path(folder)
    both = {} if tokenizer is None else {"processor_class": "CLIPProcessor"}
    (target / "preprocessor_config.json").write_text(json.dumps({**processor, **both}, indent=2) + "\n")
    if tokenizer is None:
        return
    tokenizer.save(str(target / "tokenizer.json"))
    around = [tokenizer.id_to_token(number) for number in tokenizer.encode("").ids]
    roles = {"bos_token": around[0]} if len(around) > 1 else {}
    if around:  # the last token also pads, see `Images`
        roles |= {"eos_token": around[-1], "pad_token": around[-1]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokens,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **both,
        **roles,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
