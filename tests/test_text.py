"""Style of README, CONTRIBUTING, docs and refusals: lengths, private words, and units in tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ("commands.md",)
"""Reference pages that a command prints; they may have any length."""
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
MAX_PAGE_WORDS = 1500
MAX_SENTENCE_WORDS = 25
PRIVATE_WORDS = re.compile(
    r"\b(rooms?|storeys?|houses?|things?|doubts?|doubted|circles?|beside|looks?|looked|looking|said|told|kept|gone|anew)\b",
    re.IGNORECASE,
)
"""Everyday words that a technical word replaces, from the style guide without "whole", which is usual English."""
NUMBER = re.compile(r"[≤≥<>~+-]?\d[\d,.]*(e-?\d+)?(( to |, | and |; )[+-]?\d[\d,.]*)*( \(.*\))?")
UNIT = re.compile(r"\([^)]+\)|%|\b(per|over|of|share|mean|factor|tolerance|deviation)\b")
"""What tells the unit of a column: a unit in parentheses, a percentage, or a quotient that the header names."""
COUNT = re.compile(r"(rates|steps|forward|backward|default|value)\b")
"""Beginning of the header of a column of counts, or of a column whose lines name their own units."""
VALUE_WITH_UNIT = re.compile(r"\d ?(%|x\b|[A-Za-z]*B\b|[PTG]?FLOP|[mu]?s\b|samples|GPUs|layers)|\([^)]*\)")
"""A unit in another cell of the line."""


def prose(page: Path) -> Iterator[str]:
    """Yield the paragraphs and list items of a page without code, tables and headings; links as their text."""
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^(    .*|\|.*|#.*)$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        plain = re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split()))
        if plain:
            yield re.sub(r"`[^`]*`", "CODE", plain)


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the header and the lines of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8") + "\n", re.MULTILINE):
        lines = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            for line in block.splitlines()
        ]
        yield lines[0], lines[2:]


def texts(page: Path) -> Iterator[str]:
    """Yield the paragraphs, list items and table cells of a page, with `CODE` for code."""
    yield from prose(page)
    for head, body in tables(page):
        for cell in (cell for line in (head, *body) for cell in line):
            yield re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", cell))


def words(text: str) -> list[str]:
    return re.findall(r"\S*\w\S*", text)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name
)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    text = re.sub(
        r"!\[[^\]]*\]|\]\([^)]*\)|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert len(words(text)) <= MAX_PAGE_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_sentence_has_at_most_25_words(page: Path) -> None:
    sentences = [s for text in texts(page) for s in re.split(r"(?<=[.!?:;])\s+", text)]
    assert [s for s in sentences if len(words(s)) > MAX_SENTENCE_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_private_words(page: Path) -> None:
    found = [(match[0], text) for text in texts(page) for match in PRIVATE_WORDS.finditer(text)]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headers_of_numbers_name_their_unit(page: Path) -> None:
    missing = []
    for head, body in tables(page):
        for line in body:
            for column, cell in list(enumerate(line))[1:]:
                others = [other for at, other in enumerate(line) if at != column]
                is_named = (
                    UNIT.search(head[column]) or COUNT.match(head[column]) or head[0].startswith("ratio")
                )
                if NUMBER.fullmatch(cell) and not is_named and not any(map(VALUE_WITH_UNIT.search, others)):
                    missing.append((head[column], cell))
    assert missing == []


def refusals(module: Path) -> Iterator[str]:
    """Yield the texts that a module raises, and its constants that are sentences; `X` for a value in a text."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        raised = node.exc.args if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else []
        for value in [*raised, *([node.value] if isinstance(node, ast.Assign) else [])]:
            if isinstance(value, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "X" for part in value.values
                )
            elif isinstance(value, ast.Constant) and " " in str(value.value):
                yield str(value.value)


@pytest.mark.parametrize("folder", ["repro/wrap", "repro/parallel/zero"])
def test_a_refusal_has_two_plain_sentences(folder: str) -> None:
    texts = [text for module in sorted((ROOT / folder).glob("*.py")) for text in refusals(module)]
    assert len(texts) > 4
    for text in texts:
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
        assert len(sentences) <= 2, text
        assert max(len(words(sentence)) for sentence in sentences) <= MAX_SENTENCE_WORDS, text
        assert not PRIVATE_WORDS.search(text), text
