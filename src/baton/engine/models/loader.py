"""Loads a model for the engine and refuses, with one clear line, what Baton could only run wrongly.

Weights are safetensors files, which are checked to be whole before transformers reads them, or a GGUF file.

A model with quantized weights is made on ``meta``. Its linear layers and experts whose weights are quantized are
replaced there, transformers loads what is left, and the quantized weights are read one by one when they are asked for
(:meth:`.ReloadableWeight.load`): at no time is there a plain copy of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from baton.allocator import return_free_memory
from baton.config import EngineConfig
from baton.engine.device import ComputeDevice, rank_device
from baton.engine.models.checkpoint import TensorFiles
from baton.engine.models.layer_operators import gated_activation, knows_experts
from baton.engine.models.quirks import DRAFT_MODELS, LATENT_PROJECTION, has_interleaved_experts, unserved_layers
from baton.engine.models.recurrent import keeps_known_states
from baton.engine.quantization.base import StoredWeight, TensorSource, need_shape, tensor_error
from baton.engine.quantization.checkpoint import (
    apply_activations,
    find_quantized_weights,
    quantization_config,
    quantization_identity,
)
from baton.engine.quantization.formats.gguf import GgufSource
from baton.engine.quantization.modules import (
    QuantizedExpertsModule,
    QuantizedModule,
    ReadWeight,
    deinterleave_rows,
    place_weights,
    rounds_inputs,
)
from baton.errors import ConfigError
from baton.logs import quiet_imports
from baton.tokenizer.model_files import check_model_config, model_directory, read_eos_token_ids, read_json
from baton.tokenizer.weight_files import WeightFile, weight_files
from baton_kernels.quantization import ActivationScheme, QuantizedWeight, join_weights

log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode.

    Attributes:
        module: transformers' model.
        text_config: transformers' configuration of the text model.
        architecture: Name of the model's class.
        folder: The checkpoint's folder, or GGUF file.
        files: The checkpoint's files of weights.
        dtype: Name of the dtype of plain weights, a key of ``TORCH_DTYPES``.
        device: Device of the weights.
        eos_token_ids: Tokens that end a sequence.
        identity: Identity of quantization at load and of other activations than the checkpoint's; empty: none.
        rounds_inputs: Whether inputs of some layers are rounded to 8 bits.
        compute: Device that runs the model; its memory is ``device``, unless the model is to be divided first.
        mapped_files: Files whose pages hold the plain weights of a quantized model; they need not be in memory where
            operators have copies. ``None``: weights are not mapped.
    """

    module: Any
    text_config: Any
    architecture: str
    folder: Path
    files: list[WeightFile]
    dtype: str
    device: torch.device
    eos_token_ids: frozenset[int]
    identity: str = ""
    rounds_inputs: bool = False
    compute: ComputeDevice = ComputeDevice(torch.device("cpu"), on_gpu=False)  # noqa: RUF009 - it is frozen
    mapped_files: TensorFiles | None = None


def load_model(config: EngineConfig, *, in_memory: bool = True, rank: int = 0) -> LoadedModel:
    """Load a decoder-only model whose attention can be replaced.

    Args:
        config: The engine's configuration.
        in_memory: Whether quantized weights are read into memory now; else they are read whenever they are used.
        rank: Rank whose device the model, or a part of it, is for; a model that is to be divided stays in host memory.

    Raises:
        ConfigError: The model is missing or damaged, its architecture is unknown or cannot be served, or the device
            does not exist.
    """
    ranks = config.tp * config.pp
    device = rank_device(config.device, rank, ranks)
    device.enter()
    memory = device.memory if ranks == 1 else torch.device("cpu")
    folder = model_directory(config.model, HUB_PATTERNS)
    raw = read_json(folder / "config.json")
    if not raw:
        raise ConfigError(f"model folder {str(folder)!r} has no config.json", field="model")
    check_model_config(folder / "config.json", raw)
    hf_config = _model_config(folder, raw)
    model_class = _model_class(hf_config, raw)
    architecture = model_class.__name__
    files = weight_files(folder)
    quantized = quantization_config(raw)
    mapped_files = None
    if quantized is not None and config.quantization != "none":
        why = f"the checkpoint is quantized already (quant_method {quantized.get('quant_method')!r})"
        raise ConfigError(f"quantization {config.quantization}: {why}", field="quantization")
    if folder.is_file():
        module = _load_gguf(folder, hf_config, config, model_class)
    elif quantized is None and config.quantization == "none":
        module = _load_weights(folder, hf_config, config, architecture)
    else:
        mapped_files = TensorFiles(files)
        module = _load_quantized(mapped_files, folder, hf_config, config, model_class, quantized)
    if memory == device.memory:
        to_device(module, device, architecture)
    module = module.eval()
    module.requires_grad_(requires_grad=False)
    try:
        place_weights(module, memory, in_memory=in_memory)
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
        identity=quantization_identity(config),
        rounds_inputs=rounds_inputs(module),
        compute=device,
        mapped_files=mapped_files,
    )


