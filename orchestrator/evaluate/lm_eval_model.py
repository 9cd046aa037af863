"""A model of ours behind lm-eval's interface: likelihoods of texts, and generated texts.

Scores and generated texts equal those of lm-eval's own `hf` model with the same weights in the Hugging Face format: the
same tokens, cut at the same positions. There are three differences:

- Before a text without a context, this model uses the token with which training begins a text. `hf` uses the bos of
  the tokenizer, which many models have never seen.
- An encoder-decoder generates `max_gen_toks` tokens. `hf` adds the number of the prompt's tokens.
- For a whole text (`loglikelihood_rolling`), only the text's own tokens are predicted. `hf` counts the bos that the
  tokenizer adds as text, and predicts it from another bos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from orchestrator.config.errors import InputError
from orchestrator.evaluate.task_files import max_tokens
from workloads.model.score import LOGITS, ROWS, check_scores, longest, score
from workloads.workload import Sampling

if TYPE_CHECKING:
    from torch import nn

    from workloads.workload import Workload

DEFAULT_LENGTH = 2048
"""Tokens that a model without a limit reads in one pass, as in lm-eval."""


class WorkloadLM(TemplateLM):
    """`model` of `workload`, with a transformers tokenizer that adds special tokens as training does.

    `truncated` counts the texts that exceeded the model's positions and lost their beginning.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, tokenizer: Any, progressed: Callable[[], object]
    ) -> None:
        """`progressed` is called after each batch. Raises WorkloadError if the model gives no likelihoods."""
        super().__init__()
        check_scores(workload)
        self._workload = workload
        self._model = model
        self._progressed = progressed
        self.tokenizer = tokenizer
        self.truncated = 0
        self._pair = workload.config.architecture == "encoder-decoder"
        self.backend = "seq2seq" if self._pair else "causal"
        self.max_length = longest(workload) or DEFAULT_LENGTH

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._workload.vocabulary.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the one with which training begins a text, else a document's
        end.
        """
        if before := self._workload.vocabulary.before:
            return before[-1]
        begins = getattr(self._workload.vocabulary, self._workload.objective.begins or "eos", None)
        return self.eot_token_id if begins is None else int(begins)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Return the tokens of a text, with the tokenizer's special tokens unless told otherwise."""
        if add_special_tokens is None:
            # A text that already begins with the first token does not get a second one.
            framed = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = not framed
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        result = score(self._workload, self._model, pairs, self._progressed)
        return [(each.total, each.greedy) for each in result]

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return context and continuation, cut from the left to the model's maximum length."""
        if not continuation:
            raise InputError("a choice is empty", "doc_to_choice", "give each a text")
        if len(continuation) > self.max_length:
            problem = (
                f"a text of {len(continuation)} tokens is longer than the model's {self.max_length} positions"
            )
            raise InputError(problem, "doc_to_target", "shorten it, or evaluate a longer model")
        room = self.max_length if self._pair else self.max_length + 1 - len(continuation)
        self.truncated += len(context) > room
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows if it exceeds the model's positions."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolled = get_rolling_token_windows(
                self._predicted(text), self.prefix_token_id, self.max_length, context_len=1
            )
            parts = [(None, *make_disjoint_window(window)) for window in rolled]
            windows += parts
            counts.append(len(parts))
        totals = iter([total for total, _ in self._loglikelihood_tokens(windows)])
        return [sum(next(totals) for _ in range(count)) for count in counts]

    def _predicted(self, text: str) -> list[int]:
        """Return the tokens of a whole text that are predicted: without the special tokens before it."""
        if self._pair:
            return self.tok_encode(text)
        tokens = self.tok_encode(text, add_special_tokens=False)
        return tokens[1:] if tokens[:1] == [self.prefix_token_id] else tokens

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text after each prompt, up to the first of its stop strings."""
        encoded = [(self.tok_encode(request.args[0]), request.args[1]) for request in requests]
        order = sorted(
            range(len(encoded)), key=lambda n: (_settings(encoded[n][1]), len(encoded[n][0])), reverse=True
        )
        result: dict[int, str] = {}
        while order:
            first = order[0]
            settings = _settings(encoded[order[0]][1])
            batch = [
                n for n in order[: self._rows(len(encoded[first][0]))] if _settings(encoded[n][1]) == settings
            ]
            answers = self._generate_texts([encoded[n][0] for n in batch], encoded[first][1])
            result |= zip(batch, answers, strict=True)
            order = order[len(batch) :]
            self._progressed()
        return [result[number] for number in range(len(encoded))]

    def _rows(self, length: int) -> int:
        # The limit is both for the logits of a completely read prompt, and for the cache that grows with it.
        return max(1, min(ROWS, LOGITS // (self._workload.config.vocab_size * max(length, 1))))

    def _generate_texts(self, prompts: list[list[int]], settings: Mapping[str, Any]) -> list[str]:
        limit = max_tokens(settings)
        room = self.max_length if self._pair else self.max_length - limit
        if room < 1:
            problem = f"{limit} leaves no room for a prompt in the model's {self.max_length} positions"
            raise InputError(problem, "generation_kwargs.max_gen_toks", "lower it")
        self.truncated += sum(len(prompt) > room for prompt in prompts)
        rows = [prompt[-room:] or [self.prefix_token_id] for prompt in prompts]
        until = settings.get("until") or []
        stops = [*([until] if isinstance(until, str) else until), self.tokenizer.decode([self.eot_token_id])]

        def ended(row: Sequence[int]) -> bool:
            return _cut(text := self._text(row), stops) != text

        answers = self._workload.generate(self._model, rows, limit, _sampling(settings), ended)
        return [_cut(self._text(row), stops) for row in answers]

    def _text(self, row: Sequence[int]) -> str:
        return str(self.tokenizer.decode(row, skip_special_tokens=True))


def _settings(settings: Mapping[str, Any]) -> str:
    """Return the settings. Requests with equal settings are generated together."""
    return repr(sorted(settings.items()))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Return greedy sampling unless the task asks for a draw. As in lm-eval, a nonzero temperature alone does so."""
    temperature = float(settings.get("temperature") or 0.0)
    if not settings.get("do_sample", temperature > 0.0):
        return Sampling()
    top_p = settings.get("top_p")
    return Sampling(
        temperature or 1.0, int(settings.get("top_k") or 0), 1.0 if top_p is None else float(top_p)
    )


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text
