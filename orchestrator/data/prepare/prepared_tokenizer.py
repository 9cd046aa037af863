"""The tokenizer of prepared data: a given one, that of other prepared data, or one that is trained on the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.encoding import tokenizer, training
from orchestrator.data.encoding.config import TokenizerRecipe
from orchestrator.data.prepare.fingerprint import TokenizerInputs
from orchestrator.data.prepare.part_text import sample
from orchestrator.data.prepare.shards import TokenFormat
from orchestrator.data.samples.sections import published
from orchestrator.data.sources import Part
from orchestrator.data.sources.lines import reach_of
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.node_copies import AGAIN
from orchestrator.data.store.tokens import read_tokenizer


def prepared_tokenizer(
    folder: DataFolder,
    given_tokenizer: TokenizerInputs,
    *,
    parts: Sequence[Part],
    text: CleanedText | None,
    data_format: int,
) -> TokenFormat:
    """Write the tokenizer into the folder of prepared data, after training it if the job asks for that.

    Args:
        folder: the prepared data.
        given_tokenizer: the tokenizer's JSON with its roles, or what to train; the records; and the framing.
        parts: the parts of the text to train on.
        text: the cleaned text; None if the job does not clean.
        data_format: format of the data.
    """
    chosen, kind, framing = given_tokenizer
    if isinstance(chosen[0], str):
        tokenizer_json, roles = chosen
        if folder.read("tokenizer.json") != tokenizer_json.encode():
            folder.write("tokenizer.json", tokenizer_json.encode())
        return TokenFormat(tokenizer.size_in(tokenizer_json), roles, data_format, kind, framing)
    if folder.read("tokenizer.json") is None:
        from orchestrator.data.prepare.part_tasks import run_alone

        rows = [sources.to_json(part, reach_of(data_format)) for part in parts]
        run_alone(_train, folder.uri, folder.uri, (rows, chosen, data_format), text)
    made = (folder.read("tokenizer.json") or b"").decode()
    roles = tokenizer.roles_of(tokenizer.encoder(made), {})
    # use the requested size even if the text gave fewer entries: the model's size follows from it before there is
    # data
    return TokenFormat(chosen[0], roles, data_format, kind, framing)


def read_tokenizer_of(uri: str) -> tuple[str, dict[str, int]]:
    """Return the tokenizer of the prepared data at `uri` as JSON, and the ids of its tokens by role. Raises
    InputError and DamagedShard.
    """
    folder = DataFolder(uri)
    if (published_data := published.read(folder)) is None:
        raise InputError("there is no prepared data", uri, AGAIN)
    return read_tokenizer(folder, published_data), published_data.roles


def _train(uri: str, work: tuple[list[str], list[Any], int], text: CleanedText | None) -> None:
    """Train the configured tokenizer on these parts of the text, for data of that format."""
    parts, chosen, data_format = work
    entries, special_tokens, *recipe_parts = chosen
    recipe = TokenizerRecipe(vocabulary=entries, **(recipe_parts[0] if recipe_parts else {}))
    limit = training.SAMPLE_BYTES[recipe.kind]
    texts = sample([sources.from_json(part) for part in parts], limit, data_format, text)
    DataFolder(uri).write("tokenizer.json", training.train(texts, recipe, special_tokens).encode())
