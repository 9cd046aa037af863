"""A cache of operators on tensors without memory: a step repeats each of them many times."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from orchestrator.planner.trace.operators import tensors_in

How = Literal["written", "view", "made", ""]
Sort = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device]
"""The properties of a tensor that an operator sees: shape, stride, offset in its storage, dtype and device."""
UNSTEADY = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
RESIZING = ("resize_", "resize_as_", "set_", "lift", "lift_fresh", "lift_fresh_copy")


class Remembered:
    """Runs operators on the tensors of a `FakeTensorMode`.

    An operator that only writes to its arguments is not run. The result of an operator that creates tensors or a view
    is created again from the properties of an earlier result for the same shapes. torch's own cache takes three times
    as long.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operator."""
        how = how_of(func)
        sorts: list[Any] = [func]
        if not how or not all(self._sorted(each, sorts) for each in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if how == "written":
            return args[0] if func._schema.returns else None
        sorts += kwargs
        key = tuple(sorts)
        if key in self._known:
            known = self._known[key]
            base = args[0] if how == "view" else None
            if isinstance(known, list | tuple) and not _is_sort(known):
                return type(known)(None if each is None else self._anew(each, base) for each in known)
            return self._anew(known, base)
        result = func(*args, **kwargs)
        sort = _result(result, how, (args, kwargs))
        if sort is not None:
            self._known[key] = sort
        return result

    def _sorted(self, value: Any, sorts: list[Any]) -> bool:
        """Append what the operator sees of a value to `sorts`; return False if the operator must be run."""
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) or value.constant is not None:
                return False
            sorts.append(_sort(value))
            return True
        if isinstance(value, list | tuple):
            sorts.append(len(value))
            return all(self._sorted(each, sorts) for each in value)
        sorts += (type(value), value)
        return isinstance(
            value,
            int | float | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format,
        )

    def _anew(self, sort: Sort, base: FakeTensor | None) -> FakeTensor:
        shape, stride, begin, dtype, device = sort
        with in_kernel_invocation_manager(self._fake):
            made = torch.empty_strided(shape if base is None else (0,), stride if base is None else (1,),
                                       dtype=dtype, device="meta")  # fmt: skip
        if base is not None:
            storage = base.untyped_storage()
            with in_kernel_invocation_manager(self._fake):
                made.set_(storage, begin, shape, stride)
        return FakeTensor(self._fake, made, device)


@functools.cache
def how_of(func: Any) -> How:
    """Classify an operator.

    "written": it only writes to its first argument (or lists of tensors). "view": it returns one view of it. "made": it
    returns new tensors. Empty: it does something else, or its result depends on values.
    """
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if func.namespace != "aten" or UNSTEADY & set(func.tags) or name in RESIZING:
        return ""
    writes = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    returned = [each.alias_info for each in schema.returns]
    if writes:
        alone = not returned or (len(returned) == 1 and returned[0] is not None and returned[0].is_write)
        first = writes[0] is schema.arguments[0] or writes[0].name == schema.arguments[0].name
        return "written" if alone and first and not any(each.kwarg_only for each in writes) else ""
    if func.is_view:
        return "view" if len(returned) == 1 and str(schema.returns[0].type) == "Tensor" else ""
    return "made" if returned and all(each is None for each in returned) else ""


def _sort(tensor: FakeTensor) -> Sort:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device


def _is_sort(known: Any) -> bool:
    return isinstance(known, tuple) and len(known) == 5 and isinstance(known[0], torch.Size)


def _result(result: Any, how: How, given: Any) -> Any:
    """Return the properties from which a result can be created again, or a sequence of them; None if it cannot."""
    if isinstance(result, Tensor):
        if not isinstance(result, FakeTensor) or result.constant is not None:
            return None
        if how == "view":
            return _sort(result)
        whole = result.untyped_storage().nbytes()
        alone = _storage(result) not in _storages(given)
        tight = whole == _span(result) and result.storage_offset() == 0
        return _sort(result) if alone and tight else None
    if how == "made" and isinstance(result, list | tuple):
        each = [None if one is None else _result(one, how, given) for one in result]
        if any(a is None and b is not None for a, b in zip(each, result, strict=True)):
            return None
        tensors = [one for one in result if isinstance(one, Tensor)]
        return type(result)(each) if len({_storage(one) for one in tensors}) == len(tensors) else None
    return None


def _span(tensor: Tensor) -> int:
    """Return the bytes of the smallest storage that the tensor fits in."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storages(given: Any) -> set[int]:
    return {_storage(each) for each in tensors_in(given)}
