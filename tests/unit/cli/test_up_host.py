"""``baton up --host``: the router alone listens where other hosts reach it; the services stay on loopback."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.cli.plan import own_token, plan_from, read_file
from baton.cli.supervisor import DeploymentPlan
from baton.cli.up import add_parser


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["up", "--kvstore", *flags])


def planned(*flags: str) -> DeploymentPlan:
    args = parsed(*flags)
    file = read_file(args)
    with own_token(args, file):
        return plan_from(args, file)


def value(args: tuple[str, ...], flag: str) -> str:
    return args[args.index(flag) + 1]


def file_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("how", ["flag", "environment", "file"])
def test_the_router_alone_listens_there(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--open-http"]
    if how == "flag":
        flags += ["--host", "0.0.0.0"]
    elif how == "environment":
        monkeypatch.setenv("BATON_HOST", "0.0.0.0")
    else:
        flags += ["-f", file_of(tmp_path, "host: 0.0.0.0\n")]
    plan = planned(*flags)
    assert value(plan.router.args, "--host") == "0.0.0.0"
    assert dict(plan.router.listens)["http"] == f"0.0.0.0:{plan.http_address.rpartition(':')[2]}"
    assert plan.http_address.startswith("127.0.0.1:")
    assert plan.grpc_address == plan.router.health_address == "127.0.0.1:8001"
    for spec in (plan.kvstore, *plan.workers):
        assert spec is not None
        assert value(spec.args, "--host") == "127.0.0.1"
    for spec in plan.workers:
        assert value(spec.args, "--routers") == "127.0.0.1:8001"


def test_an_address_of_this_host_is_where_its_services_call_the_router() -> None:
    plan = planned("--open-http", "--host", "10.1.2.3")
    assert (plan.http_address, plan.grpc_address) == ("10.1.2.3:8000", "10.1.2.3:8001")
    assert value(plan.workers[0].args, "--routers") == "10.1.2.3:8001"


@pytest.mark.parametrize("flags", [["--open-http"], ["--api-keys", "FILE"], ["--router-args=--api-keys FILE"]])
def test_the_services_have_a_token_then(flags: list[str]) -> None:
    args = parsed("--host", "0.0.0.0", *flags)
    with own_token(args):
        plan = plan_from(args)
        for spec in (plan.router, plan.kvstore, *plan.workers):
            assert spec is not None
            assert value(spec.args, "--token-file") == args.token_file != ""


def test_the_routers_own_flags_reach_it() -> None:
    plan = planned("--api-keys", "FILE", "--open-http")
    assert value(plan.router.args, "--api-keys") == "FILE"
    assert "--open-http" in plan.router.args
    assert "--api-keys" not in plan.workers[0].args


@pytest.mark.parametrize("how", ["flag", "environment", "file"])
def test_without_keys_the_error_names_both_ways(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "flag": ["--host", "0.0.0.0"],
        "environment": [],
        "file": ["-f", file_of(tmp_path, "model: x\nhost: 0.0.0.0\n")],
    }[how]
    if how == "environment":
        monkeypatch.setenv("BATON_HOST", "0.0.0.0")
    assert main(["up", *words]) == 2
    err = capsys.readouterr().err
    assert "others can reach 0.0.0.0: give --api-keys FILE, or --open-http to serve without keys" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("where", ["environment", "file", "router-args"])
def test_keys_given_elsewhere_count(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--host", "0.0.0.0"]
    if where == "environment":
        monkeypatch.setenv("BATON_OPEN_HTTP", "1")
    elif where == "file":
        flags += ["-f", file_of(tmp_path, "router: {flags: {api-keys: FILE}}\n")]
    else:
        flags += ["--router-args=--open-http"]
    assert value(planned(*flags).router.args, "--host") == "0.0.0.0"


def test_instances_may_listen_where_those_of_other_hosts_reach_them(capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed("--instance-host", "10.1.2.3")
    with own_token(args):
        plan = plan_from(args)
        for spec in (plan.kvstore, *plan.workers):
            assert spec is not None
            assert value(spec.args, "--host") == "10.1.2.3"
            assert spec.health_address.startswith("10.1.2.3:")
            assert value(spec.args, "--token-file") == args.token_file != ""
        assert value(plan.router.args, "--host") == "127.0.0.1"
    assert main(["up", "--instance-host", "0.0.0.0"]) == 2
    told = "--instance-host must be an address that others can dial, got 0.0.0.0"
    assert capsys.readouterr().err == f"baton up: error: {told}\n"


def test_ports_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "9000")
    monkeypatch.setenv("BATON_GRPC_PORT", "9001")
    plan = planned("--grpc-port", "9002")
    assert (plan.http_address, plan.grpc_address) == ("127.0.0.1:9000", "127.0.0.1:9002")
