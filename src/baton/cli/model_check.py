"""A look at model, device and ranks before processes and torch are started: what cannot work is an error at once."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from baton.config import EngineConfig
from baton.config.worker import BUILT_IN_DRAFTERS
from baton.errors import ConfigError
from baton.kv_cache.shards import head_range, layer_range
from baton.plugins import installed_plugins
from baton.tokenizer.model_files import check_model_config, check_model_path, read_eos_token_ids, read_json
from baton.tokenizer.weight_files import weight_files

_DEVICE = re.compile(r"cpu|interpret|cuda(:\d+)?(,cuda:\d+)*")


def check_engine(config: EngineConfig) -> None:
    """Check what can be known of an engine's configuration without loading the model.

    A model on the hub is not looked at: its files are downloaded by the instances.

    Raises:
        ConfigError: It cannot be loaded; names the field.
    """
    if not _DEVICE.fullmatch(config.device):
        raise ConfigError(f"device {config.device!r}: only cpu, cuda and interpret are supported", field="device")
    if config.device.startswith("cuda") and not torch_has_gpus():
        raise ConfigError(f"device {config.device!r}: the installed torch is built for CPUs", field="device")
    methods = ("none", *BUILT_IN_DRAFTERS, *sorted(installed_plugins("baton.drafters")))
    if config.speculative not in methods:
        known = ", ".join(methods)
        message = f"speculative {config.speculative!r} is not known (there are: {known})"
        raise ConfigError(message, field="speculative")
    folder = Path(config.model).expanduser()
    if folder.exists():
        check_model_path(folder)
        _check_folder(folder, config)


def torch_has_gpus() -> bool:
    """Whether the installed torch is built for GPUs, by its version file."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        version = Path(folder, "version.py")
        if version.is_file():
            built = re.findall(r"^(?:cuda|hip|rocm)\b.*= *(\S+)$", version.read_text(encoding="utf-8"), re.MULTILINE)
            return any(each != "None" for each in built)
    return True  # unknown: torch itself will say


def _check_folder(folder: Path, config: EngineConfig) -> None:
    """Check a model's files, and that the ranks divide its heads and layers."""
    raw = read_json(folder / "config.json")
    if not raw:
        raise ConfigError(f"model folder {str(folder)!r} has no config.json", field="model")
    check_model_config(folder / "config.json", raw)
    read_eos_token_ids(folder / "generation_config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        read_json(folder / name)
    weight_files(folder)
    text = raw.get("text_config")
    values = text if isinstance(text, dict) else raw
    heads = values.get("num_attention_heads")
    kv_heads = values.get("num_key_value_heads") or heads
    layers = values.get("num_hidden_layers")
    if isinstance(heads, int) and heads % config.tp:
        raise ConfigError(f"{heads} query heads cannot be divided over tp={config.tp}", field="tp")
    if isinstance(kv_heads, int) and kv_heads > 0:
        head_range(kv_heads, config.tp, 0)
    if isinstance(layers, int):
        layer_range(layers, config.pp, 0)
