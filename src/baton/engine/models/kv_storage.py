"""How a model's KV is stored: the type of each layer, and the checkpoint's scales where the type needs them.

fp8 KV has static scales. Checkpoints that were calibrated for it have them beside the attention's weights, a number per
layer or per KV head, as compressed-tensors' ``kv_cache_scheme`` writes them: ``...self_attn.k_scale`` and ``v_scale``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

import torch
from safetensors import safe_open

from baton.config import EngineConfig
from baton.engine.models.loader import LoadedModel
from baton.errors import ConfigError
from baton.kv_cache.layout import SCALED, is_quantized, type_name
from baton.tokenizer.weight_files import WeightFile
from baton_kernels.paged_attention import AttentionSpec

_SCALE_NAME = re.compile(r"\.(\d+)\.(?:self_attn|attention|attn)\.(?:attn\.)?([kv])_scale$")

HeadScales = tuple[torch.Tensor, torch.Tensor]
"""Scales of a layer's K and V, float32 [kv_heads] each."""


def kv_type(config: EngineConfig, model: LoadedModel, specs: Sequence[AttentionSpec]) -> str:
    """Return the KV type of a model's layers.

    Args:
        config: Configuration with ``kv_dtype`` and ``kv_skip_layers``.
        model: The model; skipped layers have its dtype.
        specs: Attention of each layer.

    Raises:
        ConfigError: The model has no KV of that type; names ``kv_dtype`` or ``kv_skip_layers``.
    """
    own = model.dtype
    wanted = config.kv_dtype
    if wanted == "auto":
        wanted = own
    if wanted == own and not config.kv_skip_layers:
        return own
    if not is_quantized(wanted) and (wanted, own) not in {("bfloat16", "float32"), (own, own)}:
        raise ConfigError(f"kv_dtype {wanted} is not for a model of {own}", field="kv_dtype")
    if any(spec.latent for spec in specs) and wanted != own:
        raise ConfigError(
            f"kv_dtype {wanted} is not for {model.architecture}: a token's latent and its rotary key, which differ in "
            "magnitude, would share one scale",
            field="kv_dtype",
        )
    skipped = _skipped_layers(config.kv_skip_layers, specs)
    types = [own if layer in skipped else wanted for layer in range(len(specs))]
    if skipped and not is_quantized(wanted):
        raise ConfigError("kv_skip_layers is for a quantized kv_dtype", field="kv_skip_layers")
    return type_name(types)


def _skipped_layers(names: Sequence[str], specs: Sequence[AttentionSpec]) -> set[int]:
    """Return the layers that are named by number, or as ``first``, ``last`` and ``sliding``."""
    skipped: set[int] = set()
    for name in names:
        if name == "sliding":
            skipped |= {layer for layer, spec in enumerate(specs) if spec.window}
        elif name in {"first", "last"}:
            skipped.add(0 if name == "first" else len(specs) - 1)
        elif name.isascii() and name.isdigit() and len(name) <= 6 and int(name) < len(specs):
            skipped.add(int(name))
        else:
            raise ConfigError(
                f"kv_skip_layers has {name!r}: layers are numbers below {len(specs)}, first, last or sliding",
                field="kv_skip_layers",
            )
    return skipped


def check_backend(name: str, stores: frozenset[torch.dtype], types: Sequence[torch.dtype], own: torch.dtype) -> None:
    """Refuse an attention backend that does not read the types of the KV.

    Args:
        name: Name of the backend.
        stores: Dtypes of KV that the backend reads beside the model's dtype.
        types: Dtype of each layer's KV.
        own: The model's dtype.

    Raises:
        ConfigError: The backend does not read one of the types; names ``kv_dtype``.
    """
    lacking = [kind for kind in types if kind != own and kind not in stores]
    if lacking:
        kind = str(lacking[0]).removeprefix("torch.")
        others = "cpp and torch do, and triton on a GPU that has such numbers"
        raise ConfigError(f"attention_backend {name} does not read KV of {kind}: {others}", field="kv_dtype")


def checkpoint_scales(
    files: Sequence[WeightFile], specs: Sequence[AttentionSpec], types: Sequence[str]
) -> list[HeadScales | None]:
    """Read the scales of the layers whose type needs the checkpoint's.

    Args:
        files: The checkpoint's files of weights.
        specs: Attention of each layer.
        types: Type of each layer's KV.

    Returns:
        Scales per layer; ``None``: the layer needs none.

    Raises:
        ConfigError: A scale is missing, of another shape, or no positive number; names file, tensor and ``kv_dtype``.
    """
    if "fp8_e4m3" not in types:
        return [None] * len(types)
    places = _find_scales(files)
    scales: list[HeadScales | None] = []
    for layer, (spec, kind) in enumerate(zip(specs, types, strict=True)):
        if kind in SCALED or kind != "fp8_e4m3":
            scales.append(None)
            continue
        pair = []
        for side in ("k", "v"):
            if (layer, side) not in places:
                raise ConfigError(
                    f"kv_dtype fp8_e4m3 needs the checkpoint's scales, and layer {layer} has no {side}_scale; "
                    "int8 needs none",
                    field="kv_dtype",
                )
            pair.append(_read_scale(*places[layer, side], spec.kv_heads))
        scales.append((pair[0], pair[1]))
    return scales


def scales_digest(scales: Sequence[HeadScales | None]) -> str:
    """Return a digest (16 hex digits) of a checkpoint's scales; empty if none are used."""
    if not any(scales):
        return ""
    numbers = [pair and [side.tolist() for side in pair] for pair in scales]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def _find_scales(files: Sequence[WeightFile]) -> Mapping[tuple[int, str], tuple[WeightFile, str]]:
    """Return the file and the tensor of each scale, by layer and side (``k`` or ``v``)."""
    places = {}
    for file in (each for each in files if each.path.suffix == ".safetensors"):
        for name in json.loads(file.header):
            if match := _SCALE_NAME.search(name):
                places[int(match[1]), match[2]] = (file, name)
    return places


def _read_scale(file: WeightFile, name: str, kv_heads: int) -> torch.Tensor:
    with safe_open(file.path, framework="pt") as opened:
        value: torch.Tensor = opened.get_tensor(name).float().reshape(-1)
    if value.numel() not in {1, kv_heads}:
        raise ConfigError(f"{file.path}: {name} has {value.numel()} numbers for {kv_heads} KV heads", field="kv_dtype")
    if not (value.isfinite() & (value > 0)).all():
        raise ConfigError(f"{file.path}: {name} has a scale that is no positive number", field="kv_dtype")
    return value.expand(kv_heads).contiguous()
