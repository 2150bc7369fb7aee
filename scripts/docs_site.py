"""Hooks of mkdocs (``mkdocs.yml``): pages from outside of ``docs/``, and links that lead out of it.

CONTRIBUTING.md and CHANGELOG.md become pages of the site. Links to other files of the repository lead to
``BATON_DOCS_REPOSITORY`` (a URL that paths can be appended to), or become plain text where that is not set.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXTRA_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""By page of the site the file of the repository."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of ``docs/``."""
    from mkdocs.structure.files import File

    for page, name in EXTRA_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links of a page, outside of its code blocks."""
    path = page.file.src_uri
    place = EXTRA_PAGES.get(path, f"docs/{path}")
    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(part if part.startswith("```") else rewrite_links(part, path, place) for part in parts)


def rewrite_links(text: str, page: str, place: str) -> str:
    """Return a text whose links suit the site.

    Args:
        text: Markdown without code blocks.
        page: Path of the page in the site.
        place: Path of its file in the repository.
    """
    pages = {name: page for page, name in EXTRA_PAGES.items()}
    repository = os.environ.get("BATON_DOCS_REPOSITORY", "").rstrip("/")

    def rewrite(match: re.Match[str]) -> str:
        label, link = match[1], match[2]
        target, _, anchor = link.partition("#")
        if not target or re.match(r"[a-z]+:", link):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        in_site = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if in_site:
            relative = posixpath.relpath(in_site, posixpath.dirname(page) or ".")
            return f"[{label}]({relative}#{anchor})" if anchor else f"[{label}]({relative})"
        return f"[{label}]({repository}/{path})" if repository else label

    return LINK.sub(rewrite, text)
