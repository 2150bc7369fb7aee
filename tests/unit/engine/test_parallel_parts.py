"""The parts of a parallel engine: messages, the step buffer, cutting weights, refusals, flags."""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models.architectures import copy_of
from tests.support.models.checkpoints import make_checkpoint

from baton.cli import up
from baton.cli.plan import plan_from
from baton.config import EngineConfig
from baton.engine.communicator import Communicator, Rendezvous
from baton.engine.executor.channel import (
    MAX_MESSAGE_BYTES,
    ChannelClosedError,
    StepBuffer,
    error_from_message,
    error_to_message,
    open_channel,
    recv_message,
    send_message,
)
from baton.engine.models.parallel import divide, rank_attention, split_tensors
from baton.engine.runner.input_batch import ForwardBatch
from baton.engine.runner.model_runner import WholeModel, load_whole
from baton.errors import ConfigError, InternalError
from baton.kv_cache.shards import shard_specs
from baton_kernels.paged_attention import AttentionSpec, TokenTrees


def soon() -> float:
    return time.monotonic() + 240.0


# Messages


def test_messages_bring_values_and_descriptors() -> None:
    ours, theirs = open_channel()
    read, write = os.pipe()
    with ours, theirs:
        send_message(ours, {"do": "this"}, deadline=soon())
        send_message(ours, {"do": "that"}, deadline=soon(), descriptors=(write,))
        assert recv_message(theirs, deadline=soon()) == ({"do": "this"}, [])
        message, descriptors = recv_message(theirs, deadline=None)
        assert message == {"do": "that"}
        os.write(descriptors[0], b"hello")
        assert os.read(read, 5) == b"hello"
        for descriptor in (read, write, *descriptors):
            os.close(descriptor)


def test_a_line_tells_that_the_other_end_is_gone_also_while_waiting() -> None:
    ours, theirs = open_channel()
    closer = threading.Timer(0.05, ours.shutdown, (socket.SHUT_RDWR,))
    closer.start()
    with pytest.raises(ChannelClosedError):
        recv_message(theirs, deadline=None)
    ours.close()
    with pytest.raises(ChannelClosedError):
        send_message(theirs, {}, deadline=soon())
    theirs.close()
    closer.join()


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b'"' + b"a" * MAX_MESSAGE_BYTES + b'"'])
def test_what_is_no_message_is_refused_and_leaks_no_descriptor(body: bytes) -> None:
    ours, theirs = open_channel()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [body], [0])
        with pytest.raises(InternalError, match="no message"):
            recv_message(theirs, deadline=soon())
        ends = soon()
        while len(os.listdir("/proc/self/fd")) > before:  # what tests before left may open one for a moment
            assert time.monotonic() < ends


def test_bounds_of_messages_and_waits() -> None:
    ours, theirs = open_channel()
    with ours, theirs:
        with pytest.raises(InternalError, match="too long"):
            send_message(ours, {"text": "a" * MAX_MESSAGE_BYTES}, deadline=soon())
        with pytest.raises(InternalError, match="does not answer"):
            recv_message(theirs, deadline=time.monotonic() + 0.01)

        def flood() -> None:
            while True:
                send_message(ours, {"text": "a" * 60_000}, deadline=time.monotonic() + 0.05)

        with pytest.raises(InternalError, match="does not listen"):
            flood()


def test_a_wrong_configuration_stays_one_on_its_way_to_the_leader() -> None:
    error = error_from_message(error_to_message(ConfigError("no such folder", field="model")), 1)
    assert isinstance(error, ConfigError)
    assert (error.message, error.field) == ("no such folder", "model")
    other = error_from_message(error_to_message(ValueError("seven")), 3)
    assert type(other) is InternalError
    assert other.message == "rank 3: ValueError: seven"


# Steps


def step(tokens: int, sequences: int, width: int, rows: int, *, trees: bool = False) -> ForwardBatch:
    rng = np.random.default_rng(tokens)

    def draw(*shape: int, dtype: Any = np.int64) -> Any:
        return rng.integers(0, 1000, shape).astype(dtype)

    return ForwardBatch(
        token_ids=draw(tokens),
        positions=draw(tokens),
        query_starts=draw(sequences + 1, dtype=np.int32),
        context_lens=draw(sequences, dtype=np.int32),
        block_tables=draw(sequences, width, dtype=np.int32),
        logit_rows=draw(rows),
        trees=TokenTrees(draw(tokens, dtype=np.uint64), draw(sequences, dtype=np.int32)) if trees else None,
    )


