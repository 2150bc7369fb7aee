"""Next-token-prediction layers of checkpoints (MTP), loaded as a model of one layer.

Such a layer continues the model's hidden states: it takes the embedding of the next token and the hidden state after
the final norm, norms both, projects them side by side to one state, and puts that through a decoder layer of the
model's own kind and a norm; embedding and head are the model's (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
section 2.2). transformers ignores these tensors. Here they become a model of the same class with one layer, so that its
quantized weights, latents, windows and experts are read and run as those of all other layers.

Of several such layers (one for each further token) the first is used.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from baton.config import EngineConfig
from baton.engine.models.checkpoint import TensorFiles
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel, load_quantized, quiet_transformers
from baton.engine.quantization.checkpoint import find_quantized_weights, quantization_config
from baton.engine.quantization.modules import place_weights
from baton.errors import ConfigError
from baton.tokenizer.model_files import read_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NextTokenNames:
    """Names of a next-token layer's modules in a family's checkpoints; ``{n}`` is the model's number of layers.

    Attributes:
        layer: Prefix of the names of the decoder layer's parameters.
        embedding_norm: Name of the norm of the embedding.
        hidden_norm: Name of the norm of the hidden state.
        projection: Name of the projection of both.
        final_norm: Name of the norm behind the layer; empty: it has none.
        attention: Type of the layer's attention in families with several, if the config has no ``mtp_layer_types``.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    attention: str = "full_attention"


def _named_inside(layer: str, final_norm: str, attention: str = "full_attention") -> NextTokenNames:
    names = [f"{layer}.{part}" for part in ("enorm", "hnorm", "eh_proj", final_norm)]
    return NextTokenNames(layer, names[0], names[1], names[2], names[3], attention)


_DEEPSEEK = _named_inside("model.layers.{n}", "shared_head.norm")
_BESIDE = NextTokenNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
NEXT_TOKEN_NAMES = {
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5_moe": NextTokenNames(
        "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", ""
    ),
    "exaone_moe": _BESIDE,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "hy_v3": _named_inside("model.layers.{n}", "final_layernorm"),
    "mellum": _BESIDE,
    "mimo_v2_flash": _named_inside("model.mtp.layers.0", "final_layernorm", "sliding_attention"),
}
"""Names by model type, for the served types whose public checkpoints have such layers."""
_RENAMED = {"mimo_v2_flash": {"pre_mlp_layernorm": "post_attention_layernorm"}}
"""Modules of a next-token layer that have another name than in the other layers: its name, the usual name."""
_LAYER = "model.layers.0."
_FINAL_NORM = "model.norm.weight"
"""Names in the model of one layer."""
_FEW_TOKENS = 8
"""Vocabulary of the model of one layer, whose embedding and head are replaced."""


class _GivenInputs(nn.Module):
    """Replaces the embedding: returns the projected inputs, whatever the tokens are."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs: torch.Tensor | None = None
        self._width = width
        self._dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` [T, width] as [1, T, width]; zeros if none are set."""
        if self.inputs is None:
            return torch.zeros(*tokens.shape, self._width, dtype=self._dtype)
        return self.inputs.view(*tokens.shape, self._width)


class NextTokenModel:
    """A next-token layer with the norms and the projection before it.

    Attributes:
        model: The model of one layer, whose "logits" are its hidden states after the final norm.
    """

    def __init__(
        self, model: LoadedModel, norms: tuple[torch.Tensor, torch.Tensor], projection: torch.Tensor, eps: float
    ) -> None:
        self.model = model
        self._norms = norms
        self._eps = eps
        self._width = len(projection)
        self._dtype = projection.dtype
        # A part of the model, so that it is packed with the others.
        model.module.next_token_projection = _make_linear(projection)
        self._inputs = _GivenInputs(self._width, self._dtype)
        model.module.set_input_embeddings(self._inputs)
        model.module.set_output_embeddings(nn.Identity())

    def set_inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> None:
        """Set the inputs of the layer's next forward: embeddings and hidden states, both [T, width]."""
        pairs = zip((embedded, hidden), self._norms, strict=True)
        both = [F.rms_norm(each.to(self._dtype), (self._width,), norm, self._eps) for each, norm in pairs]
        self._inputs.inputs = self.model.module.next_token_projection(torch.cat(both, dim=-1))


def _make_linear(weight: torch.Tensor) -> nn.Linear:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def load_next_token(config: EngineConfig, target: LoadedModel) -> NextTokenModel:
    """Load the first next-token layer of a model's checkpoint.

    Args:
        config: The engine's configuration.
        target: The whole model.

    Raises:
        ConfigError: The model's type has no known next-token layers, or its checkpoint has none (names
            ``speculative``); or they are damaged (names ``model``).
    """
    kind = str(target.text_config.model_type)
    text = target.text_config
    names = NEXT_TOKEN_NAMES.get(kind)
    if names is None:
        known = ", ".join(sorted(NEXT_TOKEN_NAMES))
        why = f"models of type {kind} have no next-token layers that Baton knows (types that have: {known})"
        raise ConfigError(f"speculative mtp: {why}", field="speculative")
    if target.folder.is_file():
        raise ConfigError(
            "speculative mtp reads next-token layers of safetensors files, not of GGUF", field="speculative"
        )
    names = NextTokenNames(*(value.replace("{n}", str(text.num_hidden_layers)) for value in dataclasses.astuple(names)))
    files = TensorFiles(target.files)
    layer = [name for name in files.names() if name.startswith(f"{names.layer}.")]
    beside = [f"{name}.weight" for name in (names.embedding_norm, names.hidden_norm, names.projection)]
    lacking = [name for name in beside if name not in files] + ([] if layer else [f"{names.layer}.*"])
    if lacking:  # many checkpoints are published without these layers
        why = f"{str(target.folder)!r} has no {lacking[0]}: without next-token layers it cannot draft for itself"
        raise ConfigError(f"speculative mtp: checkpoint {why}", field="speculative")
    shapes = ((text.hidden_size,), (text.hidden_size,), (text.hidden_size, 2 * text.hidden_size))
    dtype = TORCH_DTYPES[target.dtype]
    norms = [_read_tensor(files, name, shape, dtype) for name, shape in zip(beside, shapes, strict=True)]
    model = _load_one_layer(config, target, files, names, _one_layer_config(target, names, layer))
    _check_finite(model, names)
    return NextTokenModel(model, (norms[0], norms[1]), norms[2], float(text.rms_norm_eps))


