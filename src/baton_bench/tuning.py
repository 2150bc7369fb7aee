"""``baton tune``: the search for the best settings by measurement, and its notes, from which it can resume.

One setting after the other is moved to its neighbours, and further as long as that helps; rounds are repeated until
none does (coordinate descent). Each trial is a whole deployment under a whole load, so few of them are made, and none
twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.child_process import ChildProcess, start_python
from baton.config.flags import AccessConfig
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.rpc.server import free_ports
from baton_bench.report import Record
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.records import KneeRecord, ServeRecord
from baton_bench.serve.run import Benchmark

Settings = dict[str, str | int | float]
"""Values by the names of :data:`TUNABLE`."""
_RATIO = re.compile(r"(\d+)[pP](\d+)[dD]")


@dataclass(frozen=True, slots=True)
class Tunable:
    """A setting.

    Attributes:
        section: Section of the file whose ``flags`` have it; empty: the top level.
        default: Value if the file has none.
        least: Lowest value.
        most: Highest value.
        factor: Neighbours of a value are this many times as large and as small.
    """

    section: str
    default: str | int | float
    least: float = 1
    most: float = 1 << 20
    factor: float = 2.0


TUNABLE: Mapping[str, Tunable] = {
    "ratio": Tunable("", "1P1D"),
    "max-num-seqs": Tunable("worker", 64, most=1024),
    "max-num-batched-tokens": Tunable("worker", 2048, least=64, most=65536),
    "prefill-chunk": Tunable("worker", 512, least=16, most=65536),
    "remote-prefill-threshold": Tunable("worker", 64, least=1, most=65536, factor=4.0),
    "beta": Tunable("router", 0.5, least=0.01, most=8.0),
}
"""By their names in the file; a new one is a line here."""


def neighbours(name: str, value: str | int | float) -> Iterator[str | int | float]:
    """Yield the values next to one: of a ratio those with as many instances."""
    if name == "ratio":
        match = _RATIO.fullmatch(str(value))
        if match is None:
            raise ConfigError(f"ratio must look like 2P3D, got {value!r}", field="ratio")
        x = int(match[1])
        y = int(match[2])
        for prefills, decodes in ((x + 1, y - 1), (x - 1, y + 1)):
            if prefills >= 0 and decodes >= 1:
                yield f"{prefills}P{decodes}D"
        return
    tunable = TUNABLE[name]
    number = float(value)
    for other in (number * tunable.factor, number / tunable.factor):
        if tunable.least <= other <= tunable.most:
            yield round(other, 4) if isinstance(tunable.default, float) else int(other)


def read_settings(document: Mapping[str, Any], names: tuple[str, ...]) -> Settings:
    """Return the values that a deployment's file has.

    Raises:
        ConfigError: A name cannot be tuned, or a role has a value of its own, which would win.
    """
    result: Settings = {}
    for name in names:
        if name not in TUNABLE:
            raise ConfigError(f"--tune takes {', '.join(TUNABLE)}; got {name!r}", field="tune")
        section = TUNABLE[name].section
        if section == "worker":
            for role in ("prefill", "decode"):
                if name in _flags(document, role):
                    raise ConfigError(
                        f"{role}.flags.{name} would win over what is tuned: move it to worker", field=name
                    )
        values = document if not section else _flags(document, section)
        result[name] = values.get(name, TUNABLE[name].default)
    if "ratio" in result and "ratio" not in document:
        counts = [_replicas(document, role) for role in ("prefill", "decode")]
        result["ratio"] = f"{counts[0]}P{counts[1]}D"
    return result


def with_settings(document: Mapping[str, Any], settings: Settings) -> str:
    """Return a deployment's file with other values, as JSON (which is YAML)."""
    changed = json.loads(json.dumps(document))
    for name, value in settings.items():
        section = TUNABLE[name].section
        if section:
            changed.setdefault(section, {}).setdefault("flags", {})[name] = value
            continue
        changed[name] = value
        if name == "ratio":
            for role in ("prefill", "decode"):
                changed.get(role, {}).pop("replicas", None)
    return json.dumps(changed, indent=1) + "\n"


def _flags(document: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    return (document.get(section) or {}).get("flags") or {}


def _replicas(document: Mapping[str, Any], role: str) -> int:
    count = (document.get(role) or {}).get("replicas")
    return 1 if count is None else int(count)


LEAST_GAIN = 0.03
"""By how much of it a goodput must be better to count: less is the noise of a measurement."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings, and the goodput that was measured with them.

    Attributes:
        settings: Settings that were tried.
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
        purpose: Model file, load and latency targets of the trials.

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
    on_trial: Callable[[Trial], None],
) -> Trial:
    """Search from a deployment's own settings on; returns the best trial.

    Args:
        start: The deployment's own settings.
        measure: Runs a deployment and returns its goodput.
        notes: Earlier trials, which are not repeated.
        most_trials: New trials at most.
        on_trial: Called after each new trial.

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
        on_trial(trial)
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
                    before = best.settings[name]
                    best = trial
                    moved = True
                    further = [each for each in neighbours(name, best.settings[name]) if each != before]
                    trial = tried({**best.settings, name: further[0]}) if further else None
    return best


UP_MODULE = "baton.cli.main"
READY = "Ctrl-C ends everything"
READY_S = 600.0
END_S = 60.0


@contextlib.contextmanager
def deployment(file: Path, *flags: str) -> Iterator[str]:
    """Run ``baton up -f`` with more flags; yields its URL, and ends it.

    Raises:
        UnavailableError: It ended before it was ready, or was not ready in time.
    """
    http, grpc = free_ports(2)
    words = ["up", "-f", str(file), "--port", str(http), "--grpc-port", str(grpc), *flags]
    ready = threading.Event()

    def on_line(text: str) -> None:
        if READY in text:
            ready.set()

    child = ChildProcess(start_python(UP_MODULE, words, output=subprocess.PIPE), on_line)
    deadline = time.monotonic() + READY_S
    try:
        while not ready.wait(0.1):
            if child.returncode is not None or time.monotonic() >= deadline:
                raise UnavailableError(f"baton up was not ready: {child.last_words(1.0) or 'no word'}")
        yield f"http://127.0.0.1:{http}"
    finally:
        child.stop(END_S, signal.SIGINT)


def measure_with(
    document: Mapping[str, Any], options: ServeOptions, access: AccessConfig, slos: Mapping[str, float]
) -> Callable[[Settings], float]:
    """Return a function that measures a deployment with other settings: its goodput in requests per second."""

    def measure(settings: Settings) -> float:
        with tempfile.TemporaryDirectory(prefix="baton-tune-") as folder:
            file = Path(folder, "cluster.yaml")
            file.write_text(with_settings(document, settings), encoding="utf-8")
            with deployment(file) as url:
                records: list[Record] = []
                load = dataclasses.replace(options, url=url)
                Benchmark(load, access, slos).run(records.append, lambda what, left: None)
        for record in records:
            if isinstance(record, KneeRecord):
                return record.goodput or 0.0
        return max((each.goodput or 0.0 for each in records if isinstance(each, ServeRecord)), default=0.0)

    return measure
