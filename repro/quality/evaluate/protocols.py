"""Protocols of published scores, each with its source and the rules that the source omits.

Scores of different protocols are not comparable. GPT-2's authors score the last token of OpenAI's version of LAMBADA,
and their stop-word filter adds 10.58 points; Megatron-LM scores full words without a filter.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.config import ConfigError

WIKITEXT, LAMBADA = "wikitext103", "lambada"
TASKS = (WIKITEXT, LAMBADA)
MEGATRON, GPT2, LAST_TOKEN = "megatron", "gpt2", "last-token"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Published procedure that scores a model on a task."""

    task: str
    name: str
    source: str
    """Publication or code that defines the protocol."""
    rules: tuple[str, ...]
    left_open: tuple[str, ...] = ()
    """Rules that the source omits, and their replacements here."""
    published: tuple[str, ...] = ()
    """Published scores by this protocol."""


PROTOCOLS = (
    Protocol(
        task=WIKITEXT,
        name=MEGATRON,
        source="Megatron-LM, tasks/zeroshot_gpt2 (2bd6196c of April 2020; evaluate_gpt2.py before); 1909.08053 App. E",
        rules=(
            "wiki.test.tokens of the word-level archive, detokenised by Megatron-LM's rules",
            "windows of the model's context begin 32 tokens apart; of each but the first the last 32 tokens count",
            "word perplexity exp(sum of losses / (words - 1)), words counted by single spaces before detokenising",
        ),
        published=(
            "19.31, 12.76 and 10.81 of Megatron-LM 355M, 2.5B and 8.3B",
            "10.21 of Turing-NLG 17B is compared with these; its protocol is not published",
        ),
    ),
    Protocol(
        task=WIKITEXT,
        name=GPT2,
        source="GPT2 sec. 3.1 and Table 3; openai/gpt-2 issue 78",
        rules=(
            "invertible de-tokenizers, losses scaled by the ratio of tokens before they are exponentiated",
            "word perplexity exp(sum of losses / words)",
        ),
        left_open=(
            "the de-tokenizer was not published: Megatron-LM's is in its place",
            "windows were not published: they follow each other without overlap (--stride takes other ones)",
        ),
        published=("37.50, 26.37, 22.05 and 17.48 of GPT-2 124M, 355M, 774M and 1.5B",),
    ),
    Protocol(
        task=LAMBADA,
        name=MEGATRON,
        source="Megatron-LM, tasks/zeroshot_gpt2 with --strict-lambada (2bd6196c of April 2020); 1909.08053 App. E",
        rules=(
            "the last word, cut at the last white space, with a space before it: all of its tokens",
            "right if each of them is the most likely one after the true ones before it",
        ),
        published=(
            "45.18, 61.73 and 66.51 % of Megatron-LM 355M, 2.5B and 8.3B",
            "68.0 % of Turing-NLG 17B is compared with these; its protocol is not published",
        ),
    ),
    Protocol(
        task=LAMBADA,
        name=LAST_TOKEN,
        source="Megatron-LM, evaluate_gpt2.py (a0368ddf of August 2019), and without --strict-lambada",
        rules=("the last token of the text, which may be the end of a word",),
    ),
    Protocol(
        task=LAMBADA,
        name=GPT2,
        source="GPT2 sec. 3.3 and Table 3; openai/gpt-2 issue 131; EleutherAI/lm-evaluation-harness issue 356",
        rules=(
            "OpenAI's lambada_test.jsonl, curly quotes made straight, after a line break",
            "the last token of the text, which may be the end of a word",
            "`accuracy.filtered`: the most likely token that is no stop word",
        ),
        left_open=(
            "the stop words were not published: 127 English ones in their place (--stop-words takes others)",
            "how tokens were held against them was not published: tokens are left out that are a space and such a word",
        ),
        published=(
            "45.99, 55.48, 60.12 and 63.24 % of GPT-2 124M, 355M, 774M and 1.5B with the filter",
            "52.66 % of GPT-2 1.5B without",
        ),
    ),
)


DOWNLOAD_ADVICE = {
    WIKITEXT: "fetch wikitext-103/wiki.test.tokens from "
    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip (sha1 "
    "8a5befc548865cec54ed4273cf87dbbad60d1e47, of the archive 0aec09a7537b58d4bb65362fee27650eeaba625a; CC BY-SA)",
    LAMBADA: "fetch lambada_test.jsonl from https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl "
    "(sha256 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226; LAMBADA is CC BY 4.0)",
}
"""Origin, checksum and licence of the text of each task, which the suite may not redistribute."""


def find_protocol(task: str, name: str = "") -> Protocol:
    """Return a protocol of a task, by default the first. Raises `ConfigError`."""
    if task not in TASKS:
        raise ConfigError("--task", task, f"one of {', '.join(TASKS)}")
    candidates = [protocol for protocol in PROTOCOLS if protocol.task == task]
    for protocol in candidates:
        if name in ("", protocol.name):
            return protocol
    raise ConfigError("--protocol", name, f"one of {', '.join(protocol.name for protocol in candidates)}")
