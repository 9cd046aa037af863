"""Save, crash, corrupt, prune, rewind and restore at random: what is restored is what was committed last."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.checkpoint import merging
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention, prune, rewind
from orchestrator.storage.retry import Retry

SHARED = Path("/dev/shm")


class Commits(RuleBasedStateMachine):
    """`sound` is the model: the steps whose commits nobody has harmed, with what they hold."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=SHARED if SHARED.is_dir() else None))
        self.sound: dict[int, torch.Tensor] = {}
        self.step = 0
        self.value = 0.0
        self.store = self.opened()

    def opened(self) -> Store:
        return Store(str(self.folder), retry=Retry(1), threads=1, block_bytes=16)

    def written(self, cuts: list[int]) -> tuple[torch.Tensor, list[dict[str, object]]]:
        """One shard for each part of a matrix that is cut between rows."""
        self.value += 1
        tensor = torch.arange(12.0).reshape(6, 2) + 100 * self.value
        edges = [0, *sorted(set(cuts)), 6]
        records = []
        for writer, (low, high) in enumerate(itertools.pairwise(edges)):
            piece = TensorPiece("model.w", (6, 2), (low, 0), tensor[low:high])
            records += self.store.write_shard(self.step, writer, [piece])
        return tensor, records

    @rule(ahead=st.integers(1, 3), cuts=st.lists(st.integers(1, 5), max_size=3))
    def save(self, ahead: int, cuts: list[int]) -> None:
        self.step += ahead
        tensor, records = self.written(cuts)
        with mock.patch.object(
            merging, "INLINE_BYTES", 0 if self.step % 2 else 1 << 16
        ):  # an index file or none
            self.store.publish(self.step, records, {"position": self.step, "receipt": ""})
        self.sound[self.step] = tensor

    @rule(cuts=st.lists(st.integers(1, 5), max_size=3), part=st.integers(0, 3))
    def crash_in_a_save(self, cuts: list[int], part: int) -> None:
        self.step += 1
        self.written(cuts)
        shards = sorted((self.folder / f"step-{self.step:08d}").iterdir())
        shards[part % len(shards)].unlink()
        self.restart()

    @rule()
    def restart(self) -> None:
        self.store = self.opened()
        self.step = max(self.sound, default=0)
        rewind(self.store, self.step)

    @precondition(lambda self: self.sound)
    @rule(chance=st.randoms(use_true_random=False), harm=st.sampled_from(["flip", "cut", "remove"]))
    def corrupt(self, chance: random.Random, harm: str) -> None:
        step = chance.choice(sorted(self.sound))
        names = ["manifest.json", *sorted(self.store.manifest(step).file_sizes)]
        path = self.folder / f"step-{step:08d}" / chance.choice(names)
        data = bytearray(path.read_bytes())
        if harm == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        elif harm == "cut":
            path.write_bytes(data[: chance.randrange(len(data))])
        else:
            path.unlink()
        del self.sound[step]

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        before = self.store.steps()
        removed = prune(self.store, Retention(keep))
        assert set(self.store.steps()) == set(before) - set(removed)
        # a flipped bit does not show in the sizes: such a commit still counts as one that is kept
        if self.sound and max(self.sound) in removed:
            newer = [step for step in before if step > max(self.sound)]
            assert len([step for step in newer if step not in removed]) >= keep
        self.sound = {step: tensor for step, tensor in self.sound.items() if step not in removed}

    @precondition(lambda self: self.sound)
    @rule(chance=st.randoms(use_true_random=False))
    def roll_back(self, chance: random.Random) -> None:
        self.step = chance.choice(sorted(self.sound))
        rewind(self.store, self.step)
        self.sound = {step: tensor for step, tensor in self.sound.items() if step <= self.step}

    @rule()
    def late_writer(self) -> None:
        for step in self.sound:
            Store(str(self.folder)).write_shard(step, 0, [full_piece("model.w", torch.zeros(6, 2))])

    @invariant()
    def the_last_sound_commit_is_restored(self) -> None:
        found = self.store.latest()
        assert (found.step if found else None) == max(self.sound, default=None)
        if found:
            assert torch.equal(self.store.reader(found).read("model.w"), self.sound[found.step])
            assert self.store.verify(found.step) == []
        assert all(step not in self.sound for step, _ in self.store.skipped)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestCommits = Commits.TestCase
TestCommits.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
