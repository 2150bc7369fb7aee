"""Writes a quantized copy of a checkpoint, tensor by tensor or, with calibration, layer by layer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from transformers import AutoConfig

from baton.engine.models.checkpoint import TensorFiles
from baton.engine.models.loader import HUB_PATTERNS, TORCH_DTYPES
from baton.errors import ConfigError
from baton.quantize.calibration import Folding, LayeredModel, fold_scales, observe, run_layer
from baton.quantize.schemes import SCHEMES, Scheme, check_columns, quantization_config, quantize, stored_tensors
from baton.tokenizer import Tokenizer
from baton.tokenizer.model_files import model_directory, read_file, read_json
from baton.tokenizer.weight_files import INDEX_NAME, weight_files
from baton_kernels.quantization import QuantizedWeight

MAX_FILE_BYTES = 4 << 30
"""Largest bytes of a file, unless it has a single tensor."""
_HEADER_BYTES_PER_TENSOR = 512
_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointWriter:
    """Writes safetensors files tensor by tensor, so that only one tensor is in memory.

    The header precedes the data, and its length is known only at the end: space is reserved for it and padded with
    spaces, as the format allows (https://github.com/huggingface/safetensors, "Format").

    Args:
        folder: Folder of the files.
        num_tensors: Largest number of tensors.
    """

    def __init__(self, folder: Path, num_tensors: int) -> None:
        self._folder = folder
        self._reserved = _HEADER_BYTES_PER_TENSOR * (num_tensors + 1)
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._at = 0
        self._paths: list[Path] = []
        self._file_of: dict[str, int] = {}
        self.nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            self._file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        if self._file is None or (self._at and self._at + len(data) > MAX_FILE_BYTES):
            self._finish_file()
            path = self._folder / f"{len(self._paths)}.partial"
            self._paths.append(path)
            self._file = path.open("wb")
            self._at = 0
            self._header = {}
            self._file.seek(8 + self._reserved)
        self._header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + len(data)],
        }
        self._file.write(data.data)
        self._file_of[name] = len(self._paths) - 1
        self._at += len(data)
        self.nbytes += len(data)

    def finish(self) -> None:
        """Finish the last file, rename all files, and write the index if there are several."""
        self._finish_file()
        count = len(self._paths)
        names = [
            "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            for number in range(1, count + 1)
        ]
        for path, name in zip(self._paths, names, strict=True):
            path.rename(self._folder / name)
        if count > 1:
            weight_map = {name: names[number] for name, number in self._file_of.items()}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _finish_file(self) -> None:
        if self._file is None:
            return
        with self._file:
            header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}).encode()
            self._file.seek(0)
            self._file.write(self._reserved.to_bytes(8, "little") + header.ljust(self._reserved))
        self._file = None


SEQUENCE_TOKENS = 512
LEAST_TOKENS = 64
GROUPS = {"int4": 64, "nf4": 64}
_EXPERT = re.compile(r".*\.experts\.\d+\.\w+\.weight")
"""Names of weights of one expert in checkpoints; modules may have those of all experts in one parameter."""
_PLAIN = re.compile(r"(.*\.)?(lm_head|router|gate|gate_weight|shared_expert_gate)")
"""Modules that stay plain: the head, and routers, where an error would choose another expert."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.md", "tokenizer.model", "LICENSE*", "NOTICE*")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")

Step = Callable[[str, int], None]


@dataclass(frozen=True)
class QuantizeOptions:
    """The arguments of ``baton quantize``; see its ``--help``.

    Raises:
        ConfigError: A value is not allowed; names the flag.
    """

    model: str
    out: str
    scheme: str
    group: int | None = None
    ignore: tuple[str, ...] = ()
    calibration: str = ""
    calibration_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.group is not None and (self.scheme not in GROUPS or not 8 <= self.group <= 4096):
            allowed = "between 8 and 4096" if self.scheme in GROUPS else f"for {' and '.join(GROUPS)}"
            raise ConfigError(f"--group is {allowed}, got {self.group} with {self.scheme}", field="group")
        if self.calibration_tokens < LEAST_TOKENS:
            raise ConfigError(f"--calibration-tokens must be at least {LEAST_TOKENS}", field="calibration_tokens")
        for pattern in self.ignore:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"--ignore {pattern!r} is no regular expression: {error}", field="ignore") from error

    @property
    def group_size(self) -> int:
        """Number of columns that share a scale."""
        return self.group or GROUPS.get(self.scheme, 0)


