"""Every citation in the repository leads to a heading, a number or an id in docs/ (docs/README.md has the forms)."""

import ast
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.pure

DOCS = ROOT / "docs"
NAMES = {
    "model.md": "model.md",
    "DB": "deepinfer.md",
    "deepinfer.md": "deepinfer.md",
    "JX": "jax.md",
    "jax.md": "jax.md",
    "design.md": "design.md",
    "field-reports.md": "field-reports.md",
}
"""How a document is called in front of the number of a section."""
LEAST = 350
"""The repository has more citations; fewer found means that the search is broken."""


@dataclass(frozen=True)
class Document:
    """What of a document can be cited: sections ("5.3", appendices as "A"), ids ("T12"), traps ("27")."""

    sections: frozenset[str]
    ids: frozenset[str]
    traps: frozenset[str]


@dataclass(frozen=True)
class Citation:
    """One citation as written, and why it leads nowhere; "" if it leads somewhere."""

    text: str
    problem: str = ""


def parse(text: str, traps_in: str = "") -> Document:
    """Headings; items of numbered lists, which count as subsections (in section `traps_in` as traps); ids."""
    sections, ids, traps, section = set(), set(), set(), ""
    for line in text.splitlines():
        if heading := re.match(r"#{2,4} (?:Appendix )?(\d+(?:\.\d+)*|[A-Z](?=\.))", line):
            section = heading[1]
            sections.add(section)
        elif item := re.match(r"(\d+)\. ", line):
            if section == traps_in:
                traps.add(item[1])
            else:
                sections.add(f"{section}.{item[1]}")
        elif row := re.match(r"(?:\| |- \*\*)([A-Z]{1,2}\d{1,2})(?: \||\*\*)", line):
            ids.add(row[1])
    return Document(frozenset(sections), frozenset(ids), frozenset(traps))


DOCUMENTS = {
    name: parse((DOCS / name).read_text(encoding="utf-8"), "15.2" if name == "deepinfer.md" else "")
    for name in set(NAMES.values())
}

_NUMBER = r"\d+(?:\.\d+)*"
_RANGE = r"\s?[-–…]\s?"
_LIST = rf"\d+(?:(?:{_RANGE}|, | and )\d+)*"
_SECTION = rf"§(?P<section>{_NUMBER})(?:{_RANGE}(?P<last>{_NUMBER}))?|(?P<bare>§)"
_APPENDIX = r"(?:Appendix|App\.) (?P<appendix>[A-Z])\b"
_CITATION = re.compile(
    rf"(?:(?P<name>[\w./-]+) )?(?:{_SECTION}|{_APPENDIX})(?:,? traps? (?P<traps>{_LIST}))?"
    rf"|\b[Tt]raps? (?P<lone>{_LIST})"
    r"|[Ff]ield reports? (?P<reports>[A-Z]{1,2}\d{1,2}(?:(?:, | and )[A-Z]{1,2}\d{1,2})*)"
    r"|\b(?P<id>TK\d{1,2}|[TAKLM]\d{1,2})\b"
)
_CONTINUES = re.compile(r"(?:,|;|:| and| or|, and|, or|/)? ?")


def citations(text: str, own: str = "") -> Iterator[Citation]:
    """The citations in a text. own: the document that it is, whose sections need no name."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # a link reads as its label
    text = re.sub(r"\s*\n[ \t]*(?:#:? |> )?\s*", " ", text).replace("`", "").replace("**", "")
    document, end = "", -1
    for match in _CITATION.finditer(text):
        cited = match[0]
        if match["reports"]:
            for report in re.findall(r"[A-Z]{1,2}\d{1,2}", match["reports"]):
                yield Citation(cited, _missing(report, DOCUMENTS["field-reports.md"].ids, "report", "field-reports.md"))
        elif match["id"]:
            source = "model.md" if match["id"][:2] != "TK" and match["id"][0] == "T" else "field-reports.md"
            yield Citation(cited, _missing(match["id"], DOCUMENTS[source].ids, "id", source))
        elif match["lone"]:
            known = DOCUMENTS["deepinfer.md"].traps
            for trap in re.findall(r"\d+", match["lone"]):
                problem = _missing(trap, known, "trap", own) if own == "deepinfer.md" else "a trap without DB §15.2"
                yield Citation(cited, problem)
        else:
            document = _document_of(match, document if _CONTINUES.fullmatch(text, end, _start(match)) else "", own)
            end = match.end()
            yield from _sections(match, document)


def _start(match: re.Match[str]) -> int:
    """Where a citation begins, the word in front of it left out unless it is a document's name."""
    return match.start() if match["name"] in NAMES else max(match.start(), match.end("name") + 1)


def _document_of(match: re.Match[str], previous: str, own: str) -> str:
    """Named in front of it, or that of the citation that it continues, or the text itself; "" if none is."""
    name = match["name"] or ""
    if name in NAMES:
        return NAMES[name]
    # A name that is none of ours: another file, or an abbreviation such as DB.
    if name.endswith(".md") or re.fullmatch(r"[A-Z]{2}", name):
        return ""
    return previous or own


