"""Divergences between the predictions of a teacher and a student, and differences between their inner states.

The loss of a distilled model is a weighted sum of parts (Hinton et al., 2015, section 2):

    labels w_l + T^2 logits w + hidden w_h + relations w_r

Sums over predicted tokens are divided by their number in the global batch, as every loss is. Hidden states and
relations are means over the real tokens of a sample, averaged over the samples of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workloads.workload import Batch, Loss

Divergence = Literal["forward", "reverse", "jensen_shannon"]
TEACHER_LOGITS = "teacher_logits"
"""The batch entry with the teacher's logits: of each predicted token [predicted, V], of all [B, L, V], or of each
sample [B, classes]."""
TOP_TOKENS = "teacher_top_tokens"
"""The batch entry with the tokens of the teacher's k largest logits, int32 [B, L, k]; of classes L is 1."""
TOP_LOGITS = "teacher_top_logits"
"""The batch entry with those logits, fp32 [B, L, k]."""
LOG_SUM = "teacher_log_sum"
"""The batch entry with log sum exp(logits / T) over the whole vocabulary, fp32 [B, L]."""
STORED = (TOP_TOKENS, TOP_LOGITS, LOG_SUM)
TEACHER_SHOWN = "teacher_shown"
"""The prefix of the names of batch entries with the inner states of the teacher's layers, by number."""
LABEL_LOSS = "label_loss"
LOGIT_LOSS = "logit_loss"
HIDDEN_LOSS = "hidden_loss"
RELATION_LOSS = "relation_loss"
FLOOR = 1e-7
"""The least probability of all tokens that are not stored; a sum of fp32 probabilities is not more exact."""


def _same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Shards:
    """How a distribution that is cut over the classes is completed over ranks; by default it is whole.

    Attributes:
        start: number of this rank's first class.
        total: sums over the ranks.
        highest: the maximum over the ranks.
    """

    start: int = 0
    total: Callable[[Tensor], Tensor] = _same
    highest: Callable[[Tensor], Tensor] = _same


WHOLE = Shards()


class Top(NamedTuple):
    """A teacher's largest logits: int [n, k] and fp32 [n, k], and the log-sum [n] of all of them over T."""

    tokens: Tensor
    logits: Tensor
    log_sum: Tensor


def log_sum(logits: Tensor, shards: Shards = WHOLE) -> Tensor:
    """Return log sum exp over the classes, [n], of fp32 logits [n, V of this rank], without a gradient.

    Args:
        logits: fp32 [n, V of this rank].
        shards: how the classes are cut over ranks.
    """
    if shards is WHOLE:
        return logits.logsumexp(-1)
    highest = shards.highest(logits.amax(-1))
    return shards.total((logits - highest.unsqueeze(-1)).exp_().sum(-1)).log() + highest


