"""What a command raises is told in one line, with the documented exit status, whichever command it is."""

from __future__ import annotations

import pytest

from baton.cli.main import main
from baton.errors import ConfigError, UnavailableError


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ConfigError("no such model", field="model"), 2, "baton demo: error: no such model\n"),
        (UnavailableError("decode-0 was not ready"), 1, "baton demo: decode-0 was not ready\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_commands_error_is_a_line_and_a_status(error, status, told, monkeypatch, capsys):
    def fail() -> str:
        raise error

    monkeypatch.setattr("baton.cli.demo.default_model", fail)
    assert main(["demo"]) == status
    assert capsys.readouterr().err == told


def test_a_benchmark_is_named_with_its_group(capsys):
    assert main(["bench", "prefixes", "--dataset", "/nonexistent"]) == 2
    assert capsys.readouterr().err.startswith("baton bench prefixes: error: cannot read /nonexistent")


@pytest.mark.parametrize("flag", ["--router-args", "--prefill-args", "--decode-args"])
def test_flags_for_a_role_that_cannot_be_split_are_named(flag, capsys):
    assert main(["up", flag, "--api-keys 'one"]) == 2
    assert capsys.readouterr().err == f"baton up: error: {flag}: No closing quotation\n"


@pytest.mark.parametrize(
    ("flag", "words", "told"),
    [
        ("--prefill-args", "--max-num-seqs 2 --port 9", "--port is set by baton up itself"),
        (
            "--decode-args",
            "--metrics-port=9",
            "--metrics-port is set by baton up itself; give --metrics-port to",
        ),
        ("--decode-args", "--instance x", "--instance-id is set by baton up itself"),
        ("--prefill-args", "--host 0.0.0.0", "--host is set by baton up itself; give --instance-host to baton up"),
        ("--router-args", "--host 0.0.0.0", "--host is set by baton up itself; give --host to baton up"),
        ("--router-args", "--grpc-port 0", "--grpc-port is set by baton up itself; give --grpc-port to baton up"),
        ("--router-args", "--token-file", "--token-file is set by baton up itself; give --token-file to baton up"),
    ],
)
def test_flags_that_the_supervisor_owns_are_refused_by_name(flag, words, told, capsys):
    assert main(["up", f"{flag}={words}"]) == 2
    assert capsys.readouterr().err.startswith(f"baton up: error: {flag}: {told}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port", "80000"], "port must be between 0 and 65535, got 80000"),
        (["--grpc-port", "-1"], "grpc_port must be between 0 and 65535, got -1"),
        (["--model", "/typo"], "/typo is neither a directory with a model in it nor a GGUF file"),
    ],
)
def test_ports_and_models_that_cannot_be_are_told_before_anything_starts(words, told, capsys):
    assert main(["up", *words]) == 2
    assert capsys.readouterr().err == f"baton up: error: {told}\n"