def to_device(module: Any, device: ComputeDevice, architecture: str) -> None:
    """Move a module's weights to the device, except for quantized ones.

    Raises:
        ConfigError: The weights do not fit; names ``device``.
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
    # ``in mapping.keys()`` would import the code of every architecture that transformers knows.
    model_class = mapping.get(type(hf_config), None)
    if model_class is None:
        name = (raw.get("architectures") or [hf_config.model_type])[0]
        raise ConfigError(f"{name} is not a causal language model that transformers can generate with", field="model")
    name = model_class.__name__
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder: Baton serves decoders", field="model")
    reason = "it drafts for another model, over that one's KV" if hf_config.model_type in DRAFT_MODELS else ""
    reason = reason or unserved_layers(hf_config.get_text_config(decoder=True))
    if not reason and model_class._is_stateful and not keeps_known_states(model_class):
        reason = "it keeps recurrent state outside the KV cache"
    if not reason and not (model_class._supports_attention_backend or model_class._is_stateful):
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
    """Load a checkpoint that is quantized, or that is to be quantized."""
    for holder in (hf_config, hf_config.get_text_config(decoder=True)):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config  # or transformers would ask for packages that read it
    stored = find_quantized_weights(config, quantized, source)
    dtype = TORCH_DTYPES.get(config.dtype) or _plain_dtype(hf_config, source, stored)
    return _load_stored(folder, hf_config, model_class, source, stored, dtype)


def _load_gguf(path: Path, hf_config: Any, config: EngineConfig, model_class: Any) -> Any:
    """Load a GGUF file, whose linear weights stay packed."""
    dtype = TORCH_DTYPES.get(config.dtype) or hf_config.dtype
    source = GgufSource(path, dtype)
    stored = source.stored_weights()
    if not stored:
        stored = find_quantized_weights(config, None, source)
    elif config.quantization == "none":
        stored = apply_activations(stored, config.quantized_activations)
    else:
        why = "the GGUF file is quantized already"
        raise ConfigError(f"quantization {config.quantization}: {why}", field="quantization")
    return _load_stored(path, hf_config, model_class, source, stored, dtype)


def _load_stored(
    path: Path,
    hf_config: Any,
    model_class: Any,
    source: TensorSource,
    stored: list[StoredWeight],
    dtype: torch.dtype,
) -> Any:
    """Load a model with the quantized weights ``stored``; its other parameters are of ``dtype``."""
    try:
        with quiet_transformers():
            module, info = load_quantized(model_class, hf_config, source, stored, dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise _not_loaded(error, path, model_class.__name__) from error
    _check_complete(info, path, model_class.__name__)
    return module


def _plain_dtype(hf_config: Any, source: TensorFiles, stored: list[StoredWeight]) -> torch.dtype:
    """Return the dtype of parameters that are not quantized: the configuration's, or that of the first of them."""
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
    """Refuse a checkpoint that lacks parameters, or has parameters of other shapes."""
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
    ids = read_eos_token_ids(folder / "generation_config.json")
    ids = ids or frozenset([value] if isinstance(value, int) else value or ())
    unknown = sorted(i for i in ids if not 0 <= i < text_config.vocab_size)
    if unknown:  # no such token is ever sampled, and to ban it before ``min_tokens`` would hit another token or none
        log.warning("eos_token_id has %s, of a vocabulary of %d: left out", unknown, text_config.vocab_size)
    return ids.difference(unknown)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars, loading reports and import warnings out of a service's log."""
    logging_utils: Any = transformers.utils.logging
    bars = logging_utils.is_progress_bar_enabled()
    level = logging_utils.get_verbosity()
    logging_utils.disable_progress_bar()
    logging_utils.set_verbosity_error()
    try:
        with quiet_imports():
            yield
    finally:
        logging_utils.set_verbosity(level)
        if bars:
            logging_utils.enable_progress_bar()


# Quantized weights


READ_BY_OTHERS = {LATENT_PROJECTION, "gate", "router", "dt_proj"}
"""Layers whose plain weight other code reads: MLA's projection, which becomes a part of attention, routers, and the
step sizes of Mamba."""
GATE_UP = "gate_up_proj"
DOWN = "down_proj"


