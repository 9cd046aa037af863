"""The weights of a run's commit, as the base of another run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from workloads.model.depth_stacking import stacked

if TYPE_CHECKING:
    import torch

    from orchestrator.checkpoint.manifest import CommitManifest
    from orchestrator.checkpoint.reader import Reader
    from workloads.model.config import TransformerConfig
    from workloads.model.stored import Part, StoredTensor, StoredWeights


class CommitWeights:
    """The weights of a run's commit; see `StoredWeights`. Every block read is verified. Tensors that the run did not
    train come from the weights `below` it, with which it began. Gates of heads are folded into the output projections
    of a model without gates.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        where: str,
        reader: Reader | None = None,
        base_weights: StoredWeights | None = None,
        stacked_names: Collection[str] = (),
    ) -> None:
        """The weights of a commit at `where` with tensors of these shapes. Without a `reader` they are only checked.
        If layers are stacked, `stacked_names` are the names of the deeper model's tensors.
        """
        self._shapes = shapes
        self._where = where
        self._reader = reader
        self._base_weights = base_weights
        self._stacked_names = stacked_names
        self._folds_gates = False

    def check(
        self,
        config: TransformerConfig,
        shapes: Mapping[str, torch.Size],
        tables: Collection[str],
        added: int,
    ) -> None:
        """Raise WorkloadError if they do not fit a model of these shapes."""
        from workloads.model.stored import (
            HEADS,
            is_gates,
            misfits,
            refuse_misfits,
            refuse_strange,
            weight_notes,
        )

        where = self._where
        hint = "give the model of the base"
        # only the run below knows which rows it added itself, so there tables must have one size
        shape_of = {n: s for n in shapes if (s := self._shape(n)) and (n in self._names or s == shapes[n])}
        refuse_misfits(misfits(config, shapes, shape_of.get, tables, added), where, hint)
        self._folds_gates = not config.head_gates and any(map(is_gates, self._names))
        unused = sorted(name for name in self._names.keys() - shapes.keys() if not is_gates(name))
        refuse_strange([n for n in unused if not n.startswith((*HEADS, "generator."))], where, hint)
        copied = (
            [f"layers are stacked: those that {where} lacks start as copies of its layers"]
            if self._stacked_names
            else []
        )
        folded = [f"gates of heads of {where} are folded into its weights"] if self._folds_gates else []
        self.notes = (*copied, *folded, *weight_notes(shapes, self._shape, unused, where))

    def check_same_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise WorkloadError unless the tensors have exactly these names and shapes."""
        from workloads.model.stored import Misfit, refuse_misfits, refuse_strange

        hint = "give the model of the base"
        stored = {name: self._shape(name) for name in shapes}
        misfits = [
            Misfit(name, shape, stored[name]) for name, shape in shapes.items() if stored[name] != shape
        ]
        refuse_misfits(misfits, self._where, hint)
        refuse_strange([name for name in self._names if name not in shapes], self._where, hint)

    def find(self, name: str) -> StoredTensor | None:
        """See `StoredWeights`."""
        shape = self._shape(name)
        if name not in self._names:
            return self._base_weights.find(name) if self._base_weights else None
        if shape is None:
            return None
        assert self._reader is not None
        tensor = _Tensor(self._reader, self._names[name], shape)
        return self._gated(self._names[name], tensor, self._reader) if self._folds_gates else tensor

    def _gated(self, stored_name: str, tensor: _Tensor, reader: Reader) -> StoredTensor:
        """Return a tensor of the commit with the gates folded in that belong to it, if any do."""
        import torch

        from workloads.model.head_gates import FoldedOutput, gates_name

        gates = gates_name(stored_name)
        if gates not in self._shapes:
            return tensor
        return FoldedOutput(tensor, _Tensor(reader, gates, torch.Size(self._shapes[gates])))

    @cached_property
    def _names(self) -> dict[str, str]:
        """Map the model's tensor names to the commit's. For ELECTRA, only the discriminator is trained further."""
        names = [n.removeprefix("model.") for n in self._shapes if n.startswith("model.")]
        result = {name.removeprefix("discriminator."): f"model.{name}" for name in names}
        if not self._stacked_names:
            return result
        copies = stacked(result.keys(), self._stacked_names, self._where)
        return result | {name: result[source] for name, source in copies.items()}

    def _shape(self, name: str) -> torch.Size | None:
        import torch

        if name in self._names:
            return torch.Size(self._shapes[self._names[name]])
        result = self._base_weights.find(name) if self._base_weights else None
        return None if result is None else result.shape


def has_transformers_weights(commit: CommitManifest) -> bool:
    """Return whether a commit has the weights of a transformers class that was run unchanged."""
    prefix = _network_prefix()
    return any(name.startswith(prefix) for name in commit.tensors)


def _network_prefix() -> str:
    from workloads.hf.as_they_are.workload import NETWORK

    return f"model.{NETWORK}"


class TransformersTensors:
    """The tensors of such a commit under transformers' names, like the `Weights` of a folder."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        prefix = _network_prefix()
        self._tensors = {n.removeprefix(prefix): n for n in reader.manifest.tensors if n.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor `name`."""
        return self._reader.read(self._tensors[name])

    def part(self, name: str, part: Part) -> torch.Tensor:
        """Return a part of the tensor `name`, without reading the rest."""
        return _Tensor(self._reader, self._tensors[name], self.blank(name).shape)[part]

    def blank(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape on the meta device."""
        import torch

        return torch.empty(self._reader.manifest.tensors[self._tensors[name]].shape, device="meta")


@dataclass(frozen=True)
class _Tensor:
    reader: Reader
    name: str
    shape: torch.Size

    def __getitem__(self, part: Part) -> torch.Tensor:
        """See `StoredTensor`."""
        start = tuple(bounds.start for bounds in part)
        return self.reader.read(self.name, start, tuple(bounds.stop - bounds.start for bounds in part))
