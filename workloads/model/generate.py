"""Generation with a key-value cache: prompts of any lengths in one batch, greedy or sampled.

The first forward pass reads the prompt; each further token takes one pass. An expert's capacity applies to one pass, as
in transformers: the tokens of a prompt compete as in training, and later tokens always find room. For each token, layer
and key head the cache holds two vectors. Latent attention caches its expanded keys and values.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workloads.errors import LogitsNotFinite, WorkloadError
from workloads.model.cache import Cache
from workloads.model.config import TransformerConfig
from workloads.model.processors import Change, change_of
from workloads.workload import Batch, Ended, Generation, Sampling

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps tokens, positions and padding (True is real), [B, L] each, to the logits of every row's last token, [B,
vocabulary].
"""


@torch.inference_mode()
def generate(
    model: nn.Module,
    config: TransformerConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    generation: Generation,
    start: int | None = None,
    sampling: Sampling | None = None,
    ended: Ended | None = None,
) -> list[list[int]]:
    """Generate at most `max_tokens` tokens after each prompt, with the settings of `generation`.

    A text ends with the first of its `ends`, or when `ended` returns True for it. A decoder continues its prompt. An
    encoder-decoder encodes the prompt, and its decoder begins with `start`. Learned positions limit a text: prompt plus
    continuation, or each side of an encoder-decoder, has at most `max_positions` tokens. Other positions have no limit.

    Raises:
        LogitsNotFinite: if logits are not finite.
        WorkloadError: if the model generates no text, or a prompt is empty or leaves no room for a token.

    Args:
        model: the model, on any device.
        config: its configuration.
        prompts: token ids of each prompt.
        max_tokens: maximum number of generated tokens.
        generation: settings of a pretrained folder: tokens that end a text, and changes of logits.
        start: the token with which an encoder-decoder's decoder begins; None for a decoder.
        sampling: how tokens are drawn; greedy if None.
        ended: further says of generated tokens whether the text has ended.

    Returns:
        The generated tokens of each prompt.
    """
    check_generates(config)
    pair = config.architecture == "encoder-decoder"
    if pair and start is None:
        raise WorkloadError("the decoder has no token to begin with; give the vocabulary a pad token")
    begun = [[start] if pair and start is not None else list(prompt) for prompt in prompts]
    rooms = _rooms(config, prompts, begun, max_tokens)
    if not prompts:
        return []
    device = next(model.parameters()).device
    with evaluating(model):
        cache = Cache(max(map(len, begun)) + max(rooms))
        step = _pair(model, cache, prompts, device) if pair else _decoder(model, cache)
        opening = start if pair else None
        changes = [
            change_of(generation, prompt, opening, room, device)
            for prompt, room in zip(prompts, rooms, strict=True)
        ]
        over = _over(generation.ends, ended)
        return _continue(
            step,
            begun,
            rooms=rooms,
            over=over,
            sampling=sampling or Sampling(),
            changes=changes,
            device=device,
        )


def check_generates(config: TransformerConfig) -> None:
    """Raise WorkloadError if a model generates no text."""
    if config.architecture not in ("decoder", "encoder-decoder") or config.head != "language":
        kind = (
            config.architecture
            if config.head == "language"
            else f"{config.architecture} with head {config.head}"
        )
        raise WorkloadError(
            f"{config.family} ({kind}) generates no text; use a decoder or an encoder-decoder "
            "with a language head"
        )


def _rooms(
    config: TransformerConfig, prompts: Sequence[Sequence[int]], begun: list[list[int]], most: int
) -> list[int]:
    """Return how many tokens each row may still get."""
    rooms = []
    for number, (prompt, row) in enumerate(zip(prompts, begun, strict=True)):
        if not prompt:
            raise WorkloadError(f"prompt {number} is empty; begin it with a token")
        limit, room = config.max_positions, most
        if config.positions == "learned":
            room = min(most, limit - len(row))
            if room < 1 or len(prompt) > limit:
                problem = f"prompt {number} has {len(prompt)} tokens, but the model has {limit} positions"
                raise WorkloadError(f"{problem}; shorten the prompt")
        rooms.append(room)
    return rooms


def _decoder(model: nn.Module, cache: Cache) -> Step:
    def step(tokens: Tensor, positions: Tensor, real: Tensor) -> Tensor:
        batch: Batch = {"tokens": tokens, "positions": positions, "padding": real}
        logits: Tensor = model(batch, cache=cache).logits
        # [B, 1, vocabulary]: with a cache the model computes the logits of each row's last real token only.
        return logits[:, 0]

    return step


def _pair(model: nn.Module, cache: Cache, prompts: Sequence[Sequence[int]], device: torch.device) -> Step:
    tokens, padding = padded(prompts, device)
    source: Batch = {"tokens": tokens, "padding": padding}
    memory: Tensor | None = None

    def step(tokens: Tensor, positions: Tensor, real: Tensor) -> Tensor:
        nonlocal memory
        output = model(
            {**source, "decoder_tokens": tokens, "decoder_positions": positions}, memory=memory, cache=cache
        )
        memory = output.memory
        logits: Tensor = output.logits
        return logits[:, -1]

    return step


