"""Device profiles: files with the speeds and sizes of a device, each figure with its source.

Profiles of known devices are in `profiles/` beside this module. `orchestrator calibrate` writes that of a machine.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field

from orchestrator.config.errors import InputError
from orchestrator.config.strict import StrictModel
from orchestrator.planner.device import Link, Machine
from orchestrator.planner.model_file import MIN_AMOUNT, Amount, PositiveAmount, read_model
from orchestrator.storage.uri import unwritable

FOLDER = Path(__file__).parent / "profiles"

Share = Annotated[float, Field(ge=1e-6, le=1)]
Source = Annotated[str, Field(min_length=3)]


class Figure(StrictModel):
    """A number in SI units, and its source."""

    value: Amount
    source: Source


def _above_zero(figure: Figure) -> Figure:
    if figure.value < MIN_AMOUNT:
        raise ValueError("should have a value above 0")
    return figure


Rate = Annotated[Figure, AfterValidator(_above_zero)]
"""A figure that is used as a divisor, so it is above 0."""


def _at_most_one(figure: Figure) -> Figure:
    if figure.value > 1.0:
        raise ValueError("should have a value of 1 at most, since it is a share")
    return figure


ShareFigure = Annotated[Rate, AfterValidator(_at_most_one)]


class Peaks(StrictModel):
    """Peak FLOP/s of matrix products by data type."""

    bf16: PositiveAmount
    fp16: PositiveAmount
    fp32: PositiveAmount
    fp8: PositiveAmount | None = None
    source: Source


class Matrix(StrictModel):
    """The share of the peak that matrix products reach.

    Large products reach `share`. The share is half of that where one dimension is `half_size`, or where rows x columns
    are `half_area`.
    """

    share: Share
    half_size: Amount
    half_area: Amount = 0.0
    source: Source


class Attention(StrictModel):
    """The share of the peak that attention's products reach, and the cost of a score in the forward pass.

    Attributes:
        score_bytes: bytes of memory traffic for each score.
        score_seconds: additional seconds for each score.
    """

    share: Share
    score_bytes: Amount
    score_seconds: Amount = 0.0
    source: Source


class Narrow(StrictModel):
    """Figures for steps in 16 bits, on a CPU that computes them differently from 32 bits. See the figures of the
    same names in `Profile`.
    """

    half_size: Amount
    launch: PositiveAmount
    eager: Annotated[float, Field(ge=1)]
    source: Source


class Connection(StrictModel):
    """Seconds of latency of a message, and bytes per second that each worker sends."""

    latency: PositiveAmount
    bandwidth: PositiveAmount
    source: Source


class Change(StrictModel):
    """A figure that a run changed: its key, and its value before and after."""

    figure: str
    before: float
    after: float


class Refinement(StrictModel):
    """The changes that a finished run made to a profile.

    Attributes:
        time, by: when and by whom the refinement was requested.
        run, steps: the run, and its number of steps.
        ratios: measured over predicted seconds, by part of the step.
        changes: the changed figures.
    """

    time: str
    by: str
    run: str
    steps: int
    ratios: dict[str, float]
    changes: tuple[Change, ...]


class Profile(StrictModel):
    """A device, and how several are connected."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    device: str
    kind: Literal["cuda", "cpu"]
    accelerators: tuple[str, ...] = Field(default=(), description="its names in Ray")
    memory: Rate
    memory_bandwidth: Rate
    peak: Peaks
    matrix: Matrix
    attention: Attention
    element_share: ShareFigure
    eager: Figure
    optimizer_share: ShareFigure
    launch: Figure
    narrow: Narrow | None = Field(default=None, description="of steps in 16 bits, where they differ")
    collective: Figure = Field(
        default=Figure(value=0.0, source="taken to be in the latency"),
        description="seconds in which a collective begins and ends, whatever its size and ranks",
    )
    waking: Figure = Field(
        default=Figure(value=0.0, source="not measured"),
        description="how much longer a collective takes behind computation, as a share of that, up to 4 ms of it",
    )
    message: Figure | None = Field(
        default=None, description="for messages between pipeline stages; default: that of a collective"
    )
    per_node: Annotated[int, Field(gt=0)]
    inside: Connection
    between: Connection
    crowding: Figure = Field(
        default=Figure(value=1.0, source="not measured"),
        description="how many times as long memory and launches take while other ranks of a node compute",
    )
    delay: Figure = Field(
        default=Figure(value=0.0, source="not measured"),
        description="of a rank beyond its least seconds, in the mean of steps, as a share of them",
    )
    host_bandwidth: Rate
    host_memory: Figure | None = Field(default=None, description="of a worker's share of its host")
    host_cores: Figure | None = Field(default=None, description="CPUs of its host for each worker")
    watts: Figure
    refined: tuple[Refinement, ...] = Field(default=(), description="by which runs, in order")

    def machine(self, precision: str) -> Machine:
        """Return the worker to plan for, when it trains in that precision.

        Raises InputError if a GPU does not support the precision.
        """
        if precision == "fp8" and self.kind == "cuda" and self.peak.fp8 is None:
            hint = "set it to bf16, or use an Ada, Hopper or Blackwell GPU"
            raise InputError(f"{self.device} has no FP8 matrix multiplication", "train.precision", hint)
        half = self.peak.fp16 if precision == "fp16" else self.peak.bf16
        narrow = None if precision == "fp32" else self.narrow
        return Machine(
            memory=self.memory.value,
            flops=half,
            full_flops=self.peak.fp32,
            eight_bit_flops=self.peak.fp8 or 0.0,
            matrix_share=self.matrix.share,
            half_size=narrow.half_size if narrow else self.matrix.half_size,
            half_area=self.matrix.half_area,
            attention_share=self.attention.share,
            score_bytes=self.attention.score_bytes,
            score_seconds=self.attention.score_seconds,
            memory_bandwidth=self.memory_bandwidth.value,
            element_share=self.element_share.value,
            eager=narrow.eager if narrow else max(self.eager.value, 1.0),
            optimizer_share=self.optimizer_share.value,
            launch=narrow.launch if narrow else self.launch.value,
            launches_ahead=self.kind == "cuda",
            collective=self.collective.value,
            waking=self.waking.value,
            message=(self.message or self.collective).value,
            per_node=self.per_node,
            inside=Link(self.inside.latency, self.inside.bandwidth),
            between=Link(self.between.latency, self.between.bandwidth),
            crowding=max(self.crowding.value, 1.0),
            delay=self.delay.value,
            host_bandwidth=self.host_bandwidth.value,
            host_memory=self.host_memory.value if self.host_memory else math.inf,
            host_cores=self.host_cores.value if self.host_cores else 0.0,
            watts=self.watts.value,
            name=self.name,
        )