def _read_tensor(files: TensorFiles, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if files.shape(name) != shape:
        why = f"must be {list(shape)}, is {list(files.shape(name))}"
        raise ConfigError(f"{files.file_of(name)}: {name}: {why}", field="model")
    if files.dtype(name) not in TORCH_DTYPES.values():
        why = f"is {str(files.dtype(name)).removeprefix('torch.')}, only {', '.join(TORCH_DTYPES)} are read"
        raise ConfigError(f"{files.file_of(name)}: {name}: {why}", field="model")
    tensor = files.read(name).to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"{files.file_of(name)}: {name} has values that are not finite", field="model")
    return tensor


def _own_name(kind: str, names: NextTokenNames, name: str) -> str | None:
    """Return the name of a checkpoint's tensor in the model of one layer; ``None``: the model has no such tensor."""
    if names.final_norm and name == f"{names.final_norm}.weight":
        return _FINAL_NORM
    inner = name.removeprefix(f"{names.layer}.")
    apart = {names.embedding_norm, names.hidden_norm, names.projection}
    # Embedding and head are copies of the model's own.
    if inner == name or name.rpartition(".")[0] in apart or inner.startswith(("embed_tokens.", "shared_head.")):
        return None
    for special_name, usual_name in _RENAMED.get(kind, {}).items():
        inner = inner.replace(special_name, usual_name)
    return _LAYER + inner


def _checkpoint_name(names: NextTokenNames, name: str) -> str:
    """Return the name in the checkpoint of a parameter of the model of one layer, except for joined experts."""
    return f"{names.final_norm}.weight" if name == _FINAL_NORM else name.replace(_LAYER, f"{names.layer}.")


def _one_layer_config(target: LoadedModel, names: NextTokenNames, layer: list[str]) -> Any:
    """Return the model's configuration with one layer, sparse or dense as the tensors ``layer``."""
    config = copy.deepcopy(target.text_config)
    sparse = any(f"{names.layer}.mlp.experts." in name for name in layer)
    config.num_hidden_layers = 1
    config.vocab_size = _FEW_TOKENS
    config.pad_token_id = None
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        stated = getattr(config, "mtp_layer_types", None)
        config.layer_types = [stated[0] if stated else names.attention]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse" if sparse else "dense"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0 if sparse else 1
    if hasattr(config, "moe_layer_start_index"):  # Ernie 4.5
        config.moe_layer_start_index, config.moe_layer_end_index = (0, 0) if sparse else (1, 1)
        config.moe_layer_interval = 1
    return config


def _load_one_layer(
    config: EngineConfig,
    target: LoadedModel,
    files: TensorFiles,
    names: NextTokenNames,
    one_layer: Any,
) -> LoadedModel:
    name_of = partial(_own_name, str(target.text_config.model_type), names)
    own = {own_name: name for name in files.names() if (own_name := name_of(name)) is not None}
    quantized = quantization_config(read_json(target.folder / "config.json"))
    stored = [
        dataclasses.replace(weight, parameter=name, tensors=tuple(name_of(each) or each for each in weight.tensors))
        for weight in find_quantized_weights(config, quantized, files)
        if (name := name_of(weight.parameter)) is not None
    ]
    if hasattr(one_layer, "quantization_config"):
        del one_layer.quantization_config  # or transformers would ask for packages that read it
    dtype = TORCH_DTYPES[target.dtype]
    try:
        with quiet_transformers():
            module, info = load_quantized(type(target.module), one_layer, files.renamed(own), stored, dtype)
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        why = f"next-token layer of {str(target.folder)!r} cannot be loaded: {reason}"
        raise ConfigError(f"speculative mtp: {why}", field="model") from error
    needless = {"model.embed_tokens.weight", "lm_head.weight"} | (set() if names.final_norm else {_FINAL_NORM})
    for kind in ("missing", "mismatched"):
        wrong = sorted({str(name) for name in info.get(f"{kind}_keys") or ()} - needless)
        if wrong:
            why = (
                f"{kind} tensors of its next-token layer: {', '.join(_checkpoint_name(names, name) for name in wrong)}"
            )
            raise ConfigError(f"checkpoint {str(target.folder)!r}: {why:.300}", field="model")
    if not names.final_norm:
        module.base_model.norm = nn.Identity()
    module = module.to(target.device).eval()
    module.requires_grad_(requires_grad=False)
    place_weights(module, target.device)
    return dataclasses.replace(target, module=module, text_config=module.config)


def _check_finite(model: LoadedModel, names: NextTokenNames) -> None:
    for name, parameter in model.module.named_parameters():
        inside = name.startswith(_LAYER) or name == _FINAL_NORM
        if inside and parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            why = f"{_checkpoint_name(names, name)} has values that are not finite"
            raise ConfigError(f"checkpoint {str(model.folder)!r}: {why}", field="model")
