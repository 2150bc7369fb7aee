"""The profile of an engine: time of steps, size of the KV pool, speed of transfers; a JSON file.

A step's time is linear in what it computes, as in DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al.,
ISCA 2024): prefill ``a + b * tokens + c * pairs``, where pairs are tokens times the tokens that each attends to
(``n^2 / 2`` for a whole prompt of n, so this is their quadratic term, for chunks too), decode ``a + b * context
+ c * sequences``. A step with both takes the sum, less what the two share (``overlap``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from baton.errors import ConfigError, shown
from baton_bench.report import write_file

VERSION = 1
MAX_FILE_BYTES = 16 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a step's prompt tokens: fixed, per token, per pair of a token and one it attends to."""

    fixed_s: float
    per_token_s: float
    per_pair_s: float = 0.0

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return the seconds of ``tokens`` prompt tokens; 0 without any."""
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs if tokens else 0.0

    def prompt(self, tokens: float) -> float:
        """Return the seconds of a whole prompt in one step."""
        return self.seconds(tokens, 0.5 * tokens * tokens)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step's decodes: fixed, per token of their contexts, per sequence."""

    fixed_s: float
    per_context_s: float
    per_sequence_s: float

    def seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of decodes with ``context`` tokens in all; 0 without sequences."""
        return self.fixed_s + self.per_context_s * context + self.per_sequence_s * sequences if sequences else 0.0


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well a line fits what was measured: points, and relative errors of the line against them."""

    points: int = 0
    median_error: float = 0.0
    worst_error: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """An engine of one parallel shape.

    Attributes:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        prefill: Time of prompts.
        decode: Time of decodes.
        kv_tokens: Tokens that its KV pool holds.
        overlap: Share, of the shorter of prefill and decode's fixed part, that a step with both saves: 1 where the
            weights are read once for both.
        residuals: Quality of each fit, by the name of what was fitted.
    """

    tp: int
    pp: int
    prefill: PrefillCost
    decode: DecodeCost
    kv_tokens: int
    overlap: float = 0.0
    residuals: dict[str, FitQuality] = field(default_factory=dict, hash=False)

    @property
    def devices(self) -> int:
        """GPUs (or other devices) of an instance."""
        return self.tp * self.pp

    def step_s(self, sequences: float, context: float, tokens: float, pairs: float) -> float:
        """Return the seconds of a step."""
        decode = self.decode.seconds(sequences, context)
        prefill = self.prefill.seconds(tokens, pairs)
        if decode and prefill:
            return decode + prefill - self.overlap * min(prefill, self.decode.fixed_s)
        return decode + prefill

    def slower(self, prefill: float = 1.0, decode: float = 1.0) -> EngineProfile:
        """Return the engine with the times of prefill and decode multiplied by factors."""
        p = self.prefill
        d = self.decode
        return dataclasses.replace(
            self,
            prefill=PrefillCost(prefill * p.fixed_s, prefill * p.per_token_s, prefill * p.per_pair_s),
            decode=DecodeCost(decode * d.fixed_s, decode * d.per_context_s, decode * d.per_sequence_s),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The fields of the engine's configuration that decide what goes into a step."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    block_size: int = 16
    step_budget_ms: float | None = None
    remote_prefill_threshold: int = 64


@dataclass(frozen=True, slots=True)
class Link:
    """The link of an instance: seconds per read, bytes per second, and whether KV is sent layer by layer."""

    latency_s: float
    bytes_per_s: float
    layerwise: bool = True


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beyond the engine: per request (router, front end), per hand-over (two calls), per decode step."""

    request_s: float = 0.0
    handover_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """From which the KV pools of shapes that were not measured follow: bytes of a device, of all weights, usable."""

    device_bytes: float
    weights_bytes: float
    usable: float = 0.9


@dataclass(frozen=True)
class Profile:
    """Everything that is known of a model on some hardware.

    Attributes:
        model: Name or directory of the model.
        source: Where the figures are from.
        layers: Number of decoder layers; the last one's KV is what layer-wise transfer cannot hide.
        kv_bytes_per_token: All layers.
        engines: One per measured parallel shape; others are derived from the nearest one.
        link: Between a prefill and a decode instance.
        limits: Configured limits of a step.
        overheads: Beyond the engine.
        memory: ``None``: shapes that were not measured have the first one's KV per device.
        tp_efficiency: Efficiency of each doubling of tensor parallelism, 0 to 1, for shapes that were not measured.
    """

    model: str
    source: str
    layers: int
    kv_bytes_per_token: float
    engines: tuple[EngineProfile, ...]
    link: Link
    limits: Limits = field(default_factory=Limits)
    overheads: Overheads = field(default_factory=Overheads)
    memory: Memory | None = None
    tp_efficiency: float = 0.9

    def engine(self, tp: int, pp: int) -> EngineProfile | None:
        """Return the engine of a shape: measured, or derived from the nearest measured one; ``None``: no room for KV.

        Derived is so: each doubling of tp divides what is computed and read by ``2 * tp_efficiency``, pipeline stages
        divide memory alone, since Baton's stages run one after the other.
        """
        for engine in self.engines:
            if (engine.tp, engine.pp) == (tp, pp):
                return engine if engine.kv_tokens > 0 else None
        near = min(self.engines, key=lambda each: (abs(math.log2(each.tp / tp)), each.pp))
        factor = (2 * self.tp_efficiency) ** -math.log2(tp / near.tp)
        devices = tp * pp
        if self.memory is None:
            kv_tokens = near.kv_tokens * devices // near.devices
        else:
            left = devices * self.memory.usable * self.memory.device_bytes - self.memory.weights_bytes
            kv_tokens = int(left / self.kv_bytes_per_token)
        if kv_tokens <= 0:
            return None
        return dataclasses.replace(near.slower(factor, factor), tp=tp, pp=pp, kv_tokens=kv_tokens, residuals={})

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            ConfigError: It cannot be written.
        """
        write_file(path, self.to_json(), "profile")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file.

        Raises:
            ConfigError: It cannot be read, or something in it is wrong; names file and field.
        """
        try:
            with path.open(encoding="utf-8") as file:
                value = json.loads(file.read(MAX_FILE_BYTES))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="profile") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON: {shown(str(error))}", field="profile") from error
        if not isinstance(value, dict) or value.pop("version", None) != VERSION:
            raise ConfigError(f"{path} is no profile of version {VERSION}", field="profile")
        reader = _Reader(str(path))
        engines = value.pop("engines", None)
        if not isinstance(engines, list) or not engines:
            raise ConfigError(f"{path}: engines must be a list with an engine at least", field="engines")
        return reader.read(
            cls,
            {**value, "engines": tuple(reader.engine(each, f"engines[{i}]") for i, each in enumerate(engines))},
            "",
        )


_NESTED: Mapping[str, type] = {
    "prefill": PrefillCost,
    "decode": DecodeCost,
    "link": Link,
    "limits": Limits,
    "overheads": Overheads,
    "memory": Memory,
}
_WHOLE = frozenset({"tp", "pp", "kv_tokens", "layers", "points", "max_num_seqs", "max_num_batched_tokens",
                    "prefill_chunk", "block_size", "remote_prefill_threshold"})  # fmt: skip
_POSITIVE = frozenset({"tp", "pp", "layers", "kv_bytes_per_token", "bytes_per_s", "max_num_seqs", "tp_efficiency",
                       "max_num_batched_tokens", "prefill_chunk", "block_size", "device_bytes"})  # fmt: skip


class _Reader:
    """Makes dataclasses of parsed JSON; every mistake names the file and the field's path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def engine(self, value: Any, where: str) -> EngineProfile:
        fits = value.pop("residuals", {}) if isinstance(value, dict) else {}
        if not isinstance(fits, dict):
            raise ConfigError(f"{self._path}: {where}.residuals is not an object", field="residuals")
        engine = self.read(EngineProfile, value, where)
        result = {name: self.read(FitQuality, each, f"{where}.residuals.{name}") for name, each in fits.items()}
        if not 0 <= engine.overlap <= 1:
            raise ConfigError(f"{self._path}: {where}.overlap must be between 0 and 1", field="overlap")
        return dataclasses.replace(engine, residuals=result)

    def read(self, kind: type[T], value: Any, where: str) -> T:
        if not isinstance(value, dict):
            raise ConfigError(f"{self._path}: {where} is not an object", field=where)
        items = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
        prefix = f"{where}." if where else ""
        for name in value:
            if name not in items:
                raise ConfigError(f"{self._path}: {prefix}{name} is not known", field=name)
        values = {}
        for name, item in items.items():
            if name not in value:
                if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                    raise ConfigError(f"{self._path}: {prefix}{name} is missing", field=name)
                continue
            values[name] = self._value(name, value[name], f"{prefix}{name}", str(item.type))
        return kind(**values)

    def _value(self, name: str, value: Any, where: str, kind: str) -> Any:
        if name == "engines" or (value is None and "None" in kind):
            return value
        if name in _NESTED:
            return self.read(_NESTED[name], value, where)
        wanted = str if kind == "str" else bool if kind == "bool" else None
        if wanted is not None:
            if not isinstance(value, wanted):
                raise ConfigError(f"{self._path}: {where} must be a {wanted.__name__}, got {shown(value)}", field=name)
            return value
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        least = "above 0" if name in _POSITIVE else "at least 0"
        if not number or value < 0 or (name in _POSITIVE and value == 0) or (name in _WHOLE and value != int(value)):
            whole = "whole number" if name in _WHOLE else "number"
            raise ConfigError(f"{self._path}: {where} must be a {whole} {least}, got {shown(value)}", field=name)
        return value
