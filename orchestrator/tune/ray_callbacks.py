"""What Ray Tune calls in the driver."""

from __future__ import annotations

from typing import Any

from ray.tune import Callback, Stopper

from orchestrator.tune.progress import SearchProgress


class TrialCallback(Callback):
    """Tells a search's standing of its trials."""

    def __init__(self, standing: SearchProgress) -> None:
        self._standing = standing

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """See Ray."""
        self._standing.tick()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """See Ray."""
        self._standing.heard(result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See Ray."""
        self._standing.ended(trial.config["given"]["trial"], trial.last_result)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See Ray."""
        self._standing.ended(trial.config["given"]["trial"], None)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps copies of its callbacks; ours has nothing that the sweep's directory has not


class LimitStopper(Stopper):
    """Stops everything when a limit of the search is reached."""

    def __init__(self, standing: SearchProgress) -> None:
        self._standing = standing

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No single trial."""
        return False

    def stop_all(self) -> bool:
        """See Ray."""
        return bool(self._standing.limit())

    def __getstate__(self) -> dict[str, Any]:
        return {}
