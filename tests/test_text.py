"""Tests of the style of pages, messages and docstrings: lengths, private words, and units in tables."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from repro.config.files import read_toml
from tests.structure import ROOT, sources

GENERATED = ("commands.md", "keys.md")
"""Reference pages that a command prints; they may have any length."""
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
MAX_PAGE_WORDS = 1500
MAX_README_WORDS = 900
MAX_SENTENCE_WORDS = 25
MAX_MODULE_SENTENCE_WORDS = 30
"""Limit in messages, docstrings and comments."""
PRIVATE_WORDS = re.compile(
    r"\b(rooms?|storeys?|houses?|things?|doubts?|doubted|circles?|beside|looks?|looked|looking|said|told|kept|gone|anew)\b",
    re.IGNORECASE,
)
"""Everyday words that the style guide replaces by technical words. "whole" is allowed, since it is usual English."""
NUMBER = re.compile(r"[≤≥<>~+-]?\d[\d,.]*(e-?\d+)?(( to |, | and |; )[+-]?\d[\d,.]*)*( \(.*\))?")
UNIT = re.compile(r"\([^)]+\)|%|\b(per|over|of|share|mean|factor|tolerance|deviation)\b")
"""Units in a header: a unit in parentheses, a percentage, or the name of a quotient."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_sentences_are_short_and_have_no_private_words(page: Path) -> None:
    """A page has at most 1,500 words, the README at most 900."""
    text = re.sub(r"(?s)!\[[^\]]*\]|\]\([^)]*\)|<!--.*?-->", "", page.read_text(encoding="utf-8"))
    if page.name not in GENERATED:
        assert len(words(text)) <= (MAX_README_WORDS if page.name == "README.md" else MAX_PAGE_WORDS)
    sentences = [s for text in texts(page) for s in re.split(r"(?<=[.!?:;])\s+", text)]
    assert [s for s in sentences if len(words(s)) > MAX_SENTENCE_WORDS] == []
    found = [(match[0], text) for text in texts(page) for match in PRIVATE_WORDS.finditer(text)]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headers_of_numbers_name_their_unit(page: Path) -> None:
    missing = []
    for head, body in tables(page):
        for line in body:
            for column, cell in list(enumerate(line))[1:]:
                others = [other for index, other in enumerate(line) if index != column]
                is_named = UNIT.search(head[column]) or COUNT.match(head[column])
                is_named = is_named or head[0].startswith("ratio") or any(map(VALUE_WITH_UNIT.search, others))
                if NUMBER.fullmatch(cell) and not is_named:
                    missing.append((head[column], cell))
    assert missing == []


@cache
def module_texts(module: Path) -> tuple[list[str], list[str], list[str]]:
    """Return docstrings, comments and all other texts of several words of a module; `X` for a value in a text."""
    source = module.read_text(encoding="utf-8")
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    docstrings = {id(n.value): n.value.value for n in nodes if isinstance(n, ast.Expr) and is_text(n.value)}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    messages = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in nodes
        if (isinstance(node, ast.JoinedStr) or is_text(node)) and id(node) not in {*docstrings, *parts}
    ]
    return list(docstrings.values()), list(comments(source)), [text for text in messages if " " in text]


def comments(source: str) -> Iterator[str]:
    """Yield the comments; lines of one column that follow each other are one comment."""
    text, end = "", (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        if text and (line - 1, column) == end:
            text += "\n" + token.string.removeprefix("#").strip()
        else:
            if text:
                yield text
            text = token.string
        end = (line, column)
    if text:
        yield text


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def long_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of more than 30 words; names of one letter do not count as words."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=- |\d+\. )", text):
        lines = [line for line in paragraph.splitlines() if not re.match(r"\s*\||    \w+   +", line)]
        for sentence in re.split(r"(?<=[.!?:;])\s+", re.sub(r"`[^`]*`", "CODE", " ".join(lines))):
            if len(re.findall(r"\S*\w\w\S*", sentence)) > MAX_MODULE_SENTENCE_WORDS:
                yield sentence


MODULES = [path for _, path in sources()]
FOLDERS = sorted({str(Path(*module.relative_to(ROOT).parts[:2]).with_suffix("")) for module in MODULES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_have_plain_words_and_short_sentences(folder: str) -> None:
    """The limits apply to messages and docstrings; private words are also searched in comments."""
    found = []
    for module in (module for module in MODULES if str(module.relative_to(ROOT)).startswith(folder)):
        for text in (text for texts in module_texts(module) for text in texts):
            plain = re.sub(r"`[^`]*`", "CODE", text)
            found += [(module.name, match[0], text[:80]) for match in PRIVATE_WORDS.finditer(plain)]
        docstrings, _, messages = module_texts(module)
        for text in docstrings + messages:
            found += [(module.name, "long", sentence) for sentence in long_sentences(text)]
    assert found == []


PROSE_KEYS = {
    *("about", "asks", "because", "conditions", "contradictions", "description", "given", "needs"),
    *("not_comparable", "note", "question", "text", "title"),
}
"""Keys of data files whose values are phrases or sentences."""
DATA_FILES = sorted(path for name in ("repro", "suites", "slurm") for path in (ROOT / name).rglob("*.toml"))


def data_texts(value: object, key: str = "") -> Iterator[str]:
    """Yield the phrases and sentences in the parsed TOML `value` of `key`; `body`: cells of a table of the ledger."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from data_texts(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from data_texts(part, key)
    elif isinstance(value, str) and (key in PROSE_KEYS or (key == "body" and value.endswith("."))):
        yield value


@pytest.mark.parametrize("file", DATA_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_data_files_have_plain_words_and_short_sentences(file: Path) -> None:
    content = file.read_text(encoding="utf-8")
    remarks = re.sub(r"^#\s*", "", "\n".join(re.findall(r"^#.*$", content, re.MULTILINE)), flags=re.MULTILINE)
    remarks = re.sub(r"^(repro |--|.*\S   +\S).*$", "", remarks, flags=re.MULTILINE)
    texts = [*data_texts(read_toml(file)), *re.split(r"\n\s*\n|(?<=\.)\n", remarks)]
    plain = [re.sub(r"`[^`]*`", "CODE", text) for text in texts]
    assert [text for text in plain if PRIVATE_WORDS.search(text)] == []
    assert [sentence for text in texts for sentence in long_sentences(text)] == []


def test_texts_and_long_sentences_of_a_module_are_found(tmp_path: Path) -> None:
    module = tmp_path / "one.py"
    module.write_text(
        '"""Kept."""\n\nx = 1  # told\n\n\ndef f(n: int) -> None:\n    """Look."""\n'
        '    raise ValueError(f"said {n} things")\n'
    )
    assert module_texts(module) == (["Kept.", "Look."], ["# told"], ["said X things"])
    assert list(long_sentences("word " * 31))
    assert not list(long_sentences("word " * 30))
    assert not list(long_sentences("a = b " * 20 + "\n| cell " * 40))


@pytest.mark.parametrize("folder", ["repro/wrap", "repro/parallel/zero"])
def test_refusals_have_at_most_two_sentences(folder: str) -> None:
    texts = [text for module in sorted((ROOT / folder).glob("*.py")) for text in module_texts(module)[2]]
    assert len(texts) > 4
    for text in texts:
        assert len(re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)) <= 2, text
