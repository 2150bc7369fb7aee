"""Loads a model for the engine and refuses, with one clear line, what Baton could only run wrongly.

Weights are safetensors files, which are checked to be whole before transformers reads them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from baton.config import EngineConfig
from baton.engine.device.compute import ComputeDevice, rank_device
from baton.engine.gguf.source import GgufSource
from baton.engine.models.checkpoint import WeightFile, weight_files
from baton.engine.models.quantized_loader import load_quantized
from baton.engine.models.quirks import DRAFT_MODELS, unserved_layers
from baton.engine.models.tensors import TensorFiles
from baton.engine.quantization.base import StoredWeight
from baton.engine.quantization.kept import return_free_memory
from baton.engine.quantization.modules import place_weights, rounds_inputs
from baton.engine.quantization.online import identity, quantized_at_load, with_activations
from baton.engine.quantization.schemes import quantization_config, stored_weights
from baton.errors import ConfigError
from baton.logs import quiet_imports
from baton.tokenizer.model_files import model_directory, read_json

log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, and where it came from."""

    module: Any
    text_config: Any
    architecture: str
    folder: Path
    files: list[WeightFile]
    dtype: str
    device: torch.device
    """Where its weights are."""
    eos_token_ids: frozenset[int]
    identity: str = ""
    """What decides its numbers beside the files: how it was quantized at load, and other activations than theirs."""
    rounds_inputs: bool = False
    """Whether inputs of some layers are rounded to 8 bits."""
    compute: ComputeDevice = ComputeDevice(torch.device("cpu"), on_gpu=False)  # noqa: RUF009 - it is frozen
    """What runs it; its memory is ``device``, but for a model that is to be divided first."""
    kept: TensorFiles | None = None
    """Whose pages plain weights are, where others are quantized: not needed in memory where operators have copies."""


def load_model(config: EngineConfig, *, hold: bool = True, rank: int = 0) -> LoadedModel:
    """Load a decoder-only model whose attention can be replaced.

    Args:
        config: Of the engine.
        hold: Whether quantized weights are in memory then; else they are read whenever they are used.
        rank: Whose device the model, or a part of it, is for; one that is to be divided stays in host memory.

    Raises:
        ConfigError: No such model, a damaged checkpoint, an architecture that is unknown or cannot be served, or a
            device that is not there.
    """
    ranks = config.tp * config.pp
    device = rank_device(config.device, rank, ranks)
    device.enter()
    memory = device.memory if ranks == 1 else torch.device("cpu")
    folder = model_directory(config.model, HUB_PATTERNS)
    raw = read_json(folder / "config.json")
    if not raw:
        raise ConfigError(f"model folder {str(folder)!r} has no config.json", field="model")
    hf_config = _model_config(folder, raw)
    model_class = _model_class(hf_config, raw)
    architecture = model_class.__name__
    files = weight_files(folder)
    quantized, kept = quantization_config(raw), None
    if quantized is not None and config.quantization != "none":
        why = f"the checkpoint is quantized already (quant_method {quantized.get('quant_method')!r})"
        raise ConfigError(f"quantization {config.quantization}: {why}", field="quantization")
    if folder.is_file():
        module = _load_gguf(folder, hf_config, config, model_class)
    elif quantized is None and config.quantization == "none":
        module = _load_weights(folder, hf_config, config, architecture)
    else:
        kept = TensorFiles(files)
        module = _load_quantized(kept, folder, hf_config, config, model_class, quantized)
    if memory == device.memory:
        to_device(module, device, architecture)
    module = module.eval()
    module.requires_grad_(requires_grad=False)
    try:
        place_weights(module, memory, hold=hold)
    except ValueError as error:
        raise _not_loaded(error, folder, architecture) from error
    except torch.cuda.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device.memory)[0] / 2**20
        why = f"quantized weights of {architecture} do not fit {device.memory}, of which {free:.0f} MiB are left"
        raise ConfigError(why, field="device") from error
    return_free_memory()
    dtype = next((name for name, value in TORCH_DTYPES.items() if value == module.dtype), None)
    if dtype is None:
        raise ConfigError(f"weights of {architecture} are {module.dtype}; use --dtype", field="dtype")
    if device.is_interpreted and dtype == "bfloat16":
        raise ConfigError("device interpret has no right bfloat16: use --dtype float32", field="dtype")
    if dtype == "float16" and not device.on_gpu:
        log.warning("float16 is slow on a CPU: use --dtype bfloat16 or float32")
    text_config = module.config.get_text_config(decoder=True)
    eos_token_ids = _eos_token_ids(folder, text_config)
    return LoadedModel(
        module,
        text_config,
        architecture,
        folder,
        files,
        dtype,
        memory,
        eos_token_ids,
        identity=identity(config),
        rounds_inputs=rounds_inputs(module),
        compute=device,
        kept=kept,
    )


def to_device(module: Any, device: ComputeDevice, architecture: str) -> None:
    """Take a module's weights to the device, but for quantized ones.

    Raises:
        ConfigError: They do not fit; names ``device``.
    """
    if not device.is_cuda:
        return
    wanted = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    free = int(torch.cuda.mem_get_info(device.memory)[0])
    if wanted > free:
        raise ConfigError(
            f"weights of {architecture} take {wanted / 2**20:.0f} MiB, but only {free / 2**20:.0f} MiB are free on "
            f"{device.memory}",
            field="device",
        )
    module.to(device.memory)


def _model_config(folder: Path, raw: dict[str, Any]) -> Any:
    kind = raw.get("model_type")
    if not kind:
        raise ConfigError(f"{folder / 'config.json'} has no model_type", field="model")
    if raw.get("auto_map") and kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model type {kind!r} needs code from its repository, which Baton does not run", field="model"
        )
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"model type {kind!r} is not known to transformers {transformers.__version__}", field="model")
    try:
        if folder.is_file():  # GGUF
            return transformers.CONFIG_MAPPING[kind].from_dict(raw)
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{folder / 'config.json'} is not a valid {kind} configuration: {reason}", field="model"
        ) from error