def of_logits(
    teacher: Tensor, student: Tensor, temperature: float, kind: Divergence, shards: Shards = WHOLE
) -> Tensor:
    """Return T^2 times the divergence of each row, fp32 [n], from logits [n, V of this rank].

    With p = softmax(teacher / T) and q = softmax(student / T):

        forward:         KL(p || q) = sum p (log p - log q)
        reverse:         KL(q || p)
        jensen_shannon:  (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2 (Lin, 1991, equation 4.1)

    Hinton et al., 2015, section 2: the gradients of softened targets shrink with 1 / T^2, which the factor undoes. If
    the classes are cut over ranks, each rank sums its own, and no logits are gathered.

    Args:
        teacher: logits [n, V of this rank], without a gradient.
        student: logits [n, V of this rank].
        temperature: T.
        kind: the divergence.
        shards: how the classes are cut over ranks.
    """

    def compute(logits: Tensor, differentiates: bool) -> tuple[Tensor, Gradient | None]:
        log_p, log_q = (_log_softmax(each, temperature, shards) for each in (teacher, logits))
        if kind == "forward":
            p = log_p.exp()
            value = shards.total(_dot(p, log_p.sub_(log_q)))
            # d KL(p || q) / d z = (q - p) / T. The memory of log q is used again, since nothing reads it any more.
            return value, log_q.exp_().sub_(p).mul_ if differentiates else None
        q = log_q.exp()
        if kind == "reverse":
            value = shards.total(_dot(q, log_q.sub_(log_p)))
            # d KL(q || p) / d z = q (log q/p - KL) / T; `log_q` already holds log q/p.
            return value, q.mul_(log_q.sub_(value.unsqueeze(-1))).mul_ if differentiates else None
        # log((p + q) / 2) from logarithms: p and q themselves underflow for most of a vocabulary.
        log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2.0))
        p = log_p.exp()
        of_teacher = _dot(p, log_p.sub_(log_m))
        of_student = shards.total(_dot(q, log_q.sub_(log_m)))
        value = (shards.total(of_teacher) + of_student) / 2
        # dJS / dq = log(q / m) / 2: the terms of m cancel. Through the softmax, dJS / dz = q (log q/m - KL(q || m)) /
        # (2 T).
        return value, q.mul_(log_q.sub_(of_student.unsqueeze(-1))).div_(2).mul_ if differentiates else None

    return _of_student(student, temperature, compute)


def of_top(top: Top, student: Tensor, temperature: float, kind: Divergence, shards: Shards = WHOLE) -> Tensor:
    """Return T^2 times the divergence of each row, fp32 [n], from a teacher's k largest logits.

    The k tokens keep their probabilities under the whole softmax, and all others are one class, whose probability is
    what is left:

        sum over the k tokens of p log(p / q) + r log(r / s),    r = 1 - sum p,  s = 1 - sum q

    and likewise for the other divergences. Merging classes never raises an f-divergence (log-sum inequality; Cover and
    Thomas, 2006, theorem 2.7.1), so this is a lower bound of the whole divergence, equal to it for k = V, and it
    teaches the student how much probability to leave outside the k tokens. Renormalising over the k tokens instead
    would teach that all others are impossible (Anshumann et al., 2025, "Sparse logit sampling", section 3).

    Args:
        top: the teacher's logits.
        student: logits [n, V of this rank].
        temperature: T.
        kind: the divergence.
        shards: how the student's classes are cut over ranks.
    """

    def compute(logits: Tensor, differentiates: bool) -> tuple[Tensor, Gradient | None]:
        # Probabilities and not their logarithms, because a pass over all logits is what this costs: only those of k
        # tokens need a logarithm.
        q = _softmax(logits, temperature, shards)
        local = top.tokens.long() - shards.start
        outside = (local < 0) | (local >= q.shape[-1])
        local = local.masked_fill(outside, 0)
        of_tokens = q.gather(-1, local)
        # log_sum is over all classes at this temperature, so these are the teacher's true probabilities and not
        # renormalised ones.
        theirs = _with_rest(top.logits / temperature - top.log_sum.unsqueeze(-1))
        least = torch.finfo(q.dtype).tiny
        ours = _with_rest(shards.total(of_tokens.clamp_min(least).log().masked_fill(outside, 0.0)))
        value, slope = _of_few(theirs, ours, kind)  # [n], [n, k + 1]
        if not differentiates:
            return value, None
        # dD / dz = q (f - sum q f) with f = dD / dq. All classes outside the k share the f of the remainder.
        of_rest = slope[:, -1:] - (ours.exp() * slope).sum(-1, keepdim=True)
        added = of_tokens.mul_(slope[:, :-1] - slope[:, -1:]).masked_fill_(outside, 0.0)
        return value, lambda factor: q.mul_(of_rest * factor).scatter_add_(-1, local, added * factor)

    return _of_student(student, temperature, compute)


