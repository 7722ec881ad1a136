"""Gives the site the pages that lie outside of docs/, and turns links for it; mkdocs calls this.

README.md is the home page. On a code host it and its links are read where they are, so a link from
there into docs/ loses that folder here; one to a source file, which the site has not, becomes text.
"""

import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the repository -> page of the site."""
LINK = re.compile(
    r"(?P<is_picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
)


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - mkdocs' own types are not installed where types are checked
    """Adds the pages."""
    # mkdocs is an optional dependency; the rest of this module is tested without it.
    structure: Any = importlib.import_module("mkdocs.structure.files")
    for source, page in PAGES.items():
        text = with_links_of_site((ROOT / source).read_text(encoding="utf-8"), ".")
        files.append(structure.File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401 - as above
    """Turns the links of a page that lies in docs/."""
    path = page.file.src_uri
    if path in PAGES.values():
        return markdown
    return with_links_of_site(markdown, posixpath.join("docs", posixpath.dirname(path)))


def with_links_of_site(markdown: str, folder: str) -> str:
    """The page with its links as the site needs them.

    Args:
        markdown: of the page.
        folder: where the page lies in the repository; `.` is its root.
    """

    def turned(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        page = PAGES.get(path) or _page_in_docs(path)
        if page is None:
            return link["text"]
        here = posixpath.relpath(page, _folder_in_site(folder))
        return f"{link['is_picture']}[{link['text']}]({here}{anchor})"

    return LINK.sub(turned, markdown)


def _page_in_docs(path: str) -> str | None:
    inside = path.removeprefix("docs/")
    return inside if inside != path and (ROOT / path).is_file() else None


def _folder_in_site(folder: str) -> str:
    return posixpath.normpath(posixpath.relpath(folder, "docs")) if folder != "." else "."