def _model_class(hf_config: Any, raw: dict[str, Any]) -> Any:
    mapping: Any = AutoModelForCausalLM._model_mapping
    # Asked for this one alone: ``in mapping.keys()`` imports the code of every architecture that transformers knows.
    model_class = mapping.get(type(hf_config), None)
    if model_class is None:
        name = (raw.get("architectures") or [hf_config.model_type])[0]
        raise ConfigError(f"{name} is not a causal language model that transformers can generate with", field="model")
    name = model_class.__name__
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder: Baton serves decoders", field="model")
    reason = "it drafts for another model, over that one's KV" if hf_config.model_type in DRAFT_MODELS else ""
    reason = reason or unserved_layers(hf_config.get_text_config(decoder=True))
    if not reason and model_class._is_stateful:
        reason = "it keeps recurrent state outside the KV cache"
    if not reason and not model_class._supports_attention_backend:
        reason = "transformers does not let its attention function be replaced"
    if reason:
        raise ConfigError(f"{name} cannot be served: {reason}", field="model")
    return model_class


def _load_weights(folder: Path, hf_config: Any, config: EngineConfig, architecture: str) -> Any:
    dtype = "auto" if config.dtype == "auto" else TORCH_DTYPES[config.dtype]
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=hf_config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise _not_loaded(error, folder, architecture) from error
    module, info = loaded
    _check_complete(info, folder, architecture)
    return module


def _load_quantized(
    source: TensorFiles,
    folder: Path,
    hf_config: Any,
    config: EngineConfig,
    model_class: Any,
    quantized: dict[str, Any] | None,
) -> Any:
    """Load a checkpoint that is quantized, or that is to be."""
    for holder in (hf_config, hf_config.get_text_config(decoder=True)):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config  # or transformers would ask for packages that read it
    stored = quantized_at_load(config, source) if quantized is None else stored_weights(quantized, source)
    stored = with_activations(stored, config.quantized_activations)
    dtype = TORCH_DTYPES.get(config.dtype) or _stated_dtype(hf_config, source, stored)
    try:
        with quiet_transformers():
            module, info = load_quantized(model_class, hf_config, source, stored, dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise _not_loaded(error, folder, model_class.__name__) from error
    _check_complete(info, folder, model_class.__name__)
    return module


def _load_gguf(path: Path, hf_config: Any, config: EngineConfig, model_class: Any) -> Any:
    """Load a GGUF file, whose linear weights stay packed."""
    dtype = TORCH_DTYPES.get(config.dtype) or hf_config.dtype
    source = GgufSource(path, dtype)
    stored = source.stored()
    if config.quantization != "none":
        if stored:
            raise ConfigError(
                f"quantization {config.quantization}: the GGUF file is quantized already", field="quantization"
            )
        stored = quantized_at_load(config, source)
    stored = with_activations(stored, config.quantized_activations)
    try:
        with quiet_transformers():
            module, info = load_quantized(model_class, hf_config, source, stored, dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise _not_loaded(error, path, model_class.__name__) from error
    _check_complete(info, path, model_class.__name__)
    return module


def _stated_dtype(hf_config: Any, source: TensorFiles, stored: list[StoredWeight]) -> torch.dtype:
    """The dtype of what is not quantized: the configuration's, or that of the first such tensor."""
    stated = getattr(hf_config, "dtype", None) or getattr(hf_config.get_text_config(decoder=True), "dtype", None)
    if stated in TORCH_DTYPES.values():
        return cast(torch.dtype, stated)
    quantized = {name for weight in stored for name in weight.tensors}
    dtypes = (source.dtype(name) for name in source.names() if name not in quantized)
    return next((dtype for dtype in dtypes if dtype in TORCH_DTYPES.values()), torch.bfloat16)


def _not_loaded(error: Exception, folder: Path, architecture: str) -> ConfigError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigError(f"weights of {architecture} in {str(folder)!r} cannot be loaded: {reason}", field="model")


def _check_complete(info: dict[str, Any], folder: Path, architecture: str) -> None:
    """Refuse a checkpoint that lacks parameters, or has others."""
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            names = sorted(str(name) for name in info[kind])
            raise ConfigError(
                f"checkpoint {str(folder)!r} does not fit {architecture}: {len(names)} {kind.replace('_', ' ')}, "
                f"e.g. {names[0]}",
                field="model",
            )


def _eos_token_ids(folder: Path, text_config: Any) -> frozenset[int]:
    value = getattr(text_config, "eos_token_id", None)
    generation = GenerationConfig.from_dict(read_json(folder / "generation_config.json"))
    value = generation.eos_token_id if generation.eos_token_id is not None else value
    ids = frozenset([value] if isinstance(value, int) else value or ())
    unknown = sorted(i for i in ids if not 0 <= i < text_config.vocab_size)
    if unknown:  # no token is one of them, and a ban of them before ``min_tokens`` would hit another or none at all
        log.warning("eos_token_id has %s, of a vocabulary of %d: left out", unknown, text_config.vocab_size)
    return ids.difference(unknown)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and loading reports out of a service's log, and what it imports on the way."""
    logging_utils: Any = transformers.utils.logging
    bars, level = logging_utils.is_progress_bar_enabled(), logging_utils.get_verbosity()
    logging_utils.disable_progress_bar()
    logging_utils.set_verbosity_error()
    try:
        with quiet_imports():
            yield
    finally:
        logging_utils.set_verbosity(level)
        if bars:
            logging_utils.enable_progress_bar()