@pytest.mark.parametrize("trees", [False, True])
def test_steps_are_read_as_they_were_written_by_every_process_that_maps_the_memory(trees: bool) -> None:
    drafts: dict[str, Any] = {"speculative": "suffix", "speculative_width": 2} if trees else {}
    buffer = StepBuffer.create(EngineConfig(max_num_batched_tokens=128, max_num_seqs=8, **drafts), 512)
    other = StepBuffer(os.dup(buffer.fd))
    for sizes in ((128, 8, 32, 128), (1, 1, 1, 0), (64, 3, 33, 5)):
        written = step(*sizes, trees=trees)
        buffer.write(written)
        read = other.read()
        assert read.groups == written.groups
        one_rank = {"state_slots", "state_loads", "state_saves"}  # models with recurrent states are not divided
        names = set(ForwardBatch.__slots__) - {"hidden_of", "groups", "trees", "chosen"} - one_rank
        pairs = [(getattr(written, name), getattr(read, name)) for name in names]
        assert (read.trees is not None) == trees
        if written.trees is not None and read.trees is not None:
            pairs += [(written.trees.ancestors, read.trees.ancestors), (written.trees.starts, read.trees.starts)]
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
    with pytest.raises(InternalError, match="larger than was planned"):
        buffer.write(step(128, 8, 200, 128))
    for counts in ((-1, 1, 1, 1, 1, 0), (1 << 40, 1, 1, 1, 1, 0), (1, 1, 1, 1, 1, 1 << 40)):
        np.frombuffer(buffer._memory[:48].view(np.int64), np.int64)[:] = counts
        with pytest.raises(InternalError, match="does not hold a step"):
            other.read()
    buffer.close()
    buffer.close()
    other.close()


# Cutting


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, WholeModel] = {}

    def get(name: str, **overrides: Any) -> WholeModel:
        """Return a copy that may be cut."""
        if name not in made:
            path = make_checkpoint(folder / name, name, **overrides)
            made[name] = load_whole(EngineConfig(model=str(path), dtype="float32"))
        return made[name]

    return get


def parts(whole: WholeModel, tp: int) -> list[tuple[Any, dict[int, AttentionSpec]]]:
    """Return each rank's first layers' modules, cut, with sums left undone."""
    found = []
    for spec in shard_specs(tp, 1):
        part = copy_of(whole)
        split_tensors(part.model, part.specs, spec, lambda partial: partial)
        specs = {key: rank_attention(value, spec) for key, value in part.specs.items()}
        found.append((part.model.module, specs))
    return found


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "starcoder2"])
@pytest.mark.parametrize("tp", [2, 4])
@torch.inference_mode()
def test_the_ranks_mlps_add_up_to_the_whole(wholes: Any, name: str, tp: int) -> None:
    whole = wholes(name)
    x = torch.randn(1, 7, whole.model.text_config.hidden_size)
    cut_up = parts(whole, tp)
    for index, layer in enumerate(whole.model.module.base_model.layers):
        want = _first(layer.mlp(x.clone()))
        shared = [_first(module.base_model.layers[index].mlp(x.clone())) for module, _ in cut_up]
        assert torch.allclose(sum(shared), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        assert not torch.allclose(shared[0], want, rtol=0.1)
        weights = sum(p.numel() for module, _ in cut_up[:1] for p in module.base_model.layers[index].mlp.parameters())
        assert weights < 0.75 * sum(p.numel() for p in layer.mlp.parameters()) * (1 if tp == 2 else 0.8)


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("llama", 4), ("qwen3", 2), ("gpt_oss", 4)])
def test_heads_are_divided_and_shared_where_there_are_too_few(wholes: Any, name: str, tp: int) -> None:
    """2 KV heads of 4 query heads: over 4 ranks every KV head is on two of them."""
    whole = wholes(name)
    before = whole.model.module.base_model.layers[1].self_attn
    spec = list(whole.specs.values())[1]
    for rank, (module, attention) in enumerate(parts(whole, tp)):
        after, mine = module.base_model.layers[1].self_attn, list(attention.values())[1]
        heads, kv_head = 4 // tp, rank * 2 // tp
        assert (mine.num_heads, mine.kv_heads) == (heads, 1)
        rows = slice(rank * heads * spec.k_dim, (rank + 1) * heads * spec.k_dim)
        assert torch.equal(after.q_proj.weight, before.q_proj.weight[rows])
        kv_rows = slice(kv_head * spec.k_dim, (kv_head + 1) * spec.k_dim)
        assert torch.equal(after.k_proj.weight, before.k_proj.weight[kv_rows])
        assert torch.equal(after.v_proj.weight, before.v_proj.weight[kv_rows])
        assert torch.equal(after.o_proj.inner.weight, before.o_proj.weight[:, rows])
        assert (after.o_proj.inner.bias is None) == (before.o_proj.bias is None or rank > 0)
        if spec.sinks is not None:
            assert mine.sinks is not None
            assert torch.equal(mine.sinks, spec.sinks[rank * heads : (rank + 1) * heads])


