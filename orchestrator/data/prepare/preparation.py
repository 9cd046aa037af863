"""One preparation: the tokenizer, the token shards as Ray tasks, and the manifest last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean.config import columns_of_steps
from orchestrator.data.clean.plan import Cleaning
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.engines import REFERENCE
from orchestrator.data.prepare import rejections, reuse
from orchestrator.data.prepare.fingerprint import (
    TokenizerInputs,
)
from orchestrator.data.prepare.gather import gather, gather_some
from orchestrator.data.prepare.prepared_tokenizer import prepared_tokenizer
from orchestrator.data.prepare.shard_tasks import shard_tasks, write_shards
from orchestrator.data.prepare.shards import TokenFormat
from orchestrator.data.progress import Progress
from orchestrator.data.samples.sections import published
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.sections.publisher import Publisher
from orchestrator.data.sources import Part, SourceFile
from orchestrator.data.sources.identity import part_key
from orchestrator.data.sources.named_columns import check_columns, check_columns_of_steps
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder


@dataclass(frozen=True)
class Preparation:
    """One preparation; see `prepare`. `given.chosen` is the tokenizer's JSON with its roles, or the vocabulary size
    of one to train with its special tokens.
    """

    data: DataSpec
    files: Sequence[SourceFile]
    tokenizer_inputs: TokenizerInputs
    part_bytes: int
    cleaning: Cleaning | None
    data_format: int
    folder: DataFolder
    progress: Progress
    where: str

    @property
    def _uris(self) -> list[str]:
        """The URIs of the sources."""
        return [source.name for source in self.data.sources]

    @property
    def _name(self) -> str:
        """The fingerprint."""
        return self.folder.uri.rsplit("/", 1)[-1]

    def make(self, begin: bool, leave: float) -> None:
        """Make the missing files, the manifest last. With `begin`, make only the first sections."""
        folder = self.folder
        cleaning = self.cleaning
        try:
            finished = manifest.read(folder)
        except manifest.DamagedManifest:
            finished = None
        parts = sources.cut(self.files, self.part_bytes, self.data_format)
        text = None
        if self.data_format > 5:
            kind = self.tokenizer_inputs.kind
            check_columns(parts, self.where, kind.objective if kind else "")
            check_columns_of_steps(parts, columns_of_steps(self.data.clean) if cleaning else {})
        if cleaning:
            from orchestrator.data.clean.run import clean_for

            parts, text = clean_for(folder, cleaning, parts, len(self.data.sources), self.progress)
        self.progress("tokenizer", 0, 1)
        written = prepared_tokenizer(
            folder, self.tokenizer_inputs, parts=parts, text=text, data_format=self.data_format
        )
        self.progress("tokenizer", 1, 1)
        _refuse_pairs_without_separator(self.files, written.roles)
        plan = SectionPlan.of(parts, len(self.data.sources))
        plan.write(folder)
        publisher = self._publisher(plan, parts, written, begin) if self.data.streaming else None
        tokenizer_json = (folder.read("tokenizer.json") or b"").decode()
        key = reuse.tokens_key(tokenizer_json, written, cleaning.key if cleaning else "")
        keys = [part_key(part) for part in parts]
        existing = reuse.existing_parts(folder, key, keys)
        tasks = shard_tasks(folder.uri, written, tokenizer_json, self.data.encode_with != REFERENCE, text)
        write_shards(
            folder,
            parts,
            written,
            tasks=tasks,
            publisher=publisher,
            existing=existing,
            leave=leave,
            ceiling=rejections.Ceiling(self.data.max_rejected, folder),
            progress=self.progress,
        )
        if begin:
            return
        gathered = gather(folder, self._name, uris=self._uris, parts=parts, written=written, where=self.where)
        reuse.note(folder, key, keys)
        if finished is None:
            manifest.write(folder, replace(gathered, code=cleaning.code if cleaning else {}))
        elif not finished.same_tokens(gathered):
            problem = "missing shards cannot be recreated: the tokenizer library's version has changed"
            hint = "install the version that made the data, or start a new run"
            raise InputError(problem, folder.uri, hint)

    def _publisher(
        self, plan: SectionPlan, parts: list[Part], written: TokenFormat, begin: bool
    ) -> Publisher:
        """Return the publisher of all sections. With `begin`, of the first section and those that were published
        before.
        """
        folder = self.folder
        name = self._name
        uris = self._uris
        code = self.cleaning.code if self.cleaning else {}

        def section(numbers: Sequence[int]) -> manifest.DataManifest:
            gathered, _ = gather_some(folder, name, uris=uris, parts=parts, numbers=numbers, written=written)
            return replace(gathered, code=code)

        published_so_far = published.so_far(folder) if begin else None
        sections = max(1, published_so_far[1] if published_so_far else 0) if begin else plan.sections
        return Publisher(folder, plan, section, sections)


def _refuse_pairs_without_separator(files: Sequence[SourceFile], roles: Mapping[str, int]) -> None:
    paired = next((file for file in files if isinstance(file.field, tuple)), None)
    if paired and "sep" not in roles:
        hint = "use a tokenizer with a separator, or train one"
        raise InputError("holds pairs, but the tokenizer has no separator token", paired.uri, hint)
