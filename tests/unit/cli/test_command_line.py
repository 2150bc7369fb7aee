"""Mistakes are one line with the nearest that there is; what shells complete; talking to a router."""

from __future__ import annotations

import io
import json
import subprocess

import pytest

from baton.cli import completion
from baton.cli.main import main
from baton.cli.parser import CommandParser
from baton.cli.status import render
from baton.errors import QueueFullError
from baton.testing import Asked, FakeRouter


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sttus"], "baton: error: there is no 'sttus'; did you mean status? (see baton --help)\n"),
        (["up", "--ratoi", "2P"], "baton up: error: there is no flag --ratoi; did you mean --ratio? (see baton up"
         " --help)\n"),
        (["bench", "serv"], "baton bench: error: there is no 'serv'; did you mean serve? (see baton bench --help)\n"),
        (["up", "--audit-log", "x"], "baton up: error: there is no flag --audit-log: give it in --router-args or"
         " --prefill-args or --decode-args, as '--audit-log ...' (see baton up --help)\n"),
        (["up", "--beta=1"], "baton up: error: there is no flag --beta: give it in --router-args, as '--beta ...' (see"
         " baton up --help)\n"),
        (["up", "--tensor-parallel-size", "2"], "baton up: error: there is no flag --tensor-parallel-size: give --tp"
         " (see baton up --help)\n"),
        (["up", "-tp", "2"], "baton up: error: there is no flag -tp: give --tp (see baton up --help)\n"),
        (["up", "Qwen/Qwen3-0.6B"], "baton up: error: there is no argument Qwen/Qwen3-0.6B: give --model"
         " Qwen/Qwen3-0.6B (see baton up --help)\n"),
        (["up", "--hots", "x"], "baton up: error: there is no flag --hots; did you mean --host? (see baton up"
         " --help)\n"),
        (["up", "--frobnicate"], "baton up: error: there is no flag --frobnicate (see baton up --help)\n"),
        (["serve", "Qwen/Qwen3-0.6B"], "baton: error: there is no 'serve': baton up --model MODEL serves a model (see"
         " baton --help)\n"),
        (["completion", "fish"], "baton completion: error: there is no 'fish'; there are bash, zsh (see baton"
         " completion --help)\n"),
        (["chat", "more"], "baton chat: error: there is no argument more (see baton chat --help)\n"),
        (["drain"], "baton drain: error: the following arguments are required: INSTANCE (see baton drain --help)\n"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("words", [["status"], ["explain"], ["generate", "hi"], ["drain", "d0"], ["scale", "decode=1"]])
def test_a_router_that_is_not_there_is_a_line_with_a_hint(words, capsys):
    where = ["--url", "http://127.0.0.1:9"] if words[0] in ("status", "explain") else ["--address", "127.0.0.1:9"]
    assert main([*words, *where]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"baton {words[0]}: ")
    assert "start one with baton up" in err
    assert err.count("\n") == 1


def complete(script: str, *words: str) -> list[str]:
    given = " ".join(f"'{word}'" for word in words)
    lines = f"{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _baton; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout.split()


def test_completion(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "baton", "st") == ["status"]
    assert complete(script, "baton", "bench", "se") == ["serve"]
    assert complete(script, "baton", "bench", "serve", "--dataset", "sha") == ["shared-prefix", "sharegpt"]
    assert complete(script, "baton", "up", "--rat") == ["--ratio"]
    assert complete(script, "baton", "kvstore", "") == ["tenants", "clear"]
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X compinit")


def test_completion_knows_every_parser():
    parser = CommandParser(prog="baton")
    below = parser.add_subparsers(dest="what")
    below.add_parser("one").add_argument("--colour", choices=("red", "blue"))
    assert complete(completion.script(parser), "baton", "one", "--colour", "b") == ["blue"]


def test_generate(capsys, monkeypatch):
    with FakeRouter(lambda asked: ["an ", "answer"]) as router:
        assert main(["generate", "a prompt", "--max-tokens", "7", "--seed", "3", "--address", router.address]) == 0
        assert capsys.readouterr().out == "an answer\n"
        monkeypatch.setattr("sys.stdin", io.StringIO("from a file"))
        assert main(["generate", "-", "--json", "--address", router.address]) == 0
        found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"], found["token_ids"]) == ("an answer", "stop", [1, 2])
    assert [(x.prompt, x.max_tokens, x.seed) for x in router.requests] == [
        ("a prompt", 7, 3),
        ("from a file", None, None),
    ]


def test_chat_remembers(capsys, monkeypatch, tmp_path):
    def reply(asked: Asked) -> str:
        return f"answer {len(asked.prompt)}"

    saved = tmp_path / "talk.json"
    lines = f"hello\n\nagain\n/undo\nonce more\n/save {saved}\n/reset\nanew\n/quit\nnot asked\n"
    with FakeRouter(reply) as router:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["chat", "--system", "be short", "--address", router.address]) == 0
        out = capsys.readouterr().out
        assert [line for line in out.splitlines() if line] == ["answer 2", "answer 4", "answer 4", "answer 2"]
        assert [message["content"] for message in json.loads(saved.read_text())] == [
            "be short", "hello", "answer 2", "once more", "answer 4",
        ]  # fmt: skip
        assert [x.prompt[-1]["content"] for x in router.requests] == ["hello", "again", "once more", "anew"]
        monkeypatch.setattr("sys.stdin", io.StringIO("go on\n"))
        assert main(["chat", "--load", str(saved), "--stats", "--address", router.address]) == 0
        assert "answer 6" in capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", io.StringIO("/nonsense\n"))
        assert main(["chat", "--address", router.address]) == 2
        assert "there is no /nonsense" in capsys.readouterr().err
    saved.write_text("{}")
    assert main(["chat", "--load", str(saved)]) == 2
    assert "is no list of messages" in capsys.readouterr().err