def names() -> list[str]:
    """Return the names of the profiles in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Profile:
    """Return a profile by its name, by Ray's name of the accelerator, or from a file. Case does not matter.

    Raises InputError.
    """
    if name.lower() in names():
        return _packaged(name.lower())
    if result := profile_of_accelerator(name.upper()):
        return result
    if not name.endswith((".yaml", ".yml")) and not Path(name).is_file():
        hint = f"choose from {', '.join(names())}, or give the path of a profile's file"
        raise InputError(f"no device has the name {name}", "--machine", hint)
    return read(Path(name))


def read(path: Path) -> Profile:
    """Return the profile in a file. Raises InputError."""
    return read_model(path, Profile, "device profile", "orchestrator calibrate writes such a file")


def calibrated_path() -> Path | None:
    """Return the path where `orchestrator calibrate` stores this machine's profile.

    None for a user without a home folder, such as a numeric user without an account in a container.
    """
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".orchestrator" / "machine.yaml"
    return None


def calibrated() -> Profile | None:
    """Return the profile that `orchestrator calibrate` stored on this machine; None without one. Raises InputError."""
    path = calibrated_path()
    return read(path) if path and path.is_file() else None


def check_stores(path: Path) -> None:
    """Raise InputError, before a measurement, if a profile cannot be written to `path` or another kind of file is
    there.
    """
    if reason := os.strerror(errno.EISDIR) if path.is_dir() else unwritable(str(path.absolute().parent)):
        raise InputError(f"cannot be written ({reason})", str(path), "give another with --to")
    if path.exists():
        try:
            read(path)
        except InputError as error:
            problem = f"this file is not a profile ({error.what})"
            raise InputError(problem, str(path), "remove it, or give another with --to") from None


def store(profile: Profile, path: Path) -> None:
    """Write a profile to a file atomically. Raises InputError.

    Args:
        profile: the profile.
        path: its file.
    """
    text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"cannot be written ({error.strerror})", str(path), "give another with --to"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def profile_of_accelerator(accelerator: str) -> Profile | None:
    """Return the profile of an accelerator, given its name in Ray or in its driver ("H100", "NVIDIA A100-SXM4-80GB").

    None for an unknown accelerator. If a device is sold with several memory sizes, the name decides, else the smallest.
    """
    model = re.split(r"[-\s]", re.sub(r"^(NVIDIA|Tesla)\s+", "", accelerator))[0]
    profiles = [
        profile
        for profile in map(_packaged, names())
        if any(listed.partition("-")[0] == model for listed in profile.accelerators)
    ]
    match = re.search(r"(\d+)\s?GB?\b", accelerator)
    size = float(match[1]) * 1e9 if match else 0.0
    return min(profiles, key=lambda profile: abs(profile.memory.value - size), default=None)


@lru_cache
def _packaged(name: str) -> Profile:
    return read(FOLDER / f"{name}.yaml")
