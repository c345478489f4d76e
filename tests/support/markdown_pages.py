"""What the tests read in Markdown pages: Python snippets, headings and relative links."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)|^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class Snippet:
    """A block that is marked `python`. line: of its first line of code, counted from 1."""

    line: int
    code: str


def _split(text: str) -> tuple[list[Snippet], list[tuple[int, str]]]:
    """The Python snippets of a page, and its lines outside of all code blocks, with their numbers."""
    snippets, prose = list[Snippet](), list[tuple[int, str]]()
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if not (opening := _FENCE.match(line)):
            prose.append((number, line))
            continue
        code = list[str]()
        for _, inside in lines:
            if _closes(inside, opening[2]):
                break
            code.append(inside)
        if opening[3].strip() == "python":
            snippets.append(Snippet(number + 1, "\n".join(code) + "\n"))
    return snippets, prose


def _closes(line: str, fence: str) -> bool:
    """Whether a line ends the block that this fence opened: at least as many of the same characters, and no others."""
    return set(line.strip()) == {fence[0]} and len(line.strip()) >= len(fence)


def python_snippets(text: str) -> list[Snippet]:
    """The blocks of a page that are marked `python`, in order."""
    return _split(text)[0]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found = set[str]()
    for _, line in _split(text)[1]:
        if not (heading := re.match(r"^ {0,3}#{1,6} +(.*?)[ #]*$", line)):
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 1000))) if name not in found))
    return found


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere, each as "page:line: target: what is missing".

    A target must be a file or a folder; an anchor must be that of a heading of a Markdown page.
    """
    broken = []
    for number, line in _split(page.read_text(encoding="utf-8"))[1]:
        for link in _LINK.finditer(_INLINE_CODE.sub("", line)):
            target = link[1] or link[2]
            if _SCHEME.match(target):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists():
                problem = "there is no such file"
            elif anchor and (file.suffix != ".md" or anchor not in anchors(file.read_text(encoding="utf-8"))):
                problem = "the file has no such heading"
            else:
                continue
            broken.append(f"{page.name}:{number}: {target}: {problem}")
    return broken
