"""GGUF files: container, architecture, text. Needs no torch, so that the router reads them as well."""

from baton.gguf.architecture import TensorRule, tensor_rules
from baton.gguf.container import GgufFile, TensorInfo, is_gguf
from baton.gguf.files import GgufModel, open_gguf

__all__ = ["GgufFile", "GgufModel", "TensorInfo", "TensorRule", "is_gguf", "open_gguf", "tensor_rules"]