def _of_few(teacher: Tensor, student: Tensor, kind: Divergence) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row, [n], and its derivatives by the student's probabilities, [n, m] up to a
    constant of the row, from log-probabilities [n, m].
    """
    p = teacher.exp()
    q = student.exp()
    apart = teacher - student
    if kind == "forward":
        # dKL(p || q) / dq = -p / q.
        return _dot(p, apart), -apart.exp()
    if kind == "reverse":
        # dKL(q || p) / dq = log(q / p) + 1; the 1 is a constant of the row, which the softmax's gradient drops.
        return _dot(q, -apart), -apart
    log_m = torch.logaddexp(teacher, student) - math.log(2.0)
    return (_dot(p, teacher - log_m) + _dot(q, student - log_m)) / 2, (student - log_m) / 2


def _log_softmax(logits: Tensor, temperature: float, shards: Shards) -> Tensor:
    """Return log-probabilities at a temperature, fp32 [n, V of this rank], in new memory."""
    scaled = _scaled(logits, temperature)
    if shards is WHOLE:
        return scaled.log_softmax(-1)
    return scaled - log_sum(scaled, shards).unsqueeze(-1)


def _softmax(logits: Tensor, temperature: float, shards: Shards) -> Tensor:
    """Return probabilities at a temperature, fp32 [n, V of this rank], in new memory."""
    if shards is WHOLE:
        return _scaled(logits, temperature).softmax(-1)
    return _log_softmax(logits, temperature, shards).exp_()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return torch.linalg.vecdot(first, second)


def _with_rest(log_p: Tensor) -> Tensor:
    """Append the log-probability of all other classes to log-probabilities [n, k]: [n, k + 1]."""
    # 1 - sum may round to 0 or below when the k tokens have nearly all probability.
    rest = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp_min(FLOOR)
    return torch.cat((log_p, rest.log()), -1)


Gradient = Callable[[Tensor], Tensor]
"""A function that returns a gradient [n, V] times a factor for each row [n, 1]. It may be called once."""
Compute = Callable[[Tensor, bool], tuple[Tensor, Gradient | None]]


def _of_student(student: Tensor, temperature: float, compute: Compute) -> Tensor:
    """Return T^2 times the value of `compute`, whose second result is T times its gradient by the student's logits."""
    value: Tensor = _Rows.apply(student, temperature, compute, torch.is_grad_enabled())
    return value