class LazyTensor:
    """A tensor that is read when transformers uses it, by ``tensor[...]``."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read()


def load_quantized(
    model_class: Any, config: Any, source: TensorSource, stored: list[StoredWeight], dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """Load a model with quantized weights.

    Args:
        model_class: transformers' class.
        config: The model's configuration, without ``quantization_config``.
        source: The checkpoint's tensors.
        stored: The weights that are quantized, or are to be quantized.
        dtype: Dtype of all other weights, and of activations.

    Returns:
        The model, with none of its quantized weights in memory, and transformers' loading info about the other weights.

    Raises:
        ConfigError: A weight does not fit the model.
    """
    plain: dict[str, Any] = {}
    if model_class.config_class is config.sub_configs.get("text_config"):  # the text model of a composite checkpoint
        config = config.get_text_config()

    def place(model: Any) -> None:
        with torch.device("cpu"):
            plain.update(_QuantizedModules(model, source, stored, dtype).fill())

    loading: Any = _class_with_hook(model_class, place)
    module, info = loading.from_pretrained(
        None,
        config=config,
        state_dict=plain,  # filled while the model is made
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    module.__class__ = model_class
    return module, info


def _class_with_hook(model_class: Any, place: Callable[[Any], None]) -> type:
    """Return a subclass, under the same name, whose ``__init__`` ends with a call of ``place`` with the instance."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        place(self)

    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


@dataclasses.dataclass(slots=True)
class _Experts:
    """The quantized weights of one module of experts.

    Attributes:
        slots: Per parameter, the number of weights that an expert's weight is joined of, such as gate and up.
        weights: Per parameter, expert and slot, the stored weight and the expert's index in it.
    """

    slots: dict[str, int] = dataclasses.field(default_factory=dict)
    weights: dict[tuple[str, int, int], tuple[StoredWeight, int]] = dataclasses.field(default_factory=dict)

    def parts(self, parameter: str, count: int) -> list[list[tuple[StoredWeight, int]]] | None:
        """Return, per expert, the weights that its parameter is joined of; ``None``: one is missing."""
        slots = self.slots.get(parameter, 0)
        keys = [[(parameter, expert, slot) for slot in range(slots)] for expert in range(count)]
        if not slots or any(key not in self.weights for row in keys for key in row):
            return None
        return [[self.weights[key] for key in row] for row in keys]