def _over(ends: Collection[int], ended: Ended | None) -> Ended:
    return lambda row: bool({*row[-1:]} & {*ends}) or (ended is not None and ended(row))


def _continue(
    step: Step,
    begun: list[list[int]],
    rooms: list[int],
    over: Ended,
    sampling: Sampling,
    changes: Sequence[Change | None],
    device: torch.device,
) -> list[list[int]]:
    generated: list[list[int]] = [[] for _ in begun]
    tokens, real = padded(begun, device)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    # [B, 1]: position of each row's last token. Prompts end at different positions, so every row counts its own.
    at = real.sum(1, keepdim=True) - 1
    going = [room > 0 for room in rooms]
    while any(going):
        rows = zip(begun, generated, strict=True) if any(changes) else ()
        read = [[*first, *row] for first, row in rows]
        token_numbers = [len(row) for row in generated]
        chosen = choose(step(tokens, positions, real), sampling, token_numbers, changed=(changes, read))
        for row, token, goes in zip(generated, chosen.tolist(), going, strict=True):
            row += [token] if goes else []
        still = zip(generated, rooms, going, strict=True)
        going = [goes and len(row) < room and not over(row) for row, room, goes in still]
        # A row that has ended keeps its position, because it may already be at the last one.
        at = at + torch.tensor(going, device=device).unsqueeze(1)
        tokens = chosen.unsqueeze(1)
        positions = at
        real = torch.ones_like(at, dtype=torch.bool)
    return generated


def choose(
    logits: Tensor,
    sampling: Sampling,
    token_numbers: Sequence[int],
    prompt: int = 0,
    changed: tuple[Sequence[Change | None], Sequence[Sequence[int]]] = ((), ()),
) -> Tensor:
    """Return the next token of every row, int64 [B].

    The draw depends only on (seed, prompt number, token number) and the row's logits: it is the first token, by falling
    probability, whose cumulative probability exceeds one uniform number. `top_k` keeps the most probable tokens (Fan et
    al. 2018); `top_p` then keeps the fewest whose probabilities sum to at least top_p (Holtzman et al. 2020).

    Args:
        logits: [B, vocabulary].
        sampling: how tokens are drawn.
        token_numbers: number of tokens that each row has generated.
        prompt: number of the first row's prompt.
        changed: for each row a function that first modifies its logits, and the tokens that its decoder has read.

    Raises:
        LogitsNotFinite: logits are not finite.
    """
    if not torch.isfinite(logits).all():
        raise LogitsNotFinite
    changes, read = changed
    if any(changes):
        rows = zip(changes, read, logits, strict=True)
        logits = torch.stack(
            [row.float() if change is None else change(tokens, row) for change, tokens, row in rows]
        )
    if not sampling.temperature:
        return logits.argmax(-1)
    # Stable: of equal logits the smaller id comes first on every device, so that the same number draws the same token.
    scores, order = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scores = scores[:, : sampling.top_k]
        order = order[:, : sampling.top_k]
    shares = scores.softmax(-1)
    # The probability of all more probable tokens. A token stays if this does not reach top_p without it.
    in_nucleus = shares.cumsum(-1) - shares < sampling.top_p
    in_nucleus[:, 0] = True  # with a top_p of 0, the most probable token alone
    shares = torch.where(in_nucleus, shares, 0.0)
    total = shares.cumsum(-1)
    drawn = [
        uniform(sampling.seed, number, token_number)
        for number, token_number in enumerate(token_numbers, prompt)
    ]
    height = torch.tensor(drawn, dtype=torch.float64, device=logits.device).unsqueeze(1) * total[:, -1:]
    # In fp64: in fp32 the rounding of a sum over a large vocabulary exceeds the share of a rare token.
    chosen = torch.searchsorted(total, height, right=True).clamp(max=order.shape[1] - 1)
    return order.gather(1, chosen).squeeze(1)


def uniform(seed: int, prompt: int, token_number: int) -> float:
    """Return a number in [0, 1) that is the same on every machine.

    Args:
        seed: of the sampling.
        prompt: number of the prompt.
        token_number: number of the token in its text.
    """
    return float((random_key(seed, prompt, token_number) % 2**64 >> 11) / 2**53)


def random_key(seed: int, prompt: int, token_number: int) -> int:
    """Return a random number in the range of int64 that is the same on every machine.

    Args:
        seed: of the sampling.
        prompt: number of the prompt.
        token_number: number of the token in its text.
    """
    digest = hashlib.blake2b(struct.pack("<3q", seed, prompt, token_number), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows padded at their ends, int64 [B, L], and which positions are real.

    Args:
        rows: token ids of each row.
        device: the device of the result.

    Returns:
        Tokens int64 [B, L], and a mask bool [B, L], True for real tokens.
    """
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(longest, device=device) < lengths.unsqueeze(1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and restore its mode afterwards."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
