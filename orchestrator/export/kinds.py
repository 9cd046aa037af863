"""Forms of exports that are made from a checked export for transformers, found by name among installed packages.

An entry point in the group `training_orchestrator.export_forms` names an `ExportForm`, such as FORM in
`orchestrator/extensions/gguf/form.py`. The name is the value of `checkpoint.export` and of --form. Imports no library,
because the job file is checked by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.config.extensions import GROUP, points
from workloads.model.scheme import Scheme

if TYPE_CHECKING:
    from workloads.workload import Batch

KIND = "export_forms"
OF_THE_CORE = ("hf", "adapter", "safetensors", "dcp")
"""The values of `checkpoint.export` that need no extension."""
QUANTISED = "compressed-tensors"
"""The form in which weights that are rounded to int8 or int4 go to transformers: no value of a key, `quantize` asks for
it.
"""


@dataclass(frozen=True)
class Plain:
    """A checked export for transformers, from which another form is made.

    Attributes:
        folder: its files: config.json, safetensors and the tokenizer's.
        target: the empty folder for the other form.
        numbers: the format of matrices, one of the form's.
        scheme: how the linear layers are quantised; None in full precision.
        chosen: transformers' names of the weights that `scheme` quantises, with how each is rounded; None without a
            scheme.
        samples: batches of training samples, over which ranges of activations may be measured.
        difference: loads `target` with transformers, and returns the largest difference of its outputs to our model's
            with the given scheme, in fp64.
    """

    folder: str
    target: str
    numbers: str
    scheme: Scheme | None
    chosen: Mapping[str, Scheme] | None
    samples: Iterable[Batch]
    difference: Callable[[Scheme | None], float]


@dataclass(frozen=True)
class Written:
    """What `ExportForm.write` has written.

    Attributes:
        difference: the largest difference of its outputs to those of our model with equally rounded weights, if it was
            compared with them.
        rounding: the largest change of outputs by rounded numbers, as a share of the largest output; None if none are.
        kept: matrices that keep more bits than the format, by their names in it.
    """

    difference: float | None = None
    rounding: float | None = None
    kept: Collection[str] = ()


@dataclass(frozen=True)
class ExportForm:
    """One form.

    Attributes:
        library: the library that loads it, as model hubs name it.
        check: gets config.json and whether the model is a pair of networks. It raises WorkloadError if the form does
            not support that.
        write: writes the form and checks it. It raises WorkloadError if the form does not support the model,
            RuntimeError if the result is wrong.
        packages: installed distributions that it needs, whose versions export.json has.
        extra: the extra of pyproject.toml that installs them; empty without one.
        numbers: formats of matrices to choose from.
        usual: the one of them that is written unless another is asked for.
        rounded: those of them that are quantised.
        stores: whether it stores the integers that a run trained for with a scheme.
        check_quantised: gets config.json and transformers' names of the weights that a scheme quantises. It raises
            WorkloadError if the form cannot round one of them.
    """

    library: str
    check: Callable[[Mapping[str, Any], bool], None]
    write: Callable[[Plain], Written]
    packages: tuple[str, ...] = ()
    extra: str = ""
    numbers: tuple[str, ...] = ()
    usual: str = ""
    rounded: tuple[str, ...] = ()
    stores: Callable[[Scheme], bool] = lambda scheme: False
    check_quantised: Callable[[Mapping[str, Any], Collection[str]], None] = lambda about, weights: None


def names() -> list[str]:
    """Return the values of `checkpoint.export`: those of the core, then those of installed packages."""
    return [*OF_THE_CORE, *(name for name in _offered() if name != QUANTISED)]


def form_named(name: str) -> ExportForm:
    """Return the form of an installed package.

    Raises:
        InputError: no installed package has it, or it cannot be imported.
    """
    entry_point = next((point for point in points(KIND) if point.name == name), None)
    if entry_point is None:
        hint = "reinstall this program (`make install` in a checkout), or install the package that has it"
        raise InputError(f"no installed package offers {name} in {GROUP}{KIND}", "export", hint)
    try:
        form = entry_point.load()
    except Exception as error:  # of a package that may be anyone's
        problem = f"cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())})"
        raise InputError(
            problem, f"{GROUP}{KIND} {name} = {entry_point.value}", "reinstall its package"
        ) from error
    if not isinstance(form, ExportForm):
        problem = f"is a {type(form).__name__}, not an ExportForm"
        raise InputError(
            problem, f"{GROUP}{KIND} {name} = {entry_point.value}", "see orchestrator/export/kinds.py"
        )
    return form


def with_numbers() -> dict[str, tuple[str, ...]]:
    """Return the formats of matrices of each form that has several, by its name."""
    forms = {name: form_named(name).numbers for name in _offered() if name != QUANTISED}
    return {name: numbers for name, numbers in forms.items() if numbers}


def _offered() -> list[str]:
    return list(dict.fromkeys(point.name for point in points(KIND)))