def test_a_refusal_is_a_line(capsys):
    with FakeRouter(QueueFullError("everybody is full")) as router:
        assert main(["generate", "x", "--address", router.address]) == 1
    assert capsys.readouterr().err == "baton generate: everybody is full\n"


def test_what_a_terminal_obeys_does_not_reach_it(capsys, monkeypatch):
    evil = "\x1b]0;owned\x07\x9b2J\x7f\r\n\tkept\u200d"
    shown = "\ufffd]0;owned\ufffd\ufffd2J\ufffd\n\tkept\u200d"
    with FakeRouter(lambda asked: [evil]) as router:
        where = ["--address", router.address]
        assert main(["generate", "x", *where]) == 0
        assert capsys.readouterr().out == f"{evil}\n", "a pipe gets what was generated"
        assert main(["generate", "x", "--json", *where]) == 0
        out = capsys.readouterr().out
        assert json.loads(out)["text"] == evil
        assert [x for x in out if not x.isprintable() and x not in "\n\u200d"] == []
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(["chat", *where]) == 0
        assert capsys.readouterr().out.expandtabs() == f"{shown}\n".expandtabs()
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        assert main(["generate", "x", *where]) == 0
        assert capsys.readouterr().out == f"{shown}\n"
    with FakeRouter(QueueFullError(evil)) as router:
        assert main(["generate", "x", "--address", router.address]) == 1
    assert capsys.readouterr().err == f"baton generate: {shown}\n"


def test_status_shows_what_a_router_says(capsys):
    from rich.console import Console

    index = {"state": "exact"}
    shared = {"in_flight": 2, "running": 1, "waiting": 0, "loading": 0, "blocks_total": 100, "blocks_active": 95,
              "blocks_cached": 40, "index": index, "reason": None, "status": "ready", "draining": False}  # fmt: skip
    found = {
        "model": "tiny\x1b[31m", "policy": "match_minus_load", "running": 3, "queued": 4, "seen": 9,
        "now": {"hit_rate": 0.25, "requests_per_s": 1.5, "tokens_per_s": None, "failed": 0.0, "ttft_ms": None,
                "itl_ms": {"p50": 10.0, "p99": 20.0}},
        "instances": [shared | {"id": "d0", "role": "decode", "draining": True},
                      shared | {"id": "p0", "role": "prefill"}],
    }  # fmt: skip
    Console(width=140).print(render(found))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.index("p0") < out.index("d0")
    for text in ("4 queued", "hit rate 25%", "1.5 requests/s", "ITL 10 / 20 ms", "draining", "95%", "40%"):
        assert text in out, text
