"""A cache of operators on tensors without memory: a step repeats each of them many times."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from orchestrator.planner.trace.operators import tensors_in

Effect = Literal["written", "view", "made", ""]
TensorProperties = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device]
"""The properties of a tensor that an operator sees: shape, stride, offset in its storage, dtype and device."""
VALUE_DEPENDENT = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
RESIZING = ("resize_", "resize_as_", "set_", "lift", "lift_fresh", "lift_fresh_copy")


class CachedOperators:
    """Runs operators on the tensors of a `FakeTensorMode`.

    An operator that only writes to its arguments is not run. The result of an operator that creates tensors or a view
    is created again from the properties of an earlier result for the same shapes. torch's own cache takes three times
    as long.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._cache: dict[tuple[Any, ...], Any] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operator."""
        effect = effect_of(func)
        key_parts: list[Any] = [func]
        if not effect or not all(
            self._append_key(argument, key_parts) for argument in (*args, *kwargs.values())
        ):
            return func(*args, **kwargs)
        if effect == "written":
            return args[0] if func._schema.returns else None
        key_parts += kwargs
        key = tuple(key_parts)
        if key in self._cache:
            cached = self._cache[key]
            base = args[0] if effect == "view" else None
            if isinstance(cached, list | tuple) and not _is_properties(cached):
                return type(cached)(
                    None if argument is None else self._create(argument, base) for argument in cached
                )
            return self._create(cached, base)
        result = func(*args, **kwargs)
        properties = _result(result, effect, (args, kwargs))
        if properties is not None:
            self._cache[key] = properties
        return result

    def _append_key(self, value: Any, key_parts: list[Any]) -> bool:
        """Append what the operator sees of a value to `key_parts`; return False if the operator must be run."""
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) or value.constant is not None:
                return False
            key_parts.append(_properties(value))
            return True
        if isinstance(value, list | tuple):
            key_parts.append(len(value))
            return all(self._append_key(item, key_parts) for item in value)
        key_parts += (type(value), value)
        return isinstance(
            value,
            int | float | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format,
        )

    def _create(self, properties: TensorProperties, base: FakeTensor | None) -> FakeTensor:
        shape, stride, begin, dtype, device = properties
        with in_kernel_invocation_manager(self._fake):
            tensor = torch.empty_strided(shape if base is None else (0,), stride if base is None else (1,),
                                       dtype=dtype, device="meta")  # fmt: skip
        # A view shares the storage of its base: a storage of its own would be counted twice.
        if base is not None:
            storage = base.untyped_storage()
            with in_kernel_invocation_manager(self._fake):
                tensor.set_(storage, begin, shape, stride)
        return FakeTensor(self._fake, tensor, device)


@functools.cache
def effect_of(func: Any) -> Effect:
    """Classify an operator.

    "written": it only writes to its first argument (or lists of tensors). "view": it returns one view of it. "made": it
    returns new tensors. Empty: it does something else, or its result depends on values.
    """
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if func.namespace != "aten" or VALUE_DEPENDENT & set(func.tags) or name in RESIZING:
        return ""
    writes = [
        argument
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = [argument.alias_info for argument in schema.returns]
    if writes:
        returns_written = not returned or (
            len(returned) == 1 and returned[0] is not None and returned[0].is_write
        )
        writes_first = writes[0] is schema.arguments[0] or writes[0].name == schema.arguments[0].name
        return (
            "written"
            if returns_written and writes_first and not any(argument.kwarg_only for argument in writes)
            else ""
        )
    if func.is_view:
        return "view" if len(returned) == 1 and str(schema.returns[0].type) == "Tensor" else ""
    return "made" if returned and all(argument is None for argument in returned) else ""


def _properties(tensor: FakeTensor) -> TensorProperties:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device


def _is_properties(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 5 and isinstance(value[0], torch.Size)


def _result(result: Any, effect: Effect, arguments: Any) -> Any:
    """Return the properties from which a result can be created again, or a sequence of them; None if it cannot."""
    if isinstance(result, Tensor):
        if not isinstance(result, FakeTensor) or result.constant is not None:
            return None
        if effect == "view":
            return _properties(result)
        storage_bytes = result.untyped_storage().nbytes()
        is_new = _storage(result) not in _storages(arguments)
        # Shape and strides do not tell of a storage that is larger than its tensor.
        fills_storage = storage_bytes == _span(result) and result.storage_offset() == 0
        return _properties(result) if is_new and fills_storage else None
    if effect == "made" and isinstance(result, list | tuple):
        parts = [None if part is None else _result(part, effect, arguments) for part in result]
        if any(a is None and b is not None for a, b in zip(parts, result, strict=True)):
            return None
        tensors = [part for part in result if isinstance(part, Tensor)]
        return type(result)(parts) if len({_storage(part) for part in tensors}) == len(tensors) else None
    return None


def _span(tensor: Tensor) -> int:
    """Return the bytes of the smallest storage that the tensor fits in."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storages(arguments: Any) -> set[int]:
    return {_storage(tensor) for tensor in tensors_in(arguments)}
