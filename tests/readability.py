"""Draw docstrings, comments and messages of the product at random, for a reading test without the code.

python -m tests.readability SEED            # the texts, for the reader
python -m tests.readability SEED --origins  # the module of each text as well, for the check of the answers
"""

from __future__ import annotations

import argparse
import random
import textwrap
from argparse import RawDescriptionHelpFormatter

from tests.test_text import MODULES, ROOT, module_texts

TEXTS = 60
MIN_WORDS = 5
"""Minimum length of a text; shorter texts are labels."""


def draw_texts(seed: int, count: int = TEXTS) -> list[tuple[str, str]]:
    """Return `count` pairs of a module's path and a text; a third each of docstrings, comments and messages."""
    choice = random.Random(seed)
    drawn: list[tuple[str, str]] = []
    for kind in range(3):
        texts = [
            (str(module.relative_to(ROOT)), text)
            for module in MODULES
            for text in module_texts(module)[kind]
            if len(text.split()) >= MIN_WORDS
        ]
        drawn += choice.sample(texts, count // 3)
    choice.shuffle(drawn)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--origins", action="store_true", help="print the module of each text")
    arguments = parser.parse_args()
    for number, (module, text) in enumerate(draw_texts(arguments.seed), 1):
        origin = f" {module}" if arguments.origins else ""
        print(f"{number}.{origin}\n{textwrap.indent(textwrap.dedent(text).strip(), '    ')}\n")


if __name__ == "__main__":
    main()
