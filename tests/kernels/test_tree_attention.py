"""Attention of trees of tokens: each sees what is before the root, its ancestors and itself, whatever lies between."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_latent_attention import SHAPES as LATENT_SHAPES
from tests.kernels.test_paged_attention import SHAPES, TOLERANCE, VARIANTS, Case, make_case, rotate_reference
from tests.kernels.test_stored_attention import STORAGES, pool_of

from baton_kernels.cpu import CpuLibrary
from baton_kernels.paged_attention import (
    MAX_TREE_TOKENS,
    AttentionSpec,
    ChunkedAttention,
    CpuPagedAttention,
    LatentProjections,
    LayerPool,
    PagedAttention,
    Rotation,
    TokenTrees,
    TorchPagedAttention,
    attend_latent,
    paged_attention_reference,
)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The last tokens of a sequence: parents of all nodes but the root, and how many were computed before."""

    root: int
    parents: tuple[int, ...]
    known: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of the sequence, and the new ones."""
        nodes = 1 + len(self.parents)
        return self.root + nodes, nodes - self.known

    def ancestors(self) -> list[int]:
        """Of every node, itself included, a bit each."""
        masks = [1]
        for parent in self.parents:
            masks.append(masks[parent] | 1 << len(masks))
        return masks


def with_trees(case: Case, trees: Sequence[Tree | None]) -> Case:
    """Make the last tokens of some sequences trees."""
    batch = case.batch
    ancestors = np.zeros(len(batch.positions), np.uint64)
    positions, starts = batch.positions.copy(), np.full(len(trees), -7, np.int32)
    for seq, tree in enumerate(trees):
        if tree is not None:
            masks = tree.ancestors()[tree.known :]
            span = slice(int(batch.query_starts[seq]), int(batch.query_starts[seq + 1]))
            ancestors[span], starts[seq] = masks, tree.root
            positions[span] = [tree.root + mask.bit_count() - 1 for mask in masks]
    return dataclasses.replace(
        case, batch=dataclasses.replace(batch, positions=positions, trees=TokenTrees(ancestors, starts))
    )


CHAIN, STAR = Tree(70, (0, 1, 2)), Tree(3, (0,) * 6)
BUSHY = Tree(61, (0, 0, 1, 1, 2, 3, 3, 5, 5, 6))
"""Across the border of a tile of keys."""
DEEP = Tree(10, (*range(40), 0, 0, 1, 41, 20, *range(40, 58)))
GROWN = Tree(33, (0, 0, 0, 1, 1, 2, 4, 5, 6), known=4)
"""Of which the first levels were computed before."""
LEAF = Tree(128, (0, 0, 0, 1), known=4)
"""One new token, which is no decode: it does not see all before it."""
MIXED: tuple[Tree | tuple[int, int], ...] = (CHAIN, (90, 1), BUSHY, STAR, (130, 67), DEEP, GROWN, LEAF, (1, 1))


def mixed_case(shape: tuple[int, int, int, int, int], dtype: torch.dtype, **variant: float) -> Case:
    sizes = tuple(each.sizes if isinstance(each, Tree) else each for each in MIXED)
    case = make_case(sizes, shape, dtype, **variant)
    return with_trees(case, [each if isinstance(each, Tree) else None for each in MIXED])


def run_poisoned(case: Case, backend: PagedAttention, pool: LayerPool) -> torch.Tensor:
    """Attend with memory that is not written full of NaN, so that nothing goes unwritten unseen."""
    torch.use_deterministic_algorithms(True)
    try:
        return backend.run(backend.prepare(case.batch), case.spec, pool, case.q, case.k, case.v)
    finally:
        torch.use_deterministic_algorithms(False)


def check(case: Case, backend: PagedAttention) -> None:
    want, want_pool = case.expected()
    pool = case.pool()
    got = run_poisoned(case, backend, pool)
    assert torch.equal(pool.k, want_pool.k)
    assert torch.equal(pool.v, want_pool.v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[case.q.dtype])


def backends(library: CpuLibrary) -> list[PagedAttention]:
    return [CpuPagedAttention(library), TorchPagedAttention()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_trees_beside_other_sequences(
    library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, int, int, int, int], variant: str
) -> None:
    case = mixed_case(shape, dtype, **VARIANTS[variant])
    for backend in backends(library):
        check(case, backend)


def test_every_build_of_the_operator_and_two_threads(build: CpuLibrary, threads: int) -> None:
    check(mixed_case((12, 4, 64, 64, 16), torch.bfloat16, window=24), CpuPagedAttention(build))


@st.composite
def sequences(draw: st.DrawFn) -> list[Tree | tuple[int, int]]:
    found: list[Tree | tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        root = draw(st.integers(0, 140))
        if draw(st.integers(0, 3)) == 0:
            found.append((root + 1, draw(st.integers(1, root + 1))))
            continue
        nodes = draw(st.integers(0, MAX_TREE_TOKENS - 1))
        # Parents at a bounded distance make deep trees, at any distance flat ones.
        reach = draw(st.sampled_from([1, 2, 5, MAX_TREE_TOKENS]))
        parents = tuple(draw(st.integers(max(0, i - reach + 1), i)) for i in range(nodes))
        found.append(Tree(root, parents, draw(st.integers(0, nodes))))
    return found


@settings(max_examples=25, deadline=None)
@given(
    drawn=sequences(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 10),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.integers(1, 33),
    window=st.one_of(st.just(0), st.integers(1, 80)),
    seed=st.integers(0, 5),
)
def test_any_trees(
    library: CpuLibrary,
    drawn: list[Tree | tuple[int, int]],
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    size: int,
    window: int,
    seed: int,
) -> None:
    sizes = tuple(each.sizes if isinstance(each, Tree) else each for each in drawn)
    case = make_case(sizes, (kv_heads * group, kv_heads, *dims, size), torch.float32, window=window, seed=seed)
    case = with_trees(case, [each if isinstance(each, Tree) else None for each in drawn])
    for backend in backends(library):
        check(case, backend)


@pytest.mark.parametrize("window", [0, 3])
def test_a_path_is_what_it_would_be_alone(library: CpuLibrary, window: int) -> None:
    """Each token of a tree attends as in a chain of its ancestors."""
    case = with_trees(make_case((BUSHY.sizes,), (4, 2, 16, 16, 16), torch.float32, window=window), [BUSHY])
    for backend in backends(library):
        pool = case.pool()
        got = run_poisoned(case, backend, pool)
        for node, mask in enumerate(BUSHY.ancestors()):
            path = [j for j in range(64) if mask >> j & 1]
            context = BUSHY.root + len(path)
            batch = dataclasses.replace(
                case.batch,
                positions=np.arange(BUSHY.root, context),
                query_starts=np.array([0, len(path)], np.int32),
                context_lens=np.array([context], np.int32),
                trees=None,
            )
            chain = dataclasses.replace(case, batch=batch, q=case.q[path], k=case.k[path], v=case.v[path])
            alone, _ = chain.run(backend)
            torch.testing.assert_close(got[node], alone[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES, ids=lambda d: str(d)[6:])
def test_trees_over_pools_of_other_types(library: CpuLibrary, storage: torch.dtype) -> None:
    case = mixed_case((6, 2, 32, 32, 16), torch.float32, window=24)
    # The reference over what is there once all is written: operators differ in the last bit of what they quantize.
    for backend in backends(library):
        pool, again = pool_of(case, storage, garbage=False), pool_of(case, storage, garbage=False)
        got = run_poisoned(case, backend, pool)
        want = paged_attention_reference(case.batch, case.spec, again, case.q, case.k, case.v)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-2)


@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
def test_positions_that_are_rotated_are_those_by_depth(library: CpuLibrary, pairs: bool) -> None:
    case = mixed_case((4, 2, 24, 16, 16), torch.float32, window=24)
    angles = torch.rand(256, 4) * 7
    rotation = Rotation(angles.cos(), angles.sin(), pairs=pairs)
    positions = torch.from_numpy(case.batch.positions)
    q, k = (rotate_reference(each, rotation, positions, None).float() for each in (case.q, case.k))
    want, want_pool = dataclasses.replace(case, q=q, k=k).expected()
    backend, pool = CpuPagedAttention(library), case.pool()
    plan = backend.prepare(case.batch)
    got = backend.run_rotated(plan, case.spec, pool, (case.q.clone(), case.k, case.v), rotation)
    torch.testing.assert_close(pool.k, want_pool.k, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=8e-5)


@pytest.mark.parametrize("way", ["absorbed", "expanded", "mixed"])
@pytest.mark.parametrize("window", [0, 24])
def test_trees_over_latents(library: CpuLibrary, way: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "mixed":
        monkeypatch.setattr(LatentProjections, "expanding_pays", lambda *_: way == "expanded")
    heads, nope, rope, v_dim, rank, size = LATENT_SHAPES[1]
    case = mixed_case((heads, 1, nope + rope, v_dim, size), torch.float32)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(heads * (nope + v_dim), rank, generator=generator) * rank**-0.5
    rows = torch.randn(len(case.q), rank + rope, generator=generator)
    keys = torch.randn(case.num_blocks, 1, size, rank + rope, generator=generator)
    exact = LatentProjections(weight.double(), heads, v_dim)
    expanded = LayerPool(
        *(
            each.view(case.num_blocks, size, heads, -1).transpose(1, 2).contiguous()
            for each in exact.expand(keys.double().reshape(-1, rank + rope))
        )
    )
    whole = AttentionSpec(heads, heads, nope + rope, v_dim, (nope + rope) ** -0.5, window)
    want = paged_attention_reference(case.batch, whole, expanded, case.q, *exact.expand(rows.double()))
    spec = dataclasses.replace(whole, kv_heads=1, k_dim=rank + rope, v_dim=rank, latent=True)
    for backend in backends(library):
        pool = LayerPool(keys.clone(), keys)
        pool = LayerPool(pool.k, pool.k[..., :rank])
        projections = LatentProjections(weight, heads, v_dim)
        got = attend_latent(backend, backend.prepare(case.batch), spec, pool, projections, (case.q, rows))
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-5)


def test_bad_trees_are_refused_before_c_code_sees_them(library: CpuLibrary) -> None:
    batch, backend = mixed_case((4, 2, 16, 16, 16), torch.float32).batch, CpuPagedAttention(library)
    assert batch.trees is not None
    trees = batch.trees

    def refused(match: str, **wrong: np.ndarray) -> None:
        with pytest.raises(ValueError, match=match):
            backend.prepare(dataclasses.replace(batch, trees=dataclasses.replace(trees, **wrong)))

    refused("uint64", ancestors=trees.ancestors.astype(np.int64))
    refused("int32", starts=trees.starts.astype(np.int64))
    refused("number of sequences", starts=trees.starts[:-1].copy())
    ahead, far = trees.ancestors.copy(), trees.starts.copy()
    ahead[0] |= np.uint64(1 << 9)
    far[0] = 0
    refused("none behind it", ancestors=ahead)
    refused("within 64", starts=far)


def test_backends_that_cannot_say_so(library: CpuLibrary) -> None:
    assert all(getattr(each, "trees", False) for each in backends(library))
    chunked = ChunkedAttention(CpuPagedAttention(library), [AttentionSpec(4, 2, 16, 16, 1.0, chunk=32)])
    assert not chunked.trees
