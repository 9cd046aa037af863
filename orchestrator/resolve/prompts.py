"""The prompts of `evaluate.samples` as the job's model reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.data.sources.repair import is_unicode
from orchestrator.resolve.chat import Chat, chat_of
from orchestrator.resolve.resolved_job import ResolvedJob, wrong_input

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from orchestrator.data.store.tokens import Tokens
    from workloads.workload import Generation, Workload

WHERE = "evaluate.samples"
PAIR = "encoder-decoder"


@dataclass(frozen=True)
class Prompts:
    """The prompts that the model continues at every evaluation.

    Attributes:
        texts: the prompts of the job.
        rows: their token ids, with special tokens as in training, or as a user's messages before an answer.
        start: the first token of an encoder-decoder's answer; None for a decoder, which continues its row.
        generation: the end tokens, and processors for the other tokens.
        decode: returns the text of token ids, without special tokens.
    """

    texts: list[str]
    rows: list[list[int]]
    start: int | None
    generation: Generation
    decode: Callable[[Sequence[int]], str]


def check_generates(job: ResolvedJob) -> None:
    """Raise InputError if the job asks for samples of a model that does not generate text."""
    spec = job.spec
    if spec.evaluate is None or spec.evaluate.samples is None:
        return
    if not generates(job):
        model = f"{spec.workload.model} ({job.model.architecture})"
        problem = f"{model}, trained by {spec.workload.objective}, does not generate text"
        hint = "leave it out, or train a decoder, an encoder-decoder, or an own model that has logits(batch)"
        raise InputError(problem, WHERE, hint)
    tokens = spec.evaluate.samples.tokens
    length = spec.data.sequence_length
    if job.model.architecture != PAIR and tokens >= length:
        problem = (
            f"{tokens} generated tokens leave no room for a prompt in the {length} of data.sequence_length"
        )
        raise InputError(problem, f"{WHERE}.tokens", "lower it")


def generates(job: ResolvedJob) -> bool:
    """Return whether the job's model generates text."""
    from workloads.describe import for_objective

    ours = job.model.as_transformer
    model = for_objective(ours, job.spec.workload.objective) if ours else job.model
    if getattr(model, "gives_logits", False):
        return True
    return model.architecture in ("decoder", PAIR) and getattr(model, "head", "language") == "language"


def prompts_of(job: ResolvedJob, workload: Workload, tokens: Tokens) -> Prompts | None:
    """Return the prompts of a job, None without samples. They are a user's messages if the model learns from
    conversations.

    Raises InputError if the model does not generate text, or if a prompt plus the tokens to generate exceeds a
    sequence.
    """
    samples = job.spec.evaluate and job.spec.evaluate.samples
    if not samples:
        return None
    check_generates(job)
    text = tokens.tokenizer()
    longest = job.spec.data.sequence_length
    chat = chat_of(job.spec.data, job.spec.workload.objective, tokens)
    rows = [framed(workload, text, prompt, chat) for prompt in samples.prompts]
    pair = workload.config.architecture == PAIR
    for number, row in enumerate(rows):
        if max(len(row), samples.tokens + 1) > longest if pair else len(row) + samples.tokens > longest:
            problem = (
                f"prompt {number} has {len(row)} tokens; with {samples.tokens} generated tokens it exceeds a "
                "sequence"
            )
            raise InputError(f"{problem} ({longest})", WHERE, "shorten it, or lower tokens")
    start = workload.decoder_start if pair else None
    if pair and start is None:
        raise InputError("the decoder has no token to begin with", WHERE, "give the vocabulary a pad token")
    generation = speaking(workload, chat).generation.ending(workload.vocabulary.eos)
    return Prompts(samples.prompts, rows, start, generation, lambda ids: spoken(text, ids, chat))


def speaking(workload: Workload, chat: Chat | None) -> Any:
    """Return the workload, whose texts also end where an answer of `chat` does."""
    if chat is None:
        return workload
    ends = (workload.vocabulary.eos, *sorted(chat.ends))
    return replace(workload, generation=workload.generation.ending(*ends))  # type: ignore[type-var]


def settings_notes(model: str) -> list[str]:
    """Return one line if the folder of `model` has generation settings that are not applied."""
    from workloads.hf.files.hf_config import FOLDER
    from workloads.hf.files.meaning import folder_meaning
    from workloads.model.processors import not_applied
    from workloads.workload import Generation

    if not model.startswith(FOLDER):
        return []
    with wrong_input("workload.model"):
        line = not_applied(Generation(settings=folder_meaning(model.removeprefix(FOLDER)).settings))
    return [f"{model}: {line}"] if line else []


def spoken(tokenizer: Tokenizer, ids: Sequence[int], chat: Chat | None) -> str:
    """Return the generated text, without special tokens and the end of the message."""
    answer_ids = ids[:-1] if chat and {*ids[-1:]} & chat.ends else ids
    return str(tokenizer.decode(list(answer_ids), skip_special_tokens=True))


def framed(workload: Workload, tokenizer: Tokenizer, prompt: str, chat: Chat | None = None) -> list[int]:
    """Return the prompt's tokens as in training, but open at the end for a decoder to continue.

    An empty prompt is a document's end, after which the next document begins. With `chat`, the prompt is a user's
    message, open for the answer.
    """
    if not is_unicode(prompt):
        raise InputError("has an unpaired surrogate", f"{WHERE} {prompt!a}", "give text")
    if chat is not None:
        return chat.row(prompt)
    before, after = workload.objective.around
    inside = tokenizer.encode(prompt, add_special_tokens=False).ids
    if opening := workload.vocabulary.before:  # a prompt may already begin with it
        before = () if tuple(inside[: len(opening)]) == opening else opening
    framed = [*before, *inside, *(after if workload.config.architecture == PAIR else ())]
    return framed or [workload.vocabulary.eos]
