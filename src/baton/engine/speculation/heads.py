"""Files of drafting heads, in the forms in which they are published: EAGLE's, EAGLE-3's and Medusa's."""

from __future__ import annotations

import copy
import hashlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.errors import ConfigError
from baton.tokenizer.model_files import model_directory, read_json
from baton_kernels.paged_attention import AttentionSpec, LayerPool, PagedAttention

_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
_PATTERNS = ["config.json", *_FILES]
FIELD = "speculative_model"


class HeadFiles:
    """The configuration and the tensors of a head.

    Args:
        config: ``speculative_model`` is the folder or hub repository.

    Attributes:
        settings: Content of ``config.json``.
        path: File of the weights, for errors.
        digest: SHA-256 of both, 32 hex digits of it.
        device: Device to load tensors to.

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

    def tensor(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor.

        Raises:
            ConfigError: It is missing, has another shape, or values that are no numbers.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self.path} has no {name}", field=FIELD)
        if tuple(tensor.shape) != shape:
            have = list(tensor.shape)
            want = list(shape)
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
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read: {reason}", field=FIELD) from error
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise ConfigError(f"{path} is not a table of tensors", field=FIELD)
    return path, tensors


def target_of(config: EngineConfig, executor: Executor) -> LoadedModel:
    """Return the model whose hidden states a head reads.

    Raises:
        ConfigError: It is divided among processes; names ``speculative``.
    """
    name = config.speculative
    model: LoadedModel | None = getattr(executor, "model", None)
    if config.tp * config.pp > 1 or model is None:
        raise ConfigError(f"speculative {name} works with tp 1 and pp 1 only", field="speculative")
    return model


FINAL = -1
"""Stands for the hidden states after the final norm, among those that are read."""


class EagleHead:
    """The layer, with the embedding and head that it shares with the target where it has none of its own.

    Args:
        files: Files of the head.
        model: The target.
        attention: Attention operator of the layer.
        third: Whether it is an EAGLE-3 head.

    Attributes:
        width: Elements of a hidden state.
        hidden_of: Layers of the target model whose hidden states the head reads.
        spec: Shape of the layer's attention.
        attention: As given.
        dtype: The target's, by name.

    Raises:
        ConfigError: It does not fit the target, or is damaged; names ``speculative_model``.
    """

    def __init__(self, files: HeadFiles, model: LoadedModel, attention: PagedAttention, *, third: bool) -> None:
        self.third = third
        self.dtype = model.dtype
        self.attention = attention
        self._dtype = TORCH_DTYPES[model.dtype]
        self.width = int(model.text_config.hidden_size)
        self._vocab_size = int(model.text_config.vocab_size)
        self._check(files)
        layers = int(model.text_config.num_hidden_layers)
        self.hidden_of: tuple[int, ...] = _layers_read(files, layers) if third else (FINAL,)
        config = _layer_config(files, self.width)
        heads = int(config.num_attention_heads)
        kv_heads = int(config.num_key_value_heads or config.num_attention_heads)
        self._dim = dim = int(config.head_dim or self.width // heads)
        self.spec = AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5)
        self._eps = float(config.rms_norm_eps)
        self._rotary: Any = LlamaRotaryEmbedding(config).to(model.device)
        at = "midlayer" if third else "layers.0"
        inputs = 2 * self.width if third else self.width

        def read_tensor(name: str, *shape: int) -> torch.Tensor:
            return files.tensor(name, *shape, dtype=self._dtype)

        def linear(name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            bias = read_tensor(f"{name}.bias", rows) if files.has(f"{name}.bias") else None
            return read_tensor(f"{name}.weight", rows, columns), bias

        self._fc = linear("fc", self.width, (3 if third else 2) * self.width)
        sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        self._qkv = [linear(f"{at}.self_attn.{part}_proj", rows, inputs) for part, rows in sizes.items()]
        self._out = linear(f"{at}.self_attn.o_proj", self.width, heads * dim)
        inner = int(config.intermediate_size)
        self._gate = linear(f"{at}.mlp.gate_proj", inner, self.width)
        self._up = linear(f"{at}.mlp.up_proj", inner, self.width)
        self._down = linear(f"{at}.mlp.down_proj", self.width, inner)
        self._mlp_norm = read_tensor(f"{at}.post_attention_layernorm.weight", self.width)
        self._norm = self._input_norm = self._hidden_norm = None
        if third:
            self._input_norm = read_tensor(f"{at}.input_layernorm.weight", self.width)
            self._hidden_norm = read_tensor(f"{at}.hidden_norm.weight", self.width)
            self._norm = read_tensor("norm.weight", self.width)
        own = "embed_tokens.weight"
        self._embedding: Any = model.module.get_input_embeddings()
        if files.has(own):
            weight = read_tensor(own, self._vocab_size, self.width)
            self._embedding = lambda tokens: F.embedding(tokens, weight)
        self._head: Any = model.module.get_output_embeddings()
        self._drafted: torch.Tensor | None = None
        if third:
            self._load_output_head(files)

    def _check(self, files: HeadFiles) -> None:
        for name, have in (("hidden_size", self.width), ("vocab_size", self._vocab_size)):
            if files.settings.get(name) != have:
                wrong = files.settings.get(name)
                where = files.path.parent / "config.json"
                raise ConfigError(f"{where}: {name} is {wrong!r}, the model's is {have}", field=FIELD)

    def _load_output_head(self, files: HeadFiles) -> None:
        """Take the head of a vocabulary of its own, and which tokens it means."""
        size = int(files.number("draft_vocab_size", self._vocab_size))
        head = files.tensor("lm_head.weight", size, self.width, dtype=self._dtype)
        self._head = lambda hidden: F.linear(hidden, head)
        if size == self._vocab_size and not files.has("d2t"):
            return
        drafted = torch.arange(size, device=files.device) + files.tensor("d2t", size, dtype=torch.int64)
        if bool(((drafted < 0) | (drafted >= self._vocab_size)).any()):
            raise ConfigError(f"{files.path}: d2t leads out of the vocabulary of {self._vocab_size}", field=FIELD)
        self._drafted = drafted

    def join(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not self.third:
            return hidden[0]
        return F.linear(torch.cat([each.to(self._dtype) for each in hidden], dim=-1), *self._fc)

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: Any, pool: LayerPool
    ) -> torch.Tensor:
        embedded = self._embedding(tokens).to(self._dtype)
        if self.third:
            residual = hidden
            inner = torch.cat([self._rms(embedded, self._input_norm), self._rms(hidden, self._hidden_norm)], dim=-1)
        else:
            residual = inner = F.linear(torch.cat([embedded, hidden.to(self._dtype)], dim=-1), *self._fc)
        q, k, v = (F.linear(inner, *part).view(len(tokens), -1, self._dim) for part in self._qkv)
        cos, sin = self._rotary(embedded, positions[None])
        q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        q = q[0].transpose(0, 1).contiguous()
        k = k[0].transpose(0, 1).contiguous()
        out = self.attention.run(plan, self.spec, pool, q, k, v.contiguous())
        hidden = residual + F.linear(out.reshape(len(tokens), -1), *self._out)
        inner = self._rms(hidden, self._mlp_norm)
        gated = F.silu(F.linear(inner, *self._gate)) * F.linear(inner, *self._up)
        return hidden + F.linear(gated, *self._down)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden if self._norm is None else self._rms(hidden, self._norm))
        if self._drafted is None:
            return logits.float()
        whole = torch.full((len(hidden), self._vocab_size), -torch.inf, device=hidden.device)
        whole[:, self._drafted] = logits.float()
        return whole

    def _rms(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x, (self.width,), weight, self._eps)


def _layer_config(files: HeadFiles, width: int) -> LlamaConfig:
    """Return the layer's sizes and rotary embedding."""
    raw = copy.deepcopy(files.settings)
    for name in ("num_attention_heads", "intermediate_size"):
        files.number(name)
    heads = int(files.number("num_attention_heads"))
    kv_heads = int(files.number("num_key_value_heads", heads))
    dim = int(files.number("head_dim", width // heads))
    if heads % kv_heads or dim % 2:
        where = files.path.parent / "config.json"
        raise ConfigError(f"{where}: {heads} heads of {dim} do not go with {kv_heads} KV heads", field=FIELD)
    raw |= {"model_type": "llama", "head_dim": dim, "num_key_value_heads": kv_heads, "num_hidden_layers": 1}
    try:
        return LlamaConfig(**{name: value for name, value in raw.items() if name != "architectures"})
    except Exception as error:  # of transformers' validation, which has many kinds
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{files.path.parent / 'config.json'}: {reason}", field=FIELD) from error


def _layers_read(files: HeadFiles, layers: int) -> tuple[int, ...]:
    """Return which layers' inputs an EAGLE-3 head reads: as it says, or a low, the middle and a high one."""
    eagle = files.settings.get("eagle_config")
    given = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    layer_ids: tuple[Any, ...] = (min(2, layers - 1), layers // 2, max(layers - 3, 0))
    if isinstance(given, list | tuple):
        layer_ids = tuple(given)
    if len(layer_ids) != 3 or not all(isinstance(each, int) and 0 <= each < layers for each in layer_ids):
        where = files.path.parent / "config.json"
        raise ConfigError(f"{where}: reads layers {list(layer_ids)} of a model of {layers}", field=FIELD)
    return layer_ids
