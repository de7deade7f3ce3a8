"""The default output of every command is one screen, and its text and help follow the style guide."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from repro import cli
from tests.cli.samples import EXEMPT, SAMPLES, cases

SCREEN_LINES, SCREEN_COLUMNS, SENTENCE_WORDS = 24, 100, 30
PRIVATE_WORDS = "room storey house thing doubt circle beside look said told kept gone whole"
"""Words that the style guide excludes; a user does not know their meaning in this project."""
LISTS = ("gpu-day", "schedule", "claims")
"""Commands that print a list or a drawing that the user asks for, and the ledger, which has tests of its own."""


def sentences(text: str) -> list[str]:
    """The sentences of a text without its tables, whose rows have two spaces between words, and its commands."""
    paragraphs = [""]
    for line in text.splitlines():
        if re.search(r"\S  +\S|^  |^Next: ", line) or not line.strip():
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {line}"
    return [one for paragraph in paragraphs for one in re.split(r"(?<=[.;!?])\s", paragraph.strip()) if one]


def faults(text: str) -> list[str]:
    """The sentences that are too long or have a private word."""
    words = re.compile(rf"\b({'|'.join(PRIVATE_WORDS.split())})s?\b", re.IGNORECASE)
    return [one for one in sentences(text) if len(one.split()) > SENTENCE_WORDS or words.search(one)]


def test_faults_are_found() -> None:
    assert faults("A table:\na  thing  of  doubt\n\nIt fits. What is kept beside it is whole.") == [
        "What is kept beside it is whole."
    ]
    assert len(faults("one " * 31)) == 1
    assert not faults("one " * 30)


@pytest.mark.parametrize(
    "command", [case for case in cases(all_samples=True) if case.values[0].split()[0] not in LISTS]
)
def test_the_answer_is_one_screen(
    command: str,
    samples_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(samples_folder)
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    assert cli.main(shlex.split(command.format(width="screen"))) in (0, 1, 3)
    out = capsys.readouterr().out
    assert faults(out) == []
    assert len(out.splitlines()) <= SCREEN_LINES, out
    assert max(map(len, out.splitlines())) <= SCREEN_COLUMNS, out


@pytest.mark.parametrize("path", ["", "lab", *SAMPLES, *EXEMPT])
def test_help_has_short_sentences_and_plain_words(path: str) -> None:
    command: Any = typer.main.get_command(cli.app)
    for name in path.split():
        command = command.commands[name]
    texts = [command.help or "", *(str(getattr(each, "help", None) or "") for each in command.params)]
    assert [fault for text in texts for fault in faults(re.sub(r"  +", " ", text))] == []
