"""The search for the best settings, and its notes, from which it goes on when it was interrupted.

One setting after the other is moved to its neighbours, and further as long as that helps; rounds are repeated until
none does (coordinate descent). Each trial is a whole deployment under a whole load, so few of them are made, and none
twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import BatonError, ConfigError
from baton.planner.tuning.settings import Settings, neighbours

LEAST_GAIN = 0.03
"""By how much of it a goodput must be better to count: less is the noise of a measurement."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings, and the goodput that was measured with them.

    Attributes:
        settings: What was tried.
        goodput: Requests per second within the targets.
        error: Why it could not be measured; empty: it was.
    """

    settings: Settings
    goodput: float
    error: str = ""


class Notes:
    """Trials in a file of JSON lines: the first line says what for, each further one is a trial.

    Args:
        path: The file; made if it is not there.
        purpose: What the trials are for: file, load and targets.

    Raises:
        ConfigError: The file cannot be read or written, or is for another purpose.
    """

    def __init__(self, path: Path, purpose: Mapping[str, Any]) -> None:
        self._path = path
        self.trials: list[Trial] = []
        digest = hashlib.sha256(json.dumps(purpose, sort_keys=True).encode()).hexdigest()
        if not path.exists():
            self._append({"tune": 1, "purpose": dict(purpose), "digest": digest})
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            head, *rest = [json.loads(line) for line in lines if line.strip()]
            if head["digest"] != digest:
                raise ConfigError(
                    f"{path} is of another deployment, load or target: give another --notes", field="notes"
                )
            self.trials = [Trial(each["settings"], float(each["goodput"]), each["error"]) for each in rest]
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="notes") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} has no notes of baton tune", field="notes") from error

    def find(self, settings: Settings) -> Trial | None:
        """Return the trial of settings, if there was one."""
        return next((each for each in self.trials if each.settings == settings), None)

    def add(self, trial: Trial) -> None:
        """Note a trial; it is on the disk when this returns."""
        self.trials.append(trial)
        self._append({"settings": trial.settings, "goodput": trial.goodput, "error": trial.error})

    def _append(self, value: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}", field="notes") from error


def tune(
    start: Settings,
    measure: Callable[[Settings], float],
    notes: Notes,
    *,
    most_trials: int,
    told: Callable[[Trial], None],
) -> Trial:
    """Search from a deployment's own settings on; returns the best trial.

    Args:
        start: They.
        measure: Runs a deployment and returns its goodput.
        notes: What was tried before, and is not tried again.
        most_trials: New trials at most.
        told: Is told of each new trial.

    Raises:
        BatonError: The deployment cannot be measured with its own settings.
    """
    left = most_trials

    def tried(settings: Settings) -> Trial | None:
        nonlocal left
        known = notes.find(settings)
        if known is not None:
            return known
        if not left:
            return None
        left -= 1
        try:
            trial = Trial(settings, measure(settings))
        except BatonError as error:
            trial = Trial(settings, 0.0, " ".join(error.message.split()))
        notes.add(trial)
        told(trial)
        return trial

    best = tried(start)
    if best is None or best.error:
        raise ConfigError(f"the deployment's own settings cannot be measured: {best.error if best else 'no trial'}")
    moved = True
    while moved:
        moved = False
        for name in start:
            for value in neighbours(name, best.settings[name]):
                trial = tried({**best.settings, name: value})
                while trial is not None and trial.goodput > (1 + LEAST_GAIN) * best.goodput:
                    before, best, moved = best.settings[name], trial, True
                    further = [each for each in neighbours(name, best.settings[name]) if each != before]
                    trial = tried({**best.settings, name: further[0]}) if further else None
    return best
