"""The example connector, installed as a package: KV saved by one cluster is loaded by the next."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.testing.checkpoints import make_checkpoint
from baton.testing.cluster import LocalCluster
from baton.testing.equality import hf_greedy
from baton.types import SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples" / "baton-file-connector"
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