def _sections(match: re.Match[str], document: str) -> Iterator[Citation]:
    if not document:
        yield Citation(match[0], "it names no document of docs/")
        return
    if match["bare"]:
        yield Citation(match[0], "a § without a number")
        return
    for section in (match["section"], match["last"], match["appendix"]):
        if section:
            yield Citation(match[0], _missing(section, DOCUMENTS[document].sections, "section", document))
    if match["traps"]:
        known = DOCUMENTS[document].traps if match["section"] == "15.2" else frozenset[str]()
        for trap in re.findall(r"\d+", match["traps"]):
            yield Citation(match[0], _missing(trap, known, "trap", f"{document} §{match['section']}"))


def _missing(name: str, known: frozenset[str], what: str, where: str) -> str:
    return "" if name in known else f"{where} has no {what} {name}"


def file_citations(path: Path) -> Iterator[Citation]:
    """Of Python: comments, docstrings, and other strings that name a section. Of a notebook its cells."""
    own = path.name if path.parent == DOCS and path.name in DOCUMENTS else ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) + "\n" for cell in json.loads(text)["cells"])
    if path.suffix != ".py":
        yield from citations(text, own)
        return
    for prose in [*_comments(text), *_docstrings(text)]:
        yield from citations(prose)
    if path != Path(__file__):  # its strings are examples, wrong ones too
        for string in _other_strings(text):
            yield from citations(string)


def _comments(text: str) -> Iterator[str]:
    """Runs of comments on neighbouring lines, each as one text."""
    run, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield run
                run = ""
            run, last = run + token.string.removeprefix("#") + "\n", token.start[0]
    yield run


def _docstrings(text: str) -> Iterator[str]:
    """Strings that stand alone as statements: docstrings, also those of constants."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _other_strings(text: str) -> Iterator[str]:
    """Strings with a section sign that are no docstrings, such as messages."""
    docstrings = set(_docstrings(text))
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and "§" in value and value not in docstrings:
            yield value


def tracked() -> list[Path]:
    """The files of the repository that may cite."""
    command = ["git", "ls-files", "-z", "*.py", "*.md", "*.toml", "*.ipynb"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_every_citation_leads_somewhere() -> None:
    found = [(path, citation) for path in tracked() for citation in file_citations(path)]
    broken = [f"{path.relative_to(ROOT)}: {c.text!r}: {c.problem}" for path, c in found if c.problem]
    assert not broken, "\n".join(broken)
    outside = [citation for path, citation in found if path.parent != DOCS]
    assert len(outside) >= LEAST


RIGHT = """
model.md §5.3 | (DB §1.4) | JX §0.5 | jax.md §6.6 | design.md §7 | model.md §15.11 | `model.md` §2.1 | model.md §2.2-2.4
T12 | A19 | TK3 | M1, K11; L7 | field report R11 | field reports R11 and E6
DB §15.2 trap 27 | DB §15.2 traps 16–19 | DB §5.5, §15.2 trap 22 | [design.md](docs/design.md) §6
model.md Appendix B | model.md §14 and Appendix B | model.md §5.9, Appendix A; design.md §6
"""
WRONG = """
model.md §99 | model.md §5.99 | model.md §2.2-2.9 | DB §99 | JX §0.99 | jax.md §9 | design.md §12 | DB §1.4 and §99
T99 | T0 | A99 | TK9 | K99 | L99 | M99 | field report R99 | field reports R11 and R99
DB §15.2 trap 99 | DB §15.2 traps 16–99 | DB §5.4 trap 3 | model.md §13 trap 3 | see trap 27
foo.md §3 | model.md §5.3, foo.md §5.3 | XY §1.1 | §5.3 | as §5.3 says | behaviour §1.7 | README §1 | model.md §
model.md Appendix Z | Appendix B | model.md §5.3. Then §5.4 | T12, §5.3
"""


def examples(text: str) -> list[str]:
    return [example.strip() for line in text.split("\n") for example in line.split("|") if example.strip()]


@pytest.mark.parametrize("text", [*examples(RIGHT), "model.md\n    §5.3", "model.md §5.2,\n§5.3"])
def test_right_citations_are_taken(text: str) -> None:
    found = list(citations(text))
    assert found and not [citation for citation in found if citation.problem]


@pytest.mark.parametrize("text", examples(WRONG))
def test_wrong_citations_are_refused(text: str) -> None:
    assert [citation for citation in citations(text) if citation.problem]


def test_sections_of_a_document_need_no_name_in_it_alone() -> None:
    assert not [citation for citation in citations("see §5.3", own="model.md") if citation.problem]
    assert [citation for citation in citations("see §5.3", own="design.md") if citation.problem]
    assert [citation for citation in citations("see foo.md §5.3", own="model.md") if citation.problem]


def test_the_documents_are_read_whole() -> None:
    """The numbers that their texts state."""
    assert {f"T{number}" for number in range(1, 46)} == DOCUMENTS["model.md"].ids
    assert {str(number) for number in range(1, 54)} == DOCUMENTS["deepinfer.md"].traps
    assert {str(number) for number in range(1, 12)} == DOCUMENTS["design.md"].sections - {
        section for section in DOCUMENTS["design.md"].sections if "." in section
    }
    assert {f"0.{number}" for number in range(1, 11)} < DOCUMENTS["jax.md"].sections