@pytest.mark.parametrize(
    ("name", "tp", "pp", "field", "words"),
    [
        ("llama", 3, 1, "tp", "query heads|KV heads"),
        ("llama", 8, 1, "tp", "4 query heads"),
        ("llama", 1, 5, "pp", "4 layers"),
        ("phi3", 3, 1, "tp", "query heads|KV heads"),
        ("gpt_neox", 2, 1, "tp", "its attention has query_key_value"),
        ("olmo2", 8, 1, "tp", "4 query heads"),
        ("gpt2", 1, 2, "pp", "no plan"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    wholes: Any, name: str, tp: int, pp: int, field: str, words: str
) -> None:
    part = copy_of(wholes(name))
    with pytest.raises(ConfigError, match=words) as caught:
        divide(part.model, part.specs, Communicator(shard_specs(tp, pp)[-1]))
    assert caught.value.field == field


def test_an_inner_width_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", intermediate_size=97)
    whole = load_whole(EngineConfig(model=str(path), dtype="float32"))
    with pytest.raises(ConfigError, match=r"97 columns of layers\.0\.mlp\.gate_proj") as caught:
        divide(whole.model, whole.specs, Communicator(shard_specs(2, 1)[0]))
    assert caught.value.field == "tp"


# Communicator


def test_peers_add_up_hand_over_and_wake_each_other() -> None:
    """Four ranks in threads: sums within a stage, hidden states to the next, logits to the first; one leaves."""
    team = [Communicator(spec) for spec in shard_specs(2, 2)]
    rendezvous = Rendezvous()
    results: dict[int, Any] = {}

    def rank(member: Communicator) -> None:
        index = member.spec.index
        member.connect(rendezvous if index == 0 else rendezvous.port, 1)
        hidden = (
            torch.full((3, 8), float(index)) if member.is_first_stage else member.receive_hidden((3, 8), torch.float32)
        )
        hidden = member.all_reduce(hidden + 1.0)
        if not member.is_last_stage:
            member.send_hidden(hidden)
        logits = member.gather_logits(hidden if member.has_head else torch.empty(0), 3, 8)
        if index == 0:
            results["logits"] = logits
        if index == 3:
            member.disconnect()
        if index == 2:
            try:
                member.all_reduce(hidden)
            except RuntimeError as error:
                results[index] = error

    threads = [threading.Thread(target=rank, args=(member,)) for member in team]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    # 0 + 1 and 1 + 1 make 3 in the first stage; (3 + 1) twice makes 8 in the second.
    assert torch.equal(results["logits"], torch.full((3, 8), 8.0))
    assert "by peer" in str(results[2])
    for member in team:
        member.disconnect()
        assert not member.connected


# Flags


@pytest.mark.parametrize(("values", "field"), [({"tp": 0}, "tp"), ({"pp": -1}, "pp"), ({"tp": 16, "pp": 5}, "tp")])
def test_sizes_out_of_bounds(values: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**values)  # type: ignore[arg-type]
    assert caught.value.field == field


def plan(*args: str) -> Any:
    parser = argparse.ArgumentParser()
    up.add_parser(parser.add_subparsers())
    return plan_from(parser.parse_args(["up", "--model", "x", *args]))


def test_up_gives_each_role_its_sizes() -> None:
    made = plan(
        "--ratio", "1P2D", "--tp", "2", "--prefill-tp", "4", "--decode-pp", "3", "--prefill-args", "--threads 7"
    )
    flags = {spec.name: " ".join(spec.args) for spec in made.workers}
    assert flags["prefill-0"].endswith("--tp 2 --tp 4 --threads 7")
    for name in ("decode-0", "decode-1"):
        assert flags[name].endswith("--tp 2 --pp 3")
    with pytest.raises(ConfigError, match="decode instances: tp must be at least 1") as caught:
        plan("--decode-tp", "0")
    assert caught.value.field == "decode_tp"
