"""``baton completion``: a script that completes commands and flags in a shell.

The script contains all commands and flags; asking this program at every key press would take its start-up time, about a
second.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator

_FUNCTION = """\
_baton() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} path=baton word words= hidden=
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path/$word" in
            {paths}) path=$path/$word;;
        esac
    done
    case "$path $prev" in
{choices}
    esac
    if [ -z "$words" ]; then
        case "$path" in
{flags}
        esac
    fi
    [[ $cur == -* ]] || hidden='-*'
    COMPREPLY=($(compgen -W "$words" -X "$hidden" -- "$cur"))
    [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$cur"))
}}
complete -o filenames -F _baton baton
"""
_PLAIN = re.compile(r"[\w./:+,-]+")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser) -> None:
    """Declare the command.

    Args:
        commands: Subparsers to which the command is added.
        whole: Parser of the whole command line.
    """
    parser = commands.add_parser(
        "completion",
        help="print what a shell completes the command line with",
        epilog='bash: eval "$(baton completion bash)" in ~/.bashrc; zsh: eval "$(baton completion zsh)" in ~/.zshrc',
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="for which shell")
    parser.set_defaults(run=lambda args: _print(whole, args.shell))


def _print(parser: argparse.ArgumentParser, shell: str) -> int:
    head = (
        "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    )
    sys.stdout.write(head + script(parser))
    return 0


def script(parser: argparse.ArgumentParser) -> str:
    """Return a shell function that completes the commands and flags of a parser."""
    all_commands = list(_walk(parser, "baton"))
    paths = [path for path, _, _ in all_commands if path != "baton"]
    choices = [
        f"        {shlex.quote(f'{path} {flag}')}) words={shlex.quote(' '.join(values))};;"
        for path, _, flags in all_commands
        for flag, values in flags.items()
    ]
    flags = [f"            {path}) words={shlex.quote(' '.join(words))};;" for path, words, _ in all_commands]
    return _FUNCTION.format(paths="|".join(paths), choices="\n".join(choices), flags="\n".join(flags))


def _walk(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str], dict[str, tuple[str, ...]]]]:
    """Yield each command: its path, such as ``baton/bench/kv``, the words that may follow, and its flags' values."""
    words: list[str] = []
    choices: dict[str, tuple[str, ...]] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            words += below
            continue
        words += [flag for flag in action.option_strings if flag.startswith("--")]
        values = tuple(str(value) for value in action.choices or () if _PLAIN.fullmatch(str(value)))
        choices |= {flag: values for flag in action.option_strings if values}
        if not action.option_strings:
            words += values
    yield path, words, choices
    for name, child in below.items():
        yield from _walk(child, f"{path}/{name}")
