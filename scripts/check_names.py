"""Checks that names and parameter docs can be understood without reading the code.

Three rules, for the product's Python (``src``, ``services``, ``kernels``):

* A line of ``Args:`` or ``Attributes:`` names the thing, its unit and its bounds: ``layers: Number of decoder
  layers.``, never ``layers: Of them.``
* A function's name has an object: ``append_tokens``, never ``take``.
* Docstrings, comments, messages and docs use plain technical English.

``--count`` prints how much there is of each, and of what the rules do not forbid but reviews look at.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("src", "services", "kernels")
GENERATED = "src/baton/api/v1/"
RIDDLE = re.compile(r"(Of|It|Its|Whose|Those|Which|What)\b")
RIDDLE_WORDS = 7
"""A parameter's line that begins with one of these and has at most so many words in its first sentence is a riddle."""
SECTIONS = ("Args:", "Attributes:")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):\Z")
ENTRY = re.compile(r"([a-z_][\w, *`.]*): (.+)\Z")
BARE_VERBS = frozenset(
    {"take", "leave", "left", "hold", "held", "ended", "came", "come", "told", "tell", "found", "put", "go", "gone"}
    | {"went", "do", "give", "gave", "given", "keep", "kept"}
)
"""Names that say nothing without an object; with leading underscores, too."""
QUAINT = re.compile(
    r"\b(whoever|whosever|whomever|nobody|somebody|everybody|in vain|anew|tells? of|told of|hears? of|heard of|"
    r"see to it|by itself alone|withal|thereof|therein|lest|hitherto)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule.

    Attributes:
        path: File, relative to the repository's root.
        line: Line number, from 1.
        rule: Name of the rule: ``riddle``, ``verb``, ``quaint``; with ``--count`` also those that are only counted.
        text: The line or name.
    """

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def tracked_files(*patterns: str) -> list[str]:
    """Return the tracked files, and new ones that git does not ignore, that match any of git's path patterns."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in sorted(set(output.splitlines())) if (ROOT / path).exists()]


def find_in_docstring(path: str, first_line: int, docstring: str) -> Iterator[Finding]:
    """Yield the parameter lines of a docstring that are riddles."""
    section = ""
    for offset, raw in enumerate(docstring.splitlines()):
        text = raw.strip()
        if SECTION.match(text):
            section = text
            continue
        entry = ENTRY.match(text) if section in SECTIONS else None
        if entry is None or not RIDDLE.match(entry[2]):
            continue
        sentence = re.split(r"[.;](?:\s|\Z)", entry[2])[0]
        if len(sentence.split()) <= RIDDLE_WORDS:
            yield Finding(path, first_line + offset, "riddle", text)


def find_in_module(path: str, *, count: bool) -> Iterator[Finding]:
    """Yield what breaks a rule in one file; ``count``: also what is only counted."""
    source = (ROOT / path).read_text()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                constant = node.body[0]
                yield from find_in_docstring(path, constant.lineno, docstring)
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if count and is_function and len(docstring.split()) <= 4:
                    yield Finding(path, constant.lineno, "short docstring", docstring.strip())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in BARE_VERBS:
            yield Finding(path, node.lineno, "verb", node.name)
        if count:
            yield from _find_counted(path, node)
    for number, line in enumerate(source.splitlines(), 1):
        if match := QUAINT.search(line):
            yield Finding(path, number, "quaint", match[0])


def _find_counted(path: str, node: ast.AST) -> Iterator[Finding]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield Finding(path, node.lineno, "tuple assignment", ast.unparse(node)[:100])
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        splat = [each for each in node.elts if isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple)]
        yield from (Finding(path, each.lineno, "splat", ast.unparse(each)[:100]) for each in splat)
    if isinstance(node, ast.Name | ast.arg):
        name = node.id if isinstance(node, ast.Name) else node.arg
        if name in {"found", "mine", "theirs", "ours"} and not isinstance(getattr(node, "ctx", None), ast.Load):
            yield Finding(path, node.lineno, "vague local", name)


def find_in_text(path: str) -> Iterator[Finding]:
    """Yield quaint words of a page."""
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if match := QUAINT.search(line):
            yield Finding(path, number, "quaint", match[0])


def main() -> int:
    """Print what breaks a rule; exit with 1 if anything does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or folders; default: the product's Python, and docs")
    parser.add_argument("--count", action="store_true", help="also find what is only counted, and print the counts")
    args = parser.parse_args()
    modules = tracked_files(*(args.paths or PRODUCT))
    findings = [
        finding
        for path in modules
        if path.endswith(".py") and not path.startswith(GENERATED)
        for finding in find_in_module(path, count=args.count)
    ]
    pages = tracked_files(*(args.paths or ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")))
    findings += [finding for path in pages if path.endswith(".md") for finding in find_in_text(path)]
    for finding in findings:
        print(finding)
    if args.count:
        print(dict(Counter(finding.rule for finding in findings)), file=sys.stderr)
        return 0
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
