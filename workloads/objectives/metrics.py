"""Metrics of predictions against references: plain lists in, one number out.

name                    library        values  of
accuracy                scikit-learn   0 to 1  labels
precision, recall, f1   scikit-learn   0 to 1  labels: of class 1 of two classes, else the mean over the classes
matthews                scikit-learn   -1 to 1 labels (Matthews 1975)
spearman                scipy          -1 to 1 numbers, or texts of numbers
exact_match             own            0 to 1  texts, compared to the letter
rouge1, rouge2, rougeL  rouge-score    0 to 100 texts: F-measure, mean over the texts (Lin 2004), no stemming
rougeLsum               rouge-score    0 to 100 as rougeL, by lines
bleu                    sacrebleu      0 to 100 texts: of the whole corpus (Papineni et al. 2002, Post 2018)
chrf                    sacrebleu      0 to 100 texts: of the whole corpus (Popović 2015)

Of all of them the largest value is the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

from workloads.errors import WorkloadError

EXTRA = "pip install -e '.[eval]' in the checkout"
"""Command that installs the optional libraries."""
OF_A_CLASS = ("precision", "recall", "f1")
"""Metrics with a value for each class."""


def measure(name: str, predictions: Sequence[Any], references: Sequence[Any], classes: int = 0) -> float:
    """Return the metric `name` of predictions, one for each reference.

    Args:
        name: the metric.
        predictions, references: labels, numbers or texts. A text's reference may be a list of texts: the best one
            counts, and BLEU and chrF use all as in the paper.
        classes: number of classes of numeric labels; 0 for those that occur.

    Raises WorkloadError for an unknown metric (with the nearest names), lists of different lengths or without
    entries, values for which the metric is undefined, and a missing library.
    """
    if name not in METRICS:
        near = get_close_matches(name, METRICS, n=3, cutoff=0.4) or sorted(METRICS)
        raise WorkloadError(f"there is no metric {name!r}; did you mean {' or '.join(near)}?")
    if len(predictions) != len(references) or not len(references):
        raise WorkloadError(
            f"{name} of {len(predictions)} predictions and {len(references)} references; give one for each"
        )
    options = {"classes": classes} if name in OF_A_CLASS else {}
    value = float(METRICS[name](predictions, references, **options))
    if not math.isfinite(value):
        raise WorkloadError(f"{name} is not finite; look at the predictions")
    return value


def load_libraries(names: Iterable[str]) -> None:
    """Compute metrics of labels once, so that their libraries are imported now: cold storage takes minutes for that.

    Raises WorkloadError for an unknown metric and a missing library.
    """
    for name in names:
        measure(name, [0, 1], [0, 1], classes=2)


def _accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(list(references), list(predictions)))


def _of_a_class(kind: str, predictions: Sequence[Any], references: Sequence[Any], classes: int) -> float:
    """0 for a class that is never predicted, or never occurs."""
    from sklearn.metrics import precision_recall_fscore_support

    binary = classes == 2 if classes else {*predictions, *references} <= {0, 1}
    scores = precision_recall_fscore_support(
        list(references), list(predictions), average="binary" if binary else "macro", zero_division=0.0
    )
    return float(scores[OF_A_CLASS.index(kind)])


def _matthews(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(list(references), list(predictions)))


def _spearman(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """0 if all predictions, or all references, are equal, because they have no order then."""
    from scipy.stats import spearmanr

    numbers = [[_number(value) for value in values] for values in (predictions, references)]
    if any(len(set(values)) < 2 for values in numbers):
        return 0.0
    return float(spearmanr(*numbers).statistic)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise WorkloadError(
            f"spearman ranks numbers, and {str(value)[:40]!r} is not a number; name another metric"
        )
    return number


def _exact_match(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> float:
    matches = [
        prediction in _as_list(accepted) for prediction, accepted in zip(predictions, references, strict=True)
    ]
    return sum(matches) / len(matches)


def _rouge(kind: str, predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> float:
    scorer = _library("rouge_score.rouge_scorer", kind).RougeScorer([kind], use_stemmer=False)
    best = [
        max(scorer.score(reference, prediction)[kind].fmeasure for reference in _as_list(accepted))
        for prediction, accepted in zip(predictions, references, strict=True)
    ]
    return 100.0 * sum(best) / len(best)


def _corpus(kind: str, predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> float:
    sacrebleu = _library("sacrebleu", kind)
    reference_lists = [_as_list(accepted) for accepted in references]
    # sacrebleu takes references by number: the first of all texts first, None for a text with fewer
    columns = [
        [accepted[n] if n < len(accepted) else None for accepted in reference_lists]
        for n in range(max(map(len, reference_lists)))
    ]
    of_corpus = sacrebleu.corpus_bleu if kind == "bleu" else sacrebleu.corpus_chrf
    return float(of_corpus(list(predictions), columns).score)


def _as_list(accepted: str | Sequence[str]) -> Sequence[str]:
    return [accepted] if isinstance(accepted, str) else accepted


def _library(module: str, metric: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise WorkloadError(f"{metric} needs {error.name}; {EXTRA}") from None


METRICS: Mapping[str, Callable[..., float]] = {
    "accuracy": _accuracy,
    **{kind: partial(_of_a_class, kind) for kind in OF_A_CLASS},
    "matthews": _matthews,
    "spearman": _spearman,
    "exact_match": _exact_match,
    **{kind: partial(_rouge, kind) for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
    **{kind: partial(_corpus, kind) for kind in ("bleu", "chrf")},
}
"""The metrics by name. Each takes predictions and references."""
