"""Passwords in URLs: nobody reads them in command lines, messages and logs."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton.config.files
from baton.cli import up
from baton.cli.plan import plan_from
from baton.config import add_flags, from_flags
from baton.config.files import read_small_file
from baton.config.flags import option
from baton.config.router import check_address
from baton.config.secrets import flags_with_passwords, read_secret_file, shown_url
from baton.config.stores import StoreAddress
from baton.errors import ConfigError
from baton.rpc.redis import open_redis


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@host:6379/0", "redis://host:6379/0"),
        ("redis://user:p/w@host/1", "redis://host/1"),
        ("redis://:p@w@host", "redis://host"),
        ("redis://:p?w@host", "redis://..."),
        ("redis://host/0?password=pw", "redis://host/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("host:9000", "host:9000"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@given(password=st.text("xyz?@/:#%&=", min_size=1))
def test_no_part_of_a_password_is_shown(password: str) -> None:
    for url in (f"redis://:{password}@h:1/0", f"redis://u:{password}@h?a=1", f"redis://h/0?password={password}"):
        assert not set("xyz") & set(shown_url(url))


@pytest.mark.parametrize("password", ["s3cr3t/Pass", "s3cr3tPass"])
def test_errors_about_urls_have_no_password(password: str) -> None:
    url = f"redis://:{password}@host:port/0"
    for refused in (
        lambda: open_redis(url),
        lambda: check_address(url, field="kvstore"),
        lambda: StoreAddress.parse(f"{url},{url}".replace("redis://", "")),
        lambda: StoreAddress.parse(f"x{url}"),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert "s3cr3t" not in caught.value.message


@dataclass(frozen=True)
class Config:
    redis: str = option("", "where Redis is", secret=True)
    name: str = option("", "a name")


def parsed(*words: str, **env: str) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser, Config)
    return from_flags(Config, parser.parse_args(words), env=env)


def test_a_secret_value_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:pw@host\n")
    file.chmod(0o600)
    for config in (parsed("--redis", f"@{file}"), parsed(BATON_REDIS=f"@{file}")):
        assert config.redis == "redis://:pw@host"
    assert parsed("--name", "@me").name == "@me"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        parsed("--redis", f"@{file}")
    assert caught.value.field == "redis"
    with pytest.raises(ConfigError, match="--redis"):
        parsed("--redis", f"@{tmp_path / 'none'}")


def test_an_empty_file_is_no_value_that_was_not_given(tmp_path: Path) -> None:
    """A service that starts without the Redis or the store it was told to use would look healthy."""
    file, pipe = tmp_path / "url", tmp_path / "pipe"
    file.write_text(" \n")
    file.chmod(0o600)
    os.mkfifo(pipe, 0o600)
    for path in (file, pipe):
        with pytest.raises(ConfigError, match=f"the file of --redis {path} is empty") as caught:
            parsed("--redis", f"@{path}")
        assert caught.value.field == "redis"


def test_a_pipe_that_does_not_end_is_refused_and_one_that_does_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baton.config.files, "_PIPE_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    silent = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(ConfigError, match="what writes to it did not end"):
            read_secret_file(pipe, "the token", "token_file")
    finally:
        os.close(silent)
    reads, writes = os.pipe()
    try:
        os.write(writes, b"secret" * 1000)
        os.close(writes)
        assert read_secret_file(f"/dev/fd/{reads}", "the token", "token_file") == b"secret" * 1000
    finally:
        os.close(reads)


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    silent = os.open(pipe, os.O_RDWR)
    try:
        for path, why in ((pipe, "no regular file"), (Path("/dev/zero"), "no regular file"), (tmp_path, "Is a dir")):
            with pytest.raises(ConfigError, match=f"cannot read the file {path}: .*{why}") as caught:
                read_small_file(path, "the file", "tls_cert")
            assert caught.value.field == "tls_cert"
    finally:
        os.close(silent)
    with pytest.raises(ConfigError, match="the file /dev/zero is longer than 100 bytes"):
        read_small_file("/dev/zero", "the file", "config", most=100, pipes=True)


def test_flags_with_passwords_are_found() -> None:
    words = ["--redis", "redis://:p@h", "--name", "x", "--url=redis://u:p@h", "--open", "redis://h:1/0", "s3://b/k"]
    assert flags_with_passwords(words) == ["--redis", "--url"]
    assert flags_with_passwords(["redis://h?password=p"]) == ["an argument"]


def test_baton_up_gives_passwords_to_nobody_by_command_line() -> None:
    parser = argparse.ArgumentParser()
    up.add_parser(parser.add_subparsers())
    words = "--discover redis --redis redis://:s3cr3t@h:1/0 --strict-fields"
    args = parser.parse_args(["up", f"--router-args={words}", "--decode-args=--kvstore=redis://u:s3cr3t@h"])
    plan = plan_from(args)
    for spec in (plan.router, *plan.workers):
        assert "s3cr3t" not in " ".join(spec.args)
    assert plan.router.args[-3:] == ("--discover", "redis", "--strict-fields")
    assert plan.router.env == (("BATON_REDIS", "redis://:s3cr3t@h:1/0"),)
    assert [dict(spec.env) for spec in plan.workers] == [{}, {"BATON_KVSTORE": "redis://u:s3cr3t@h"}]
