"""The callback and the stopper that Ray Tune calls in the driver."""

from __future__ import annotations

from typing import Any

from ray.tune import Callback, Stopper

from orchestrator.tune.progress import SearchProgress


class TrialCallback(Callback):
    """Reports results and ends of trials to the `SearchProgress`."""

    def __init__(self, progress: SearchProgress) -> None:
        self._progress = progress

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """See Ray."""
        self._progress.tick(
            {trial.config["assignment"]["trial"] for trial in trials if trial.status == "RUNNING"}
        )

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """See Ray."""
        self._progress.on_result(result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See Ray."""
        self._progress.on_end(trial.config["assignment"]["trial"], trial.last_result)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See Ray."""
        self._progress.on_end(trial.config["assignment"]["trial"], None)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks; the state of this one is in the search's directory


class LimitStopper(Stopper):
    """Stops all trials when a limit of the search is reached."""

    def __init__(self, progress: SearchProgress) -> None:
        self._progress = progress

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """See Ray. The scheduler stops single trials, not this."""
        return False

    def stop_all(self) -> bool:
        """See Ray."""
        return bool(self._progress.limit())

    def __getstate__(self) -> dict[str, Any]:
        return {}
