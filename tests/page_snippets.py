"""The blocks of code in the pages for people, and the commands that are typed in them.

A block is run by a test unless its fence says why not: ```` ```console {not_run="a GPU"} ````. What
a reader is taken to have, such as `prompts`, stands above a block in a comment that no page shows:

    <!-- given
    prompts = [[1, 2], [3, 4]]
    -->
"""

import ast
import asyncio
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"^(?P<fence>```+)(?P<language>\w*)(?: \{not_run=\"(?P<reason>[^\"]+)\"\})?(?P<rest>.*)\n"
    r"(?P<code>(?:.*\n)*?)(?P=fence)$"
    r"|^<!-- given\n(?P<given>(?:.*\n)*?)-->$",
    re.MULTILINE,
)
PYTHON, SHELL = frozenset({"python"}), frozenset({"console", "sh", "bash"})
PROMPT = "$ "


@dataclass(frozen=True)
class Snippet:
    """One block of one page."""

    page: str
    """Relative to the repository."""
    line: int
    """Of its first line of code, from 1."""
    language: str
    """`given` if no reader sees it."""
    code: str
    not_run: str
    """Why no test runs it; empty: one does."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """What is typed, in order; a command may have several lines. Not what is printed."""
        if self.language not in SHELL:
            return []
        found: list[str] = []
        for line in self.code.splitlines():
            if found and found[-1].endswith("\\"):
                found[-1] += f"\n{line}"
            elif line.startswith(PROMPT) or self.language != "console":
                found.append(line.removeprefix(PROMPT))
        return [each for each in found if each.strip() and not each.startswith("#")]


def pages() -> list[str]:
    """Every page with text for people, relative to the repository."""
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(each.relative_to(ROOT).as_posix() for each in texts)


def snippets_of(page: str) -> list[Snippet]:
    """The blocks of a page, in order, those that no reader sees among them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return list(_found_in(page, text))


def _found_in(page: str, text: str) -> Iterator[Snippet]:
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        if found["given"] is not None:
            yield Snippet(page, line, "given", found["given"], "")
            continue
        assert not found["rest"].strip(), (
            f"{page}:{line}: a fence says its language, and perhaps not_run"
        )
        yield Snippet(page, line, found["language"], found["code"], found["reason"] or "")


def words_of(command: str) -> list[str]:
    """A command's words, without its comment and without what becomes of its output."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    for end in ("|", "&&", ";"):
        if end in words:
            words = words[: words.index(end)]
    return [each for each in words if not each.startswith(">")]


async def run_python(snippet: Snippet, text: str, names: dict[str, Any]) -> None:
    """Run a block, in a thread of its own where it awaits nothing.

    Args:
        snippet: the block; errors name its page and line.
        text: its code, with the addresses of this machine.
        names: what it finds, and what it leaves behind.
    """
    at_its_line = "\n" * (snippet.line - 1) + text
    code = compile(at_its_line, snippet.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, names)  # noqa: S307 - the code of our own pages
    else:
        await asyncio.to_thread(eval, code, names)
