"""Chats: a function's name and docstring make the request, its source is the answer."""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator

from .corpus import Sources

Chat = list[dict[str, str]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant that writes Python code.",
    "You write Python functions.",
    "You are an expert Python programmer. Answer with code only.",
    "Answer with a single Python function.",
    "You are a coding assistant. Be brief.",
)

# A docstring that begins with one of these is a command: "Return the sum." becomes "returns the sum".
VERB_LIST = """
accept add append apply ask assert assign build calculate call change check clean clear close compare compile compute
connect construct convert copy count create decode decorate define delete determine disable discard display do dump
emit enable encode end ensure enter escape evaluate execute exit expand extend extract fetch fill filter find fix flush
force format generate get give handle help ignore indicate initialize insert install invoke issue iterate join list
load locate log look make map mark match merge move normalize notify open output parse perform pop prepare print
process produce provide push put quote raise read receive record register release remove rename render replace report
reset resolve restore retrieve return reverse run save scan search seek select send set show shut shutdown sort split
start stop store strip swap switch take test transform translate truncate try turn unregister update use validate wait
walk wrap write yield
"""
VERBS = frozenset(VERB_LIST.split())


def parses(source: str) -> bool:
    """Tell whether a text is a Python program."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def extract_functions(text: str, max_chars: int) -> Iterator[tuple[FunctionNode, str | None, str]]:
    """Find the functions of a module that do something in at most ``max_chars`` characters.

    Yields:
        The function, the class that owns it (None for a plain function), its dedented source with decorators.
    """
    if not parses(text):
        return
    lines = text.splitlines(keepends=True)

    def visit(node: ast.AST, owner: str | None) -> Iterator[tuple[FunctionNode, str | None, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, child.name)
            elif isinstance(child, ast.If | ast.Try):
                yield from visit(child, owner)
            elif isinstance(child, FunctionNode):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                source = textwrap.dedent("".join(lines[first - 1 : child.end_lineno]))
                body = child.body[1:] if (ast.get_docstring(child) or "").strip() else child.body
                trivial = not body or (len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise))
                if not trivial and len(source) <= max_chars and parses(source):
                    yield child, owner, source.strip("\n")

    yield from visit(ast.parse(text), None)


def third_person(summary: str) -> str | None:
    """Turn ``"Return x."`` into ``"returns x"``; None when it does not start with a known verb."""
    first, _, rest = summary.rstrip(" .").partition(" ")
    word = first.lower()
    if word not in VERBS:
        return f"{word} {rest}".strip() if word.removesuffix("s") in VERBS else None
    if word.endswith(("sh", "ch", "x", "o", "ss")):
        word += "es"
    elif word.endswith("y") and word[-2:-1] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return f"{word} {rest}".strip()


def make_request(function: FunctionNode, owner: str | None, summary: str, rng: random.Random) -> str:
    """Write the user message that a function answers."""
    name, call = function.name, f"{function.name}({ast.unparse(function.args)})"
    kind, where = ("method", f" for the class `{owner}`") if owner else ("function", "")
    action = third_person(summary)
    if action:
        forms = [
            f"Write a {kind} `{name}`{where} that {action}.",
            f"Write a {kind} `{name}`{where} that {action}.",  # twice as often as the others
            f"Write a {kind} `{call}`{where} that {action}.",
            f"Write a Python {kind}{where} that {action}.",
            f"Please write a Python {kind} called {name}{where} that {action}.",
        ]
    elif summary:
        forms = [f"Write a {kind} `{name}`{where}: {summary}", f"Write a {kind} `{call}`{where}. {summary}"]
    else:
        forms = [f"Write a {kind} `{name}`{where}.", f"Write a {kind} `{call}`{where}."]
    return rng.choice(forms)


def build_conversations(sources: Sources, max_chars: int, seed: int) -> list[Chat]:
    """Turn the functions of some modules into chats of one or, now and then, two exchanges."""
    rng = random.Random(seed)
    exchanges: list[Chat] = []
    for text in sources.values():
        for function, owner, source in extract_functions(text, max_chars):
            paragraph = (ast.get_docstring(function) or "").strip().split("\n\n")[0]
            summary = paragraph.replace("\n", " ").strip()[:200]
            # Undocumented methods say little about what was asked: keep a third.
            if not summary and owner and rng.random() > 0.34:
                continue
            request = {"role": "user", "content": make_request(function, owner, summary, rng)}
            exchanges.append([request, {"role": "assistant", "content": source}])
    rng.shuffle(exchanges)
    chats: list[Chat] = []
    while exchanges:
        chat = exchanges.pop()
        if exchanges and rng.random() < 0.08:
            chat += exchanges.pop()
        if rng.random() < 0.3:
            chat.insert(0, {"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
        chats.append(chat)
    return chats
