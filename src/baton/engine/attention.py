"""Attention backends by name, and Baton's C++ operators, which one of them needs.

A backend is a :class:`~baton_kernels.paged_attention.PagedAttention` and a factory for it. Another package registers
its factory in the entry point group ``baton.attention_backends``::

    [project.entry-points."baton.attention_backends"]
    flash = "my_package.attention:make_attention"

and ``--attention-backend flash`` uses it. Whatever is chosen has to pass the self-check at load.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.plugins import PluginGroup
from baton_kernels.cpu import CpuLibrary, OperatorsMissingError, load_library, runnable_variants
from baton_kernels.paged_attention import AttentionSpec, CpuPagedAttention, PagedAttention, TorchPagedAttention

log = logging.getLogger(__name__)

BUILT_IN = {
    "cpp": "baton.engine.attention:cpp_attention",
    "torch": "baton.engine.attention:torch_attention",
    "triton": "baton.engine.attention:triton_attention",
    "flashinfer": "baton.engine.attention:flashinfer_attention",
}
"""Built-in factories: a new one is a function and a line here."""
ATTENTION_BACKENDS = PluginGroup("attention_backend", "baton.attention_backends", BUILT_IN)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a backend may use.

    Attributes:
        device: Device of the model.
        operators: Baton's C++ operators, if they can be used.
        on_gpu: Whether the operators of GPUs run the model: on a GPU, or in Triton's interpreter.
        dtype: Dtype of the model's activations.
        specs: Attention of each layer.
    """

    device: torch.device
    operators: CpuLibrary | None
    on_gpu: bool = False
    dtype: torch.dtype = torch.float32
    specs: tuple[AttentionSpec, ...] = ()


AttentionFactory = Callable[[AttentionContext], PagedAttention]
"""Makes a backend.

Raises:
    ConfigError: It cannot be used here; names ``attention_backend``.
"""


def cpp_attention(context: AttentionContext) -> PagedAttention:
    if context.operators is None:
        raise ConfigError("attention_backend cpp cannot be used: no C++ operators", field="attention_backend")
    return CpuPagedAttention(context.operators)


def torch_attention(context: AttentionContext) -> PagedAttention:
    return TorchPagedAttention()


def triton_attention(context: AttentionContext) -> PagedAttention:
    try:
        from baton_kernels.gpu import is_interpreted
        from baton_kernels.paged_attention.gpu import TritonPagedAttention
    except ImportError as error:
        raise ConfigError(f"attention_backend triton cannot be used: {error}", field="attention_backend") from error
    if context.device.type == "cpu" and not is_interpreted():
        raise ConfigError("attention_backend triton needs a GPU, not device cpu", field="attention_backend")
    return TritonPagedAttention(context.device)


def flashinfer_attention(context: AttentionContext) -> PagedAttention:
    """Return FlashInfer, over Triton's kernels for what it does not do; the log says in how many layers that is."""
    library = _flashinfer(context)
    from baton_kernels.paged_attention.flashinfer import FlashInferPagedAttention, obstacle

    reasons = Counter(filter(None, (obstacle(spec, context.dtype) for spec in context.specs)))
    if context.specs and reasons.total() == len(context.specs):
        why = " and ".join(reasons)
        raise ConfigError(f"attention_backend flashinfer does not do {why}: use triton", field="attention_backend")
    for reason, count in reasons.items():
        log.warning(
            "attention in %d of %d layers by triton: flashinfer does not do %s", count, len(context.specs), reason
        )
    return FlashInferPagedAttention(context.device, library)


def _flashinfer(context: AttentionContext) -> ModuleType:
    """Import FlashInfer.

    Raises:
        ConfigError: It is not installed, or the device is none of its; names ``attention_backend``.
    """
    if context.device.type != "cuda":
        where = "interpret" if context.on_gpu else context.device.type
        raise ConfigError(f"attention_backend flashinfer needs a GPU, not device {where}", field="attention_backend")
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"attention_backend flashinfer needs FlashInfer ({error}): pip install flashinfer-python",
            field="attention_backend",
        ) from error


def choose_attention(name: str, context: AttentionContext) -> PagedAttention:
    """Make the backend of a name; ``auto``: Triton on a GPU, the C++ operator on a CPU that has it, else plain torch.

    Raises:
        ConfigError: There is no such backend, or it cannot be used here; names ``attention_backend``.
    """
    if name == "auto":
        here = "torch" if context.operators is None else "cpp"
        name = "triton" if context.on_gpu else here
    factory: AttentionFactory = ATTENTION_BACKENDS.load(name, other_names=["auto"])
    return factory(context)


def cpu_operators(config: EngineConfig, *, on_gpu: bool) -> CpuLibrary | None:
    """Return the C++ operators, or ``None`` where they are not wanted or there are none for this machine.

    Args:
        config: Says which attention is wanted.
        on_gpu: Whether the operators of GPUs run the model.

    Raises:
        ConfigError: ``attention_backend`` is ``"cpp"`` and there are none for this machine, or they were not built.
    """
    wanted = config.attention_backend
    if wanted == "torch":
        return None
    if on_gpu:
        if wanted == "cpp":
            raise ConfigError(f"attention_backend cpp needs device cpu, not {config.device}", field="attention_backend")
        return None
    variants = runnable_variants()
    if not variants:
        if wanted == "cpp":
            raise ConfigError(f"there are no C++ operators for {platform.machine()}", field="attention_backend")
        log.warning("no C++ operators for %s: attention runs in torch, several times slower", platform.machine())
        return None
    try:
        library = load_library(variants[0])
    except OperatorsMissingError as error:
        raise ConfigError(f"{error} (attention_backend torch works without)", field="attention_backend") from error
    log.info("C++ operators: %s (%s)", library.instructions, library.path)
    return library
