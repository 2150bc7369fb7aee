"""The example connector, installed as a package: KV saved by one cluster is loaded by the next."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.types import SamplingParams

EXAMPLE = Path(__file__).parents[3] / "examples" / "baton-file-connector"
PROMPT = list(range(20, 220))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package on the path with the metadata that an installer writes, entry point included."""
    site = tmp_path / "site"
    shutil.copytree(EXAMPLE / "src", site)
    info = site / "baton_file_connector-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-file-connector\nVersion: 0.1.0\n")
    text = (EXAMPLE / "pyproject.toml").read_text()
    assert '[project.entry-points."baton.kv_connectors"]\nfiles = "baton_file_connector:make_connector"' in text
    (info / "entry_points.txt").write_text("[baton.kv_connectors]\nfiles = baton_file_connector:make_connector\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "baton_file_connector", raising=False)


def cluster(model: Path, *options: str) -> LocalCluster:
    config = WorkerConfig(kv_connectors=("files",), kv_connector_options=options)
    return LocalCluster(EngineConfig(model=str(model), dtype="float32", kv_blocks=64), config)


@pytest.mark.usefixtures("installed")
async def test_kv_survives_the_instances(model: Path, tmp_path: Path) -> None:
    expected = hf_greedy(model, [PROMPT], 8)[0]
    option = f"files.path={tmp_path / 'kv'}"
    async with cluster(model, option) as first:
        result = await first.generate(first.decode[0], PROMPT, GREEDY)
        assert (result.token_ids, result.trace.pipe) == (expected, "shm")
        await first.check_integrity()
    files = sorted((tmp_path / "kv").glob("*/*"))
    assert len(files) == len(PROMPT) // 16
    async with cluster(model, option) as second:
        result = await second.generate(second.decode[0], PROMPT, GREEDY, candidates=[])
        assert result.token_ids == expected
        assert (result.trace.pipe, result.trace.transferred_tokens) == ("files", len(PROMPT) // 16 * 16)
        await second.check_integrity()
    damaged = bytearray(files[0].read_bytes())
    damaged[100] ^= 1
    for file in files:
        file.write_bytes(damaged)
    async with cluster(model, option) as third:
        result = await third.generate(third.decode[0], PROMPT, GREEDY)
        assert result.token_ids == expected
        await third.check_integrity()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("names", "options", "field"),
    [
        (("nothing",), (), "kv_connectors"),
        (("files",), (), "kv_connector_options"),
        (("files",), ("files.path=/tmp/x", "files.size=3"), "kv_connector_options"),
        (("files",), ("other.path=/tmp/x",), "kv_connector_options"),
        (("files",), ("files",), "kv_connector_options"),
        (("files",), ("files.path=/proc/nothing/here",), "kv_connectors"),
    ],
)
async def test_what_cannot_work_is_refused_at_start(
    model: Path, names: tuple[str, ...], options: tuple[str, ...], field: str
) -> None:
    config = WorkerConfig(kv_connectors=names, kv_connector_options=options)
    with pytest.raises(ConfigError) as refused:
        async with LocalCluster(EngineConfig(model=str(model), dtype="float32", kv_blocks=64), config):
            pass
    assert refused.value.field == field
    if names == ("nothing",):
        assert "files, offload, shared_storage" in str(refused.value)


FAULTY = """
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadUpdate


class Faulty(KVConnector):
    follows_all = True

    def __init__(self, context):
        self.wake, self.loading, self.cancelled = context.wake, None, False

    def plan_load(self, request, num_local_tokens):
        backwards = request.token_ids[0] > request.token_ids[1]
        return LoadPlan(len(request.token_ids) - 1) if backwards else None

    def start_load(self, request, num_local_tokens, block_ids):
        self.loading = request.request_id

    def cancel_load(self, request_id):
        self.cancelled = True
        self.wake()
        raise OSError("cannot cancel")

    def poll_loads(self):
        if not self.cancelled:
            raise OSError("cannot say what was loaded")
        self.cancelled = False
        return [LoadUpdate(self.loading, 0, error="cancelled")]


def fail(self, *_):
    raise OSError("nothing works here")


for hook in (
    "request_finished poll_releases has_pending step_begins layer_computed blocks_belong blocks_computed close".split()
):
    setattr(Faulty, hook, fail)
"""


async def test_a_connector_that_fails_in_every_hook_costs_no_request_and_no_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton_faulty.py").write_text(FAULTY)
    info = tmp_path / "baton_faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[baton.kv_connectors]\nfaulty = baton_faulty:Faulty\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "baton_faulty", raising=False)
    config = WorkerConfig(kv_connectors=("faulty",))
    async with LocalCluster(EngineConfig(model=str(model), dtype="float32", kv_blocks=64), config) as cluster:
        expected = hf_greedy(model, [PROMPT], 8)[0]
        decode = cluster.decode[0]
        assert (await cluster.generate(decode, PROMPT, GREEDY)).token_ids == expected
        hanging = asyncio.create_task(cluster.generate(decode, PROMPT[::-1], GREEDY, candidates=[]))
        async with asyncio.timeout(240):
            while not (await decode.context.engine.call(decode.context.engine.core.stats)).num_loading:
                assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await cluster.check_integrity()
        result = await cluster.generate(decode, PROMPT, GREEDY)
        assert result.token_ids == expected
