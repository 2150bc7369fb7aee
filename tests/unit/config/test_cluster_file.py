"""A deployment's file: what it may say, where an error stands, and what goes before it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from baton.cli import config as config_command
from baton.cli.main import main
from baton.cli.plan import plan_from, read_file, service_configs
from baton.cli.up import add_parser
from baton.config.cluster_file import ClusterFile, cluster_schema
from baton.config.document import read_document
from baton.errors import ConfigError
from baton_decode.main import main as run_decode
from baton_router.main import main as run_router

EXAMPLES = sorted(Path("examples").glob("cluster-*.yaml"))
WHOLE = """\
ratio: 2P3D
port: 0
slo: {itl-ms: 40}
security:
  token-file: {token}
worker:
  flags:
    dtype: float32
    pipes: [shm, tcp]
decode:
  flags:
    kv-blocks: 300
    load-share: 0.5
pools:
  big:
    role: decode
    replicas: 2
    flags: {tp: 2, dtype: bfloat16}
router:
  flags:
    policy: session
kvstore:
  enabled: true
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("BATON_DTYPE", "BATON_KV_BLOCKS", "BATON_POLICY"):
        monkeypatch.delenv(name, raising=False)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["up", *words])


def load(tmp_path: Path, text: str) -> ClusterFile:
    return ClusterFile(written(tmp_path, text), service_configs())