@dataclass(frozen=True, slots=True)
class Written:
    """Counts of what was written.

    Attributes:
        bytes_before: Bytes of the plain checkpoint's files of weights.
        bytes_after: Bytes of the files that were written.
        weights: Number of quantized weights.
        folded: Number of modules that calibration folded scales into.
    """

    bytes_before: int
    bytes_after: int
    weights: int
    folded: int


def quantize_checkpoint(options: QuantizeOptions, step: Step) -> Written:
    """Write the checkpoint.

    Args:
        options: The command's arguments.
        step: Called after each part with its name and the number of parts that remain.

    Raises:
        ConfigError: The model, the folder or an argument cannot be used; no folder is left behind.
    """
    folder = model_directory(options.model, HUB_PATTERNS)
    raw = read_json(folder / "config.json")
    if folder.is_file() or not raw:
        raise ConfigError(f"{folder} is no folder with a plain checkpoint", field="model")
    if raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config"):
        raise ConfigError(f"{folder} is quantized already: give the plain checkpoint", field="model")
    out = Path(options.out)
    draft = Path(f"{options.out}.partial")
    for path in (out, draft):
        if path.exists():
            raise ConfigError(f"{path} exists already: give a new folder", field="out")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{draft} cannot be made: {error.strerror}", field="out") from error
    try:
        written = _Run(options, folder, raw, draft).run(step)
        draft.rename(out)
    except OSError as error:
        raise ConfigError(f"{draft} cannot be written: {error}", field="out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return written


class _Run:
    """One run of the command."""

    def __init__(self, options: QuantizeOptions, folder: Path, raw: dict[str, Any], out: Path) -> None:
        self._options = options
        self._folder = folder
        self._raw = raw
        self._out = out
        self._scheme: Scheme = SCHEMES[options.scheme]
        files = weight_files(folder)
        self._source = TensorFiles(files)
        self._bytes_before = sum(file.size for file in files)
        try:
            self._config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
            self._model = LayeredModel(self._config, self._read)
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"{folder / 'config.json'} cannot be used: {reason}", field="model") from error
        self._names = list(self._source.names())
        self._weights = set(self._chosen())
        self._dtype = self._stored_dtype()
        self._folded = 0

    def run(self, step: Step) -> Written:
        calibrated = self._calibration_sequences() if self._options.calibration else []
        layers = len(self._model) if calibrated else 0
        prefix = self._model.prefix if calibrated else ""
        rest = [name for name in self._names if not (prefix and name.startswith(prefix))]
        with CheckpointWriter(self._out, 4 * len(self._names)) as writer:
            for index, name in enumerate(rest):
                self._write(writer, name, self._source.read(name))
                step(name, len(rest) - index - 1 + layers)
            if calibrated:
                self._write_layers(writer, calibrated, step)
            writer.finish()
        self._write_config()
        self._copy_files()
        after = sum(path.stat().st_size for path in self._out.glob("*.safetensors"))
        return Written(self._bytes_before, after, len(self._weights), self._folded)

    def _read(self, name: str) -> torch.Tensor | None:
        return self._source.read(name) if name in self._source else None

    def _chosen(self) -> Iterator[str]:
        """Yield the names of the weights to quantize.

        Raises:
            ConfigError: There are none, or one cannot be packed.
        """
        linears = {f"{name}.weight" for name in self._model.linear_names()}
        patterns = [_PLAIN, *map(re.compile, self._options.ignore)]
        count = 0
        for name in self._names:
            if name not in linears and not _EXPERT.fullmatch(name):
                continue
            module = name.removesuffix(".weight")
            shape = self._source.shape(name)
            if len(shape) != 2 or any(pattern.fullmatch(module) for pattern in patterns):
                continue
            why = check_columns(name, shape[1], self._scheme, self._options.group_size)
            if why:
                raise ConfigError(why, field="group")
            count += 1
            yield name
        if not count:
            raise ConfigError(f"{self._folder} has no weight of a linear layer to quantize", field="model")

    def _stored_dtype(self) -> torch.dtype:
        """Return the dtype of the plain weights, in which scales are stored as well."""
        dtypes = {self._source.dtype(name) for name in self._weights}
        if len(dtypes) != 1 or not dtypes <= set(TORCH_DTYPES.values()):
            kinds = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ConfigError(f"{self._folder}: weights of {kinds} cannot be quantized", field="model")
        return dtypes.pop()

    def _write(
        self, writer: CheckpointWriter, name: str, tensor: torch.Tensor, energy: torch.Tensor | None = None
    ) -> QuantizedWeight | None:
        """Write a tensor, quantized if it is to be; return the quantized weight."""
        if name not in self._weights:
            writer.add(name, tensor)
            return None
        self._check_finite(name, tensor)
        weight = quantize(tensor.float(), self._scheme, self._options.group_size, self._dtype, energy)
        for part, value in stored_tensors(name, weight, self._dtype):
            writer.add(part, value)
        return weight

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{self._source.file_of(name)}: {name}: a value is infinite or no number", field="model")

    def _write_layers(self, writer: CheckpointWriter, sequences: Sequence[list[int]], step: Step) -> None:
        hidden, calls = self._model.hidden_states(sequences)
        for index, call in enumerate(calls):
            prefix = f"{self._model.prefix}{index}."
            layer = self._model.fill(index)
            names = frozenset(
                name.removeprefix(prefix).removesuffix(".weight") for name in self._weights if name.startswith(prefix)
            )
            inputs = observe(layer, hidden, call)
            if self._scheme.grouped:
                how = Folding(call, hidden[0], self._scheme, self._options.group_size, self._dtype, names)
                self._folded += fold_scales(layer, inputs, how)
            parameters = dict(layer.named_parameters())
            for name in [each for each in self._names if each.startswith(prefix)]:
                local = name.removeprefix(prefix)
                parameter = parameters.get(local)
                if parameter is None:  # a buffer that the checkpoint has
                    writer.add(name, self._source.read(name))
                    continue
                value = parameter.detach()
                observed = inputs.get(local.removesuffix(".weight"))
                if name not in self._weights:
                    writer.add(name, value.to(self._source.dtype(name)))
                    continue
                weight = self._write(writer, name, value, None if observed is None else observed.energy)
                if weight is not None:
                    value.copy_(weight.dequantize())
            hidden = run_layer(layer, hidden, call)  # the inputs of the next layer
            self._model.empty(index)
            step(f"layer {index}", len(calls) - index - 1)

    def _calibration_sequences(self) -> list[list[int]]:
        """Return token ids of the calibration text, in sequences of one length."""
        path = Path(self._options.calibration)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibration {path} cannot be read: {error}", field="calibration") from error
        tokens = Tokenizer.load(self._folder).encode(text)[: self._options.calibration_tokens]
        if len(tokens) < LEAST_TOKENS:
            raise ConfigError(
                f"--calibration {path} has {len(tokens)} tokens, at least {LEAST_TOKENS} are needed",
                field="calibration",
            )
        longest = getattr(self._config.get_text_config(decoder=True), "max_position_embeddings", SEQUENCE_TOKENS)
        length = min(SEQUENCE_TOKENS, int(longest), len(tokens))
        return [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]

    def _write_config(self) -> None:
        chosen = {name.removesuffix(".weight") for name in self._weights}
        ignored = [name for name in self._model.linear_names() if name not in chosen]
        group = self._options.group_size
        config = {**self._raw, "quantization_config": quantization_config(self._scheme, group, self._dtype, ignored)}
        (self._out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _copy_files(self) -> None:
        for pattern in _COPIED:
            for path in self._folder.glob(pattern):
                if path.name not in _NOT_COPIED and not path.name.startswith("."):
                    content = read_file(path)
                    if content is not None:
                        (self._out / path.name).write_bytes(content)
