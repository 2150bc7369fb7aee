"""Every command with input that cannot work: one line that begins with the command, and a status; no traceback."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from baton.cli.main import main

NOBODY = ["--url", "http://127.0.0.1:9"]
ADDRESS = ["--address", "127.0.0.1:9"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "--port", "abc"], "--port must be a whole number, got 'abc'"),
        (
            ["up", "--dtype", "flaot32"],
            "--dtype must be one of auto, float32, bfloat16, float16, got 'flaot32'; did you",
        ),
        (["up", "--model", ""], "--model must not be empty"),
        (["up", "-f", "{folder}"], "Is a directory"),
        (["up", "-f", "{folder}/auto.yaml"], "auto.yaml:3: scale_kv must be above 0 and at most 1, got 7.0"),
        (["up", "-f", "{folder}/maybe.yaml"], "maybe.yaml:2: autoscale.enabled must be true or false, got 'maybe'"),
        (["up", "-f", "{folder}/bytes.yaml"], "bytes.yaml:1: no UTF-8 text"),
        (["up", "--autoscale", "--scale-max-instances", "1"], "scale_max_instances must be 0 or at least 2"),
        (["demo", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["demo", "--pipe", "pigeon"], "pipes must be some of"),
        (
            ["demo", "--speculative", "eagle3", "--speculative-tokens", "0"],
            "speculative_tokens must be between 1 and 16",
        ),
        (["demo", "--speculative", "eagle3", "--model", "{folder}"], "needs --speculative-model"),
        (["health", "x"], "give HOST:PORT"),
        (["explain", "--url", "http://[::1"], "--url must look like http://127.0.0.1:8000"),
        (["explain", "--url", "http://127.0.0.1:99999"], "--url must look like http://127.0.0.1:8000"),
        (["status", "--interval-s", "x"], "--interval-s must be a number, got 'x'"),
        (["chat", "--load", "/nowhere"], "cannot read /nowhere"),
        (["generate", "x", "--temperature", "-1", *ADDRESS], "temperature"),
        (["generate", "x", "--address", ""], "address must be host:port"),
        (["generate", "x", "--timeout-s", "-1"], "timeout must be positive"),
        (["drain", "d", "--wait-s", "-1"], "--wait-s must be between 0 and 86400"),
        (["scale", "prefill=x"], "targets look like prefill=3 decode=1"),
        (["autoscale", "--scale-kv", "2"], "scale_kv must be above 0 and at most 1, got 2.0"),
        (["autoscale", "--scale-max-instances", "4"], "instances cannot be started"),
        (["autoscale", "--kubernetes-prefill", "x"], "give --kubernetes-decode, too"),
        (["autoscale", "-f", "{folder}/auto.yaml"], "auto.yaml:3: scale_kv"),
        (["autoscale", *ADDRESS], "start one with baton up"),
        (["kvstore", "tenants", "x"], "'x' is not HOST:PORT"),
        (["kvstore", "tenants", "127.0.0.1:9"], "is a baton-kvstore running there?"),
        (["config", "show", "--service", "nobody"], "--service must be one of router, prefill, decode"),
        (["bench", "serve", "--slo", "x"], "slo"),
        (["bench", "serve", "--requests", "1", *NOBODY], "127.0.0.1:9"),
        (["bench", "offline", "--isl", "0"], "isl must be between 1"),
        (["bench", "router", "/nowhere"], "/nowhere"),
        (["completion", "fish"], "there is no 'fish'"),
    ],
)
def test_it_is_one_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "auto.yaml").write_text("autoscale:\n  enabled: true\n  flags: {scale-kv: 7}\n")
    (tmp_path / "maybe.yaml").write_text("autoscale:\n  enabled: maybe\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    try:
        status = main([word.format(folder=tmp_path) for word in words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert status in (1, 2)
    assert told in err
    assert err.startswith("baton " + words[0])
    assert err.count("\n") == 1
    assert out == ""
