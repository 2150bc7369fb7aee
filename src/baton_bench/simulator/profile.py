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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from baton.errors import ConfigError, shown
from baton_bench.report import write_file

VERSION = 1
MAX_FILE_BYTES = 16 << 20
Amount = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a step's prompt tokens: fixed, per token, per pair of a token and one it attends to."""

    fixed_s: Amount
    per_token_s: Amount
    per_pair_s: Amount = 0.0

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return the seconds of ``tokens`` prompt tokens; 0 without any."""
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs if tokens else 0.0

    def prompt(self, tokens: float) -> float:
        """Return the seconds of a whole prompt in one step."""
        return self.seconds(tokens, 0.5 * tokens * tokens)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step's decodes: fixed, per token of their contexts, per sequence."""

    fixed_s: Amount
    per_context_s: Amount
    per_sequence_s: Amount

    def seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of decodes with ``context`` tokens in all; 0 without sequences."""
        return self.fixed_s + self.per_context_s * context + self.per_sequence_s * sequences if sequences else 0.0


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well a line fits what was measured: points, and relative errors of the line against them."""

    points: Count = 0
    median_error: Amount = 0.0
    worst_error: Amount = 0.0


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

    tp: Size
    pp: Size
    prefill: PrefillCost
    decode: DecodeCost
    kv_tokens: Count
    overlap: Share = 0.0
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

    max_num_seqs: Size = 64
    max_num_batched_tokens: Size = 2048
    prefill_chunk: Size = 512
    block_size: Size = 16
    step_budget_ms: Amount | None = None
    remote_prefill_threshold: Count = 64


@dataclass(frozen=True, slots=True)
class Link:
    """The link of an instance: seconds per read, bytes per second, and whether KV is sent layer by layer."""

    latency_s: Amount
    bytes_per_s: Positive
    layerwise: bool = True


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beyond the engine: per request (router, front end), per hand-over (two calls), per decode step."""

    request_s: Amount = 0.0
    handover_s: Amount = 0.0
    step_s: Amount = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """From which the KV pools of shapes that were not measured follow: bytes of a device, of all weights, usable."""

    device_bytes: Positive
    weights_bytes: Amount
    usable: Amount = 0.9


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
        device: Device of the engines, as ``--device`` of an instance takes it.
        tp_efficiency: Efficiency of each doubling of tensor parallelism, 0 to 1, for shapes that were not measured.
    """

    model: str
    source: str
    layers: Size
    kv_bytes_per_token: Positive
    engines: Annotated[tuple[EngineProfile, ...], msgspec.Meta(min_length=1)]
    link: Link
    limits: Limits = field(default_factory=Limits)
    overheads: Overheads = field(default_factory=Overheads)
    memory: Memory | None = None
    tp_efficiency: Positive = 0.9
    device: str = "cpu"

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
            with path.open("rb") as file:
                value = msgspec.json.decode(file.read(MAX_FILE_BYTES))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="profile") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON: {shown(str(error))}", field="profile") from error
        if not isinstance(value, dict) or value.pop("version", None) != VERSION:
            raise ConfigError(f"{path} is no profile of version {VERSION}", field="profile")
        try:
            profile = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}", field="profile") from error
        if unknown := _unknown_field(value, msgspec.to_builtins(profile), "$"):
            raise ConfigError(f"{path}: {unknown} is not known", field="profile")
        return profile


def _unknown_field(given: Any, known: Any, where: str) -> str:
    """Return the path of a field of a parsed file that what was made of it has not; empty: there is none."""
    if isinstance(given, dict):
        for name, value in given.items():
            path = f"{where}.{name}"
            if name not in known:
                return path
            if unknown := _unknown_field(value, known[name], path):
                return unknown
    elif isinstance(given, list):
        for number, (value, same) in enumerate(zip(given, known, strict=True)):
            if unknown := _unknown_field(value, same, f"{where}[{number}]"):
                return unknown
    return ""