# --- what is wrong, and where ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ratio: 1P1D\nrouter:\n  flags:\n    polcy: x\n", ":4: router.flags.polcy is not known; did you mean policy?"),
        ("modell: x\n", ":1: modell is not known; did you mean model?"),
        ("ratio: 1P1D\n\n\nport: http\n", ":4: port must be a whole number, got 'http'"),
        ("port: 70000\n", ":1: port must be at most 65535, got 70000"),
        ("ratio: 2D\n", ":1: ratio must look like 2P3D, got '2D'"),
        ("decode:\n  flags:\n    kv-blocks: many\n", ":3: decode.flags.kv-blocks must be a whole number, got 'many'"),
        ("decode:\n  flags:\n    kv-blocks: true\n", ":3: decode.flags.kv-blocks must be a whole number, got True"),
        ("worker:\n  flags:\n    dtype: float23\n", ":3: worker.flags.dtype must be one of auto, float32"),
        ("worker:\n  flags:\n    pipes: [shm, [tcp]]\n", ":3: worker.flags.pipes[1] must be text, got ['tcp']"),
        ("worker:\n  flags:\n    kv-events: yes\n", ":3: worker.flags.kv-events must be true or false, got 'yes'"),
        ("worker:\n  flags:\n    model: x\n", ":3: worker.flags.model is not known"),
        ("router: [1]\n", ":1: router must be a mapping, got [1]"),
        ("port: 1\nratio: 1P1D\nport: 2\n", ":3: port is given twice, first in line 1"),
        ("ratio: 1P1D\nport: [1\n", ":3: no YAML: "),
        ("- a\n", ":1: must be a mapping"),
        ("a: &x\n  b: *x\n", ":1: refers to itself"),
        ("ratio: 1P1D\nprefill:\n  replicas: 2\n", ":3: prefill.replicas and ratio"),
        ("pools:\n  Big: {role: decode}\n", ":2: pools.Big cannot be a pool's name"),
        ("pools:\n  big:\n    replicas: 2\n", ":2: pools.big needs a role"),
        ("pools:\n  big:\n    role: helper\n", ":3: pools.big.role must be one of prefill, decode"),
    ],
)  # fmt: skip
def test_errors_name_the_path_and_the_line(tmp_path, text, says):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert says in caught.value.message
    assert caught.value.message.startswith(str(tmp_path / "cluster.yaml") + ":")
    assert "\n" not in caught.value.message


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*cluster.yaml: No such file"):
        ClusterFile(str(tmp_path / "cluster.yaml"), {})
    (tmp_path / "cluster.yaml").write_bytes(b"ratio: 1P1D\nmodel: \xff\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:2: no UTF-8"):
        ClusterFile(str(tmp_path / "cluster.yaml"), {})
    (tmp_path / "cluster.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match="is longer than 1048576 bytes"):
        ClusterFile(str(tmp_path / "cluster.yaml"), {})
    (tmp_path / "cluster.yaml").write_bytes(b"model: a\0b\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:1: no YAML"):
        ClusterFile(str(tmp_path / "cluster.yaml"), {})
    with pytest.raises(ConfigError, match="/dev/zero is longer than"):
        ClusterFile("/dev/zero", {})
    os.mkfifo(tmp_path / "pipe")
    assert read_document(tmp_path / "pipe").plain() == {}


def test_aliases_of_aliases_end(tmp_path):
    """A kilobyte of YAML can mean a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (tmp_path / "cluster.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"cluster.yaml:\d+: .*values"):
        read_document(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode:\n  flags:\n    kv-blocks: 0\n", ":3: "),
        ("worker:\n  flags:\n    remote-prefill-threshold: 3\n    lease-s: -1\n", ":4: "),
        ("router:\n  flags:\n    port: 3\n", ":3: router.flags.port is set by baton up itself; give port at the top"),
        ("decode:\n  flags:\n    instance-id: x\n", ":3: decode.flags.instance-id is set by baton up itself"),
        ("ratio: 3P0D\n", ":1: "),
        ("decode:\n  replicas: 0\n", " has no decode instance"),
    ],
)
def test_what_up_refuses_stands_in_the_file(tmp_path, capsys, text, says):
    assert main(["up", "-f", written(tmp_path, text)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton up: error: ")
    assert str(tmp_path / "cluster.yaml") + says in err
    assert err.count("\n") == 1


def test_services_refuse_it_likewise(tmp_path, capsys):
    path = written(tmp_path, "router:\n  flags:\n    polcy: session\ndecode:\n  flags:\n    tpp: 2\n")
    assert run_router(["--config", path]) == 2
    assert (
        f"baton-router: error: {path}:3: router.flags.polcy is not known; did you mean policy?"
        in capsys.readouterr().err
    )
    assert run_decode(["--config", path]) == 2
    assert f"{path}:6: decode.flags.tpp is not known" in capsys.readouterr().err
    assert run_decode(["--config", written(tmp_path, ""), "--pool", "prefill"]) == 2
    assert "prefill is no pool of decode instances" in capsys.readouterr().err
    assert run_decode(["--config", path, "--pool", "huge"]) == 2


# --- what it says ---


def test_values_of_each_service(tmp_path):
    file = load(tmp_path, WHOLE.replace("{token}", "t"))

    def plain(service: str) -> dict[str, Any]:
        return {name: placed.value for name, placed in file.values(service).items()}

    shared = {"token_file": "t", "dtype": "float32", "pipes": ["shm", "tcp"]}
    assert plain("prefill") == shared
    assert plain("decode") == shared | {"kv_blocks": 300, "load_share": 0.5, "itl_slo_ms": 40}
    assert plain("big") == shared | {"tp": 2, "dtype": "bfloat16", "itl_slo_ms": 40}
    assert plain("router") == {"token_file": "t", "policy": "session", "port": 0}
    assert plain("kvstore") == {"token_file": "t"}
    assert file.slos() == {"itl": 40.0}
    assert file.values("big")["tp"].where.endswith("cluster.yaml:18")


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, "decode: {flags: {kv-blocks: 300}}\nworker: {flags: {dtype: float16, block-size: 8}}\n")

    def shown(*words: str) -> dict[str, tuple[Any, str]]:
        assert main(["config", "show", "-f", path, "--service", "decode", "--json", "--port", "0", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        return {each["name"]: (each["value"], each["source"]) for each in found}

    assert shown()["dtype"] == ("float16", f"{path}:2")
    assert shown()["kv-blocks"] == (300, f"{path}:1")
    assert "tp" not in shown()
    assert shown("--all")["tp"] == (1, "default")
    monkeypatch.setenv("BATON_DTYPE", "bfloat16")
    assert shown()["dtype"] == ("bfloat16", "BATON_DTYPE")
    assert shown("--dtype", "float32")["dtype"] == ("float32", "flag")
    assert shown("--decode-args", "--kv-blocks 77")["kv-blocks"] == (77, "flag")
    assert shown()["block-size"] == (8, f"{path}:2")
    assert shown()["routers"][1] == "baton up"


def test_passwords_are_not_shown(tmp_path, capsys):
    path = written(tmp_path, "worker:\n  flags:\n    kvstore: redis://me:hidden@host:1/0\n")
    assert main(["config", "show", "-f", path, "--json", "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert "redis://" in out
    assert "hidden" not in out


def test_the_plan(tmp_path):
    token = tmp_path / "token"
    token.write_text("0" * 32)
    args = parsed("-f", written(tmp_path, WHOLE.replace("{token}", str(token))))
    plan = plan_from(args, read_file(args))
    assert [spec.name for spec in plan.workers] == [
        "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "big-0", "big-1",
    ]  # fmt: skip
    assert plan.kvstore is not None
    for spec in (plan.kvstore, plan.router, *plan.workers):
        at = spec.args.index("--config")
        assert spec.args[at + 1] == args.config
        assert spec.args[spec.args.index("--token-file") + 1] == str(token)
        assert ("--pool" in spec.args) == spec.name.startswith("big")
    assert plan_from(parsed("-f", args.config, "--ratio", "1P1D", "--no-kvstore"), read_file(args)).kvstore is None


def test_a_document_is_read_as_written(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text('a: on\nb: 2020-01-01\nc: "1"\nd: 0x10\ne: ~\nf: {g: [1, 2.5, true]}\n')
    assert read_document(path).plain() == {
        "a": "on", "b": "2020-01-01", "c": "1", "d": 16, "e": None, "f": {"g": [1, 2.5, True]},
    }  # fmt: skip
    path.write_text('{"a": {"b": [1]}}')
    assert read_document(path).plain() == {"a": {"b": [1]}}


# --- the schema ---


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_follow_the_schema_and_can_be_planned(path):
    schema = cluster_schema(service_configs())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)
    args = parsed("-f", str(path), "--port", "0", "--grpc-port", "0")
    assert plan_from(args, read_file(args)).workers


def test_the_schema_is_that_of_the_charts_flags(capsys):
    assert main(["config", "schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    chart = json.loads(Path("helm/baton/values.schema.json").read_text())["$defs"]
    for section, service in (("router", "routerFlags"), ("worker", "workerFlags"), ("kvstore", "kvstoreFlags")):
        flags = found["properties"][section]["properties"]["flags"]["properties"]
        shared = flags.keys() & chart[service]["properties"].keys()
        assert len(shared) > 20
        assert {name: flags[name] for name in shared} == {name: chart[service]["properties"][name] for name in shared}
    assert config_command.__doc__
