"""Counts what has to be read: files and lines of the product's Python, of tests, of native code and of documents."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("src", "services", "kernels")
BESIDE = ("src/baton_bench/", "src/baton/autoscale/", "src/baton/quantize/")
"""Tools beside the serving part: benchmarks and planner, the autoscaler, quantization of checkpoints."""
GENERATED = "src/baton/api/v1/"


def tracked(*patterns: str) -> list[Path]:
    """Return the tracked files under folders, or of patterns."""
    command = ["git", "ls-files", "--", *patterns]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / line for line in output.splitlines() if (ROOT / line).exists()]


def count_lines(files: list[Path]) -> int:
    """Return the lines of all files together."""
    return sum(len(path.read_bytes().splitlines()) for path in files)


def count_parts(files: list[Path]) -> dict[str, int]:
    """Return the lines of modules by kind: blank, comment, docstring, import, code."""
    counts = dict.fromkeys(("blank", "comment", "docstring", "import", "code"), 0)
    for path in files:
        lines = path.read_text().splitlines()
        kinds = dict.fromkeys(range(1, len(lines) + 1), "code")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                kinds[number] = "blank"
            elif line.lstrip().startswith("#"):
                kinds[number] = "comment"
        for node in ast.walk(ast.parse(path.read_text())):
            kind = ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                kind = "import"
            elif (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                kind = "docstring"
            if kind:
                kinds.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), kind))
        for kind in kinds.values():
            counts[kind] += 1
    return counts


def main() -> int:
    """Print the counts."""
    product = [path for path in tracked(*PRODUCT) if path.suffix == ".py"]
    own = [path for path in product if GENERATED not in str(path)]
    serving = [path for path in own if not str(path.relative_to(ROOT)).startswith(BESIDE)]
    rows = {
        "product Python": product,
        "  without generated code": own,
        "  serving part": serving,
        "tests": [path for path in tracked("tests") if path.suffix == ".py"],
        "benchmarks": [path for path in tracked("benchmarks") if path.suffix == ".py"],
        "C": tracked("native/*.c", "native/*.h"),
        "C++": tracked("kernels/*.cpp", "kernels/*.h"),
    }
    for name, files in rows.items():
        print(f"{name}: {len(files)} files, {count_lines(files)} lines")
    print("product Python without generated code, in lines:", count_parts(own))
    words = sum(len(path.read_text().split()) for path in tracked("docs/*.md"))
    sizes = {name: (ROOT / name).stat().st_size for name in ("README.md", "CHANGELOG.md")}
    print(f"docs: {words} words; bytes: {sizes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
