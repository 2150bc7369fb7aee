"""The operators compiled for build processors: the same source must be right without this machine's instructions."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton_kernels.cpu import CpuLibrary, OperatorsMissingError, load_library, runnable_variants
from baton_kernels.cpu import library as library_module
from baton_kernels.cpu.variants import Variant
from baton_kernels.linear import CpuLinear, PairsLinear, linear_reference
from baton_kernels.paged_attention import AttentionSpec, CpuPagedAttention, RaggedBatch, paged_attention_reference
from baton_kernels.paged_attention.definition import LayerPool
from baton_kernels.row_wise import SILU, CpuGatedMul, CpuRmsNorm, gated_reference, rms_norm_reference

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
INSTRUCTIONS = {
    "x86-64-v4-bf16": "avx512-bf16",
    "x86-64-v4-vnni": "avx512-vnni",
    "x86-64-v4": "avx512",
    "x86-64-v3-vnni": "avx2-vnni",
    "x86-64-v3": "avx2",
    "x86-64": "plain",
    "armv8.2-a-dotprod": "neon-dotprod",
    "armv8-a": "neon",
}
"""What each build says of itself."""


def test_every_build_says_what_it_was_compiled_for(build: CpuLibrary) -> None:
    name = build.path.stem.removeprefix("baton_cpu-")
    assert build.instructions == INSTRUCTIONS[name]


def _pool(memory: torch.Tensor, k_dim: int, v_dim: int) -> LayerPool:
    """K and V of 14 blocks of 16 tokens and 2 heads as the pool has them: in the same block, one behind the other."""
    k, v = memory.split((2 * 16 * k_dim, 2 * 16 * v_dim), dim=1)
    return LayerPool(k.unflatten(1, (2, 16, k_dim)), v.unflatten(1, (2, 16, v_dim)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_attention(build: CpuLibrary, dtype: torch.dtype) -> None:
    check_attention(build, dtype)


@pytest.mark.parametrize("products", ["float32", "pairs", "amx"])
def test_attention_in_bfloat16_by_every_product_of_this_processor(library: CpuLibrary, products: str) -> None:
    if products == "pairs" and library.instructions != "avx512-bf16":
        pytest.skip("no vdpbf16ps here")
    if products == "amx" and not library.amx:
        pytest.skip("no AMX here")
    chosen = copy.copy(library)
    chosen.amx, chosen.pairs_are_faster = products == "amx", products == "pairs"
    check_attention(chosen, torch.bfloat16)
    check_attention(chosen, torch.bfloat16, k_dim=64, v_dim=32)


def check_attention(library: CpuLibrary, dtype: torch.dtype, k_dim: int = 21, v_dim: int = 18) -> None:
    """A prompt chunk and a decode, with and without window, soft cap and sinks, against the reference."""
    generator = torch.Generator().manual_seed(0)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(dtype)

    batch = RaggedBatch(
        positions=torch.cat([torch.arange(3, 70), torch.tensor([99])]).numpy(),
        query_starts=torch.tensor([0, 67, 68], dtype=torch.int32).numpy(),
        context_lens=torch.tensor([70, 100], dtype=torch.int32).numpy(),
        block_tables=torch.randperm(14, generator=generator, dtype=torch.int32).view(2, 7).numpy(),
        block_size=16,
    )
    spec = AttentionSpec(6, 2, k_dim, v_dim, k_dim**-0.5, 40, 6.0, torch.randn(6, generator=generator))
    memory = normal(14, 2 * 16 * (k_dim + v_dim))
    pools, copies = _pool(memory, k_dim, v_dim), _pool(memory.clone(), k_dim, v_dim)
    q, k, v = normal(68, 6, k_dim), normal(68, 2, k_dim), normal(68, 2, v_dim)
    for plain in (spec, dataclasses.replace(spec, window=0, softcap=0.0, sinks=None)):
        want = paged_attention_reference(batch, plain, pools, q, k, v)
        backend = CpuPagedAttention(library)
        got = backend.run(backend.prepare(batch), plain, copies, q, k, v)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("kind", [CpuLinear, PairsLinear])
@pytest.mark.parametrize("rows", [1, 3, 8, 40, 100])
def test_linear(build: CpuLibrary, rows: int, kind: type[CpuLinear]) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, residual = (
        torch.randn(*dims, generator=generator).bfloat16() for dims in ((rows, 150), (70, 150), (rows, 70))
    )
    got = kind(build, weight)(x, residual)
    torch.testing.assert_close(got, linear_reference(x, weight, None, residual), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_rows(build: CpuLibrary, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(9, 70, generator=generator) * 3).to(dtype), torch.randn(70, generator=generator).to(dtype)
    precision = torch.finfo(dtype).eps
    got = CpuRmsNorm(build, weight, 1e-5)(x)
    torch.testing.assert_close(got, rms_norm_reference(x, weight, 1e-5), rtol=8 * precision, atol=precision)
    torch.testing.assert_close(CpuGatedMul(build, dtype)(x), gated_reference(x, SILU), rtol=8 * precision, atol=1e-6)


def test_what_was_not_built_names_the_command_that_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "LIBRARIES", tmp_path)
    with pytest.raises(OperatorsMissingError, match=library_module.BUILD_COMMAND):
        load_library(Variant("x86-64", frozenset(), "x86-64"))
    (tmp_path / "baton_cpu-x86-64.so").write_bytes(b"no library")
    with pytest.raises(OperatorsMissingError, match="cannot load"):
        load_library(Variant("x86-64", frozenset(), "x86-64"))


def test_what_was_built_from_other_sources_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pull, structures of calls may be others than the library has."""
    variant = runnable_variants()[0]
    changed = tmp_path / "csrc"
    shutil.copytree(library_module.SOURCES, changed)
    monkeypatch.setattr(library_module, "SOURCES", changed)
    load_library(variant)
    monkeypatch.setattr(library_module, "SOURCES", tmp_path / "none")  # as in a wheel
    load_library(variant)
    (changed / "team.h").write_text("// changed\n")
    library_module._digest.cache_clear()
    monkeypatch.setattr(library_module, "SOURCES", changed)
    with pytest.raises(OperatorsMissingError, match=f"other sources.*{library_module.BUILD_COMMAND}"):
        load_library(variant)


def test_threads_are_those_of_the_runtime_that_torch_uses(tmp_path: Path) -> None:
    """Another package may have loaded an OpenMP runtime of its own."""
    own = library_module.openmp_runtime()
    other = tmp_path / "libgomp.so.1"
    shutil.copy(own, other)
    script = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])\n"
    script += "from baton_kernels.cpu import library; print(library.openmp_runtime())"
    done = subprocess.run([sys.executable, "-c", script, str(other)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == own


def test_every_processor_of_a_known_machine_has_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_kernels.cpu.variants._cpu_flags", frozenset)
    assert [each.name for each in runnable_variants("x86_64")] == ["x86-64"]
    assert [each.name for each in runnable_variants("aarch64")] == ["armv8-a"]
    assert runnable_variants("riscv64") == []