class _QuantizedModules:
    """Puts the quantized weights of a checkpoint into a model: replaces its linear layers and experts."""

    def __init__(self, model: Any, source: TensorSource, stored: list[StoredWeight], dtype: torch.dtype) -> None:
        self._model = model
        self._source = source
        self._stored = stored
        self._dtype = dtype
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state = model.state_dict()
        self._tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        self._experts: dict[str, _Experts] = {}
        self._plain: list[StoredWeight] = []
        self._placed: list[StoredWeight] = []

    def fill(self) -> dict[str, Any]:
        """Replace modules; return the tensors that are or have to be plain, by the checkpoint's names."""
        for weight in self._stored:
            if not self._place(weight):
                self._load_plain(weight)
        for path, experts in self._experts.items():
            self._place_experts(path, experts)
        consumed = {name for weight in (*self._placed, *self._plain) for name in weight.tensors}
        for name in self._source.names():
            if name not in consumed and name in self._state:
                need_shape(self._source, name, tuple(self._state[name].shape))
        plain: dict[str, Any] = {
            name: LazyTensor(partial(self._source.read_or_map, name))
            for name in self._source.names()
            if name not in consumed
        }
        plain.update({weight.parameter: LazyTensor(partial(self._dequantized, weight)) for weight in self._plain})
        return plain

    def _target(self, name: str) -> tuple[str, str | None]:
        """Return the model's parameter for a checkpoint's tensor, and the pattern of the converter that makes it."""
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._state)
        if target not in self._state and name in self._state:
            return name, None
        return target, pattern

    def _place(self, weight: StoredWeight) -> bool:
        """Replace the module that a weight belongs to; return whether the model has one."""
        target, pattern = self._target(weight.parameter)
        path, _, leaf = target.rpartition(".")
        if target not in self._state or target in self._tied:
            return False
        module = self._model.get_submodule(path)
        if pattern is None and type(module) is nn.Linear and leaf == "weight" and not weight.experts:
            if path.rpartition(".")[2] in READ_BY_OTHERS:
                return False
            self._check_shape(weight, (module.out_features, module.in_features))
            self._model.set_submodule(path, QuantizedModule(partial(weight.read, 0), module, weight.activations))
            self._placed.append(weight)
            return True
        if leaf in {GATE_UP, DOWN} and knows_experts(module):
            return self._collect(weight, module, path, leaf, pattern)
        return False

    def _collect(self, weight: StoredWeight, module: Any, path: str, leaf: str, pattern: str | None) -> bool:
        """Collect a weight of one expert, or of all; return whether it is a weight of experts."""
        count, inner, hidden = _sizes(module)
        rows, columns = (2 * inner, hidden) if leaf == GATE_UP else (hidden, inner)
        if weight.optional and has_interleaved_experts(module):  # plain ones are transposed
            return False
        experts = self._experts.setdefault(path, _Experts())
        if pattern is None:
            if weight.experts != count:
                why = f"has {weight.experts} experts, the model {count}"
                raise tensor_error(self._source, weight.tensors[0], why)
            self._check_shape(weight, (rows, columns))
            experts.slots[leaf] = 1
            experts.weights.update({(leaf, expert, 0): (weight, expert) for expert in range(count)})
            return True
        converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
        slots = len(converter.source_patterns)
        number = re.search(r"experts\.(\d+)\.", weight.parameter)
        merges = [type(operation) for operation in converter.operations]
        if number is None or merges not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            return False
        self._check_shape(weight, (rows // slots, columns))
        experts.slots[leaf] = slots
        experts.weights[leaf, int(number[1]), converter.source_patterns.index(pattern)] = (weight, 0)
        return True

    def _place_experts(self, path: str, experts: _Experts) -> None:
        module: Any = self._model.get_submodule(path)
        count, inner, _ = _sizes(module)
        parts_of = [experts.parts(leaf, count) for leaf in (GATE_UP, DOWN)]
        activation = gated_activation(module)
        weights = list({id(weight): weight for weight, _ in experts.weights.values()}.values())
        if None in parts_of or activation is None:
            for weight in weights:
                self._load_plain(weight)
            return
        self._placed += weights
        interleaved = has_interleaved_experts(module)
        biases = (module.gate_up_proj_bias, module.down_proj_bias) if interleaved else None
        gate_up, down = ([_read_joined(parts) for parts in rows or ()] for rows in parts_of)
        if interleaved:
            gate_up = [_read_changed(read, deinterleave_rows) for read in gate_up]
        schemes = [_one_scheme(weight.activations for parts in rows or () for weight, _ in parts) for rows in parts_of]
        replacement = QuantizedExpertsModule(
            gate_up, down, inner, activation, (schemes[0], schemes[1]), biases, interleaved=interleaved
        )
        self._model.set_submodule(path, replacement)

    def _load_plain(self, weight: StoredWeight) -> None:
        """Have a weight dequantized at load, for the model has no layer for it that Baton could replace."""
        if weight.optional:
            return
        log.info("%s is dequantized: a plain weight is needed there", weight.parameter)
        self._plain.append(weight)

    def _dequantized(self, weight: StoredWeight) -> torch.Tensor:
        if not weight.experts:
            return weight.read(0).dequantize(self._dtype)
        stack = torch.stack([weight.read(expert).dequantize(self._dtype) for expert in range(weight.experts)])
        experts = self._model.get_submodule(self._target(weight.parameter)[0].rpartition(".")[0])
        return stack.mT.contiguous() if getattr(experts, "is_transposed", False) else stack

    def _check_shape(self, weight: StoredWeight, shape: tuple[int, int]) -> None:
        if weight.shape != shape:
            why = f"is of a weight {list(weight.shape)}, the model has {list(shape)}"
            raise tensor_error(self._source, weight.tensors[0], why)


def _sizes(experts: Any) -> tuple[int, int, int]:
    """Return the number of experts, the inner size and the hidden size of a module of experts."""
    count, first, second = experts.down_proj.shape
    return (count, first, second) if has_interleaved_experts(experts) else (count, second, first)


def _read_joined(parts: list[tuple[StoredWeight, int]]) -> ReadWeight:
    def read() -> QuantizedWeight:
        weights = [weight.read(expert) for weight, expert in parts]
        try:
            return weights[0] if len(weights) == 1 else join_weights(weights)
        except ValueError as error:
            names = " and ".join(weight.parameter for weight, _ in parts)
            raise ConfigError(f"{names}: {error}", field="model") from error

    return read


def _read_changed(read: ReadWeight, change: Callable[[QuantizedWeight], QuantizedWeight]) -> ReadWeight:
    def changed() -> QuantizedWeight:
        return change(read())

    return changed


def _one_scheme(schemes: Iterable[ActivationScheme]) -> ActivationScheme:
    """Return how the inputs of all experts are rounded: with the largest of their static scales."""
    return max(schemes, key=lambda scheme: scheme.scale or 0.0)
