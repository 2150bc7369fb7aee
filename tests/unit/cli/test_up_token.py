"""``baton up`` with API keys has a token between its services, whoever started it named one or not."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path

import pytest

from baton.cli.plan import own_token, plan_from
from baton.cli.up import add_parser
from baton.errors import ConfigError


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["up", *flags])


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("flag", ["--api-keys FILE", "--api-keys=FILE"])
def test_keys_without_a_token_get_one_for_this_user_alone(flag: str) -> None:
    args = parsed("--kvstore", f"--router-args=--strict-fields {flag}")
    with own_token(args):
        plan, path = plan_from(args), Path(args.token_file)
        assert len(path.read_text()) == 64
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for spec in (plan.router, plan.kvstore, *plan.workers):
            assert spec is not None
            assert spec.args[spec.args.index("--token-file") + 1] == str(path)
    assert not path.parent.exists()


def test_keys_of_the_environment_count_and_a_token_that_was_named_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEYS", "FILE")
    args = parsed()
    with own_token(args):
        assert args.token_file
    args = parsed("--token-file", str(tmp_path / "token"))
    with own_token(args):
        assert args.token_file == str(tmp_path / "token")
    monkeypatch.setenv("BATON_TOKEN_FILE", str(tmp_path / "token"))
    args = parsed()
    with own_token(args):
        assert not args.token_file


def test_without_keys_there_is_none() -> None:
    args = parsed("--router-args=--strict-fields")
    with own_token(args):
        assert not args.token_file


def test_certificates_are_those_of_all_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_from(
        parsed("--kvstore", "--tls-cert", "c.pem", "--tls-key", "c.key", "--tls-ca", "ca.pem", "--clear-kv")
    )
    assert plan.scheme == "https"
    for spec in (plan.router, plan.kvstore, *plan.workers):
        assert spec is not None
        text = " ".join(spec.args)
        assert "--tls-cert c.pem --tls-key c.key --tls-ca ca.pem --clear-kv" in text
        assert "--tls-name" not in text
    monkeypatch.setenv("BATON_TLS_CERT", "other.pem")
    plan = plan_from(parsed("--router-args=--no-http-tls"))
    assert plan.scheme == "http"
    assert "--tls-cert other.pem" in " ".join(plan.router.args)
    with pytest.raises(ConfigError, match="--tls-cert is set by baton up itself; give --tls-cert to baton up"):
        plan_from(parsed("--router-args=--tls-cert c.pem"))


def test_a_store_that_runs_is_used() -> None:
    plan = plan_from(parsed("--kvstore"))
    assert plan.kvstore is not None
    for spec in (plan.router, *plan.workers):
        assert spec.args[spec.args.index("--kvstore") + 1] == plan.kvstore.health_address
    assert plan_from(parsed()).kvstore is None
