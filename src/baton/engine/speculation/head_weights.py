"""Files of drafting heads, in the forms in which they are published: EAGLE's, EAGLE-3's and Medusa's."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.models.loader import LoadedModel
from baton.errors import ConfigError
from baton.tokenizer.model_files import model_directory, read_json

_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
_PATTERNS = ["config.json", *_FILES]
FIELD = "speculative_model"


class _HasModel(Protocol):
    @property
    def model(self) -> LoadedModel: ...


class HeadFiles:
    """The configuration and the tensors of a head.

    Args:
        config: Names the folder or the hub's repository.

    Attributes:
        settings: Its ``config.json``.
        path: The file of its weights, for errors.
        digest: SHA-256 of both, 32 hex digits of it.
        device: Where tensors are wanted.

    Raises:
        ConfigError: There is none, or it cannot be read; names ``speculative_model``.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.device = device
        if not config.speculative_model:
            name = config.speculative
            raise ConfigError(f"speculative {name} needs --speculative-model, the folder of its head", field=FIELD)
        try:
            folder = model_directory(config.speculative_model, _PATTERNS)
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{folder} has no config.json", field=FIELD)
            self.settings: dict[str, Any] = read_json(folder / "config.json")
        except ConfigError as error:
            raise ConfigError(
                f"speculative_model {config.speculative_model!r}: {error.message}", field=FIELD
            ) from error
        self.path, self._tensors = _read(folder)
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update((folder / "config.json").read_bytes())
        self.digest = digest.hexdigest()[:32]

    def has(self, name: str) -> bool:
        """Whether there is a tensor."""
        return name in self._tensors

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor.

        Raises:
            ConfigError: It is missing, has another shape, or values that are no numbers.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self.path} has no {name}", field=FIELD)
        if tuple(tensor.shape) != shape:
            have, want = list(tensor.shape), list(shape)
            raise ConfigError(f"{self.path}: {name} has shape {have}, but {want} fits the model", field=FIELD)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ConfigError(f"{self.path}: {name} has values that are not finite", field=FIELD)
        return tensor.to(self.device, dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, () where there is none."""
        return tuple(self._tensors[name].shape) if name in self._tensors else ()

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of the configuration.

        Raises:
            ConfigError: It is missing or no number above 0.
        """
        value = self.settings.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{self.path.parent / 'config.json'}: {name} is {value!r}", field=FIELD)
        return value


def _read(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"speculative_model folder {str(folder)!r} has none of {', '.join(_FILES)}", field=FIELD)
    try:
        if path.suffix == ".safetensors":
            return path, load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read: {reason}", field=FIELD) from error
    if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ConfigError(f"{path} is not a table of tensors", field=FIELD)
    return path, found


def target_of(config: EngineConfig, executor: Executor) -> LoadedModel:
    """Return the model whose hidden states a head reads.

    Raises:
        ConfigError: It is divided among processes; names ``speculative``.
    """
    name = config.speculative
    if config.tp * config.pp > 1 or not hasattr(executor, "model"):
        raise ConfigError(f"speculative {name} works with tp 1 and pp 1 only", field="speculative")
    holder: _HasModel = executor  # type: ignore[assignment]  # it has one
    return holder.model


def target_head(model: LoadedModel) -> nn.Module:
    """Return what turns a model's last hidden states into logits."""
    head: nn.Module = model.module.get_output_embeddings()
    return head


def target_embedding(model: LoadedModel) -> nn.Module:
    """Return a model's embedding of tokens."""
    embedding: nn.Module = model.module.get_input_embeddings()
    return embedding