class _Rows(torch.autograd.Function):
    """A divergence of each row with its gradient, computed together: autograd would keep and pass over a dozen tensors
    of the size of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, temperature: float, compute: Compute, differentiates: bool
    ) -> Tensor:
        value, ctx.gradient = compute(student, differentiates and ctx.needs_input_grad[0])
        ctx.temperature, ctx.dtype = temperature, student.dtype
        return value * temperature**2

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        # It is scaled in place, so a second backward pass cannot use it.
        gradient, ctx.gradient = ctx.gradient, None
        # compute gave T x dD/dz, [n, V]; times T it is the gradient of T^2 D. One factor a row: one pass over [n, V].
        factor = above[0].unsqueeze(-1) * ctx.temperature
        return gradient(factor).to(ctx.dtype), None, None, None


def top_of(logits: Tensor, k: int, temperature: float) -> Top:
    """Return the k largest of logits [n, V], in order, with the log-sum of all over T.

    Args:
        logits: [n, V].
        k: number of logits to keep.
        temperature: T.
    """
    logits = logits.float()
    # The logits are stored as they are and not over T: a stored teacher then serves any use of them, and log_sum has T.
    values, tokens = logits.topk(k)
    return Top(tokens.int(), values, (logits / temperature).logsumexp(-1))


def real_of(batch: Batch) -> Tensor:
    """Return which tokens are no padding, bool [B, L]."""
    tokens = batch["tokens"]
    return batch.get("padding", torch.ones_like(tokens, dtype=torch.bool))


def first_of(real: Tensor) -> Tensor:
    """Return True at the first token of each sample alone, bool [B, L]."""
    return real & (torch.arange(real.shape[1], device=real.device) == 0)


def of_hidden(teacher: Tensor, student: Tensor, counted: Tensor, cosine: bool = False) -> Tensor:
    """Return the difference of hidden states [B, L, size], averaged over the counted tokens of a sample and over
    samples.

    The mean squared difference (TinyBERT; Jiao et al., 2020, equation 8), or 1 - cos of the angle between the two
    states (DistilBERT; Sanh et al., 2019, section 2). BERT-PKD's squared difference of normalised states is twice the
    latter (Sun et al., 2019, section 3.2): |a - b|^2 = 2 - 2 cos for vectors of length 1.

    Args:
        teacher: [B, L, size].
        student: [B, L, size], after its learned map if it has one.
        counted: bool [B, L].
        cosine: whether angles are compared.
    """
    teacher, student = teacher.float(), student.float()
    if cosine:
        return _by_sample(1.0 - torch.cosine_similarity(student, teacher, dim=-1), counted)
    return _by_sample((student - teacher).square().mean(-1), counted)


def of_relations(teacher: Tensor, student: Tensor, real: Tensor, squared: bool) -> Tensor:
    """Return the difference of relations [B, heads, L, L], summed over the heads, averaged over samples.

    Relations are log-probabilities over the second token: their KL(teacher || student), averaged over the real tokens
    of a sample (MiniLM; Wang et al., 2020, equations 6 and 8). `squared` relations are scores, hidden ones 0: their
    squared difference, averaged over the pairs of real tokens (TinyBERT, equation 7).

    Args:
        teacher: [B, heads, L, L].
        student: [B, heads, L, L].
        real: bool [B, L].
        squared: whether relations are scores.
    """
    if not squared:
        # Relations of padding are excluded through `real`; hidden pairs have equal log-probabilities in both and add
        # 0.
        apart = (teacher.exp() * (teacher - student)).sum(-1).sum(1)
        return _by_sample(apart, real)
    pairs = (student - teacher).square().sum(1)
    both = real.unsqueeze(1) & real.unsqueeze(2)
    count = real.sum(-1).clamp_min(1)
    return ((pairs * both).sum((-1, -2)) / count.square()).mean()


def _by_sample(values: Tensor, real: Tensor) -> Tensor:
    """Average [B, L] over the real tokens of each sample, and over samples."""
    return ((values * real).sum(-1) / real.sum(-1).clamp_min(1)).mean()


@dataclass
class TaughtTokens:
    """The loss of tokens from labels and from a teacher's logits; a `TokenLoss` for one micro-batch.

    A head may call it several times with consecutive chunks of the tokens, once each. The parts of the loss are summed
    in `parts`.

    Attributes:
        of_labels: the loss of labels.
        of_rows: returns the divergences [n] of student logits [n, V] from rows [first, first + n) of the teacher's.
        weights: those of labels and logits in the total. A part with weight 0 stays in the graph, because sharded
            layers gather their weights when a gradient arrives.
    """

    of_labels: Callable[[Tensor, Tensor], Loss]
    of_rows: Callable[[Tensor, int], Tensor]
    weights: tuple[float, float]
    ignored: int

    def __post_init__(self) -> None:
        self._first = 0
        self.parts: dict[str, Tensor] = {}

    def __call__(self, logits: Tensor, labels: Tensor) -> Loss:
        """Return the loss of logits [B, L, V] or [predicted, V] and labels [B, L].

        Args:
            logits: of the student.
            labels: int64.
        """
        label_loss = self.of_labels(logits, labels)
        # Of logits of predicted tokens alone, the labels are of all.
        labels = labels[labels != self.ignored] if logits.dim() == 2 else labels.flatten()
        rows = logits.flatten(0, -2)
        apart = (self.of_rows(rows, self._first) * (labels != self.ignored)).sum()
        self._first += len(rows)
        for name, value in ((LABEL_LOSS, label_loss.total), (LOGIT_LOSS, apart)):
            self.parts[name] = self.parts.get(name, 0.0) + value.detach()
        of_labels, of_logits = self.weights
        return Loss(
            of_labels * label_loss.total + of_logits * apart,
            label_loss.count,
            correct=label_loss.correct,
            each_token=label_loss.each_token,
        )
