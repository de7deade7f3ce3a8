"""Tests of evaluation protocols on texts with known counts, and of the full command."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repro.cli import main
from repro.config import ConfigError, Experiment, Layout
from repro.engines.native.checkpoint.files import write_safetensors
from repro.parallel import mesh as meshes
from repro.quality.evaluate import rank, samples
from repro.quality.evaluate.run import EvaluationOptions, compute_metrics, run_evaluation
from repro.quality.weights import open_weights
from repro.quality.weights.families import GPT2
from repro.results.schema import EvaluationRecord
from repro.results.store import read_records
from tests.training import TINY

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "m"), ("a", "t"), ("Ġm", "at")]
"""Merges that add six tokens to the 256 bytes; ` the` and ` mat` are tokens."""
VOCAB = 256 + len(MERGES)
CONTEXT = 16
RAW = " = Robert = \n Robert 's cat , 3 @.@ 5 kg , ate 1 @,@ 000 fish ( all cold ) . \n"
DETOKENIZED = " = Robert =\nRobert's cat, 3.5 kg, ate 1,000 fish (all cold).\n"
WORDS, BYTES = 23, 61
"""Words of `RAW` without its ends, separated by single spaces or the line break, and bytes of `DETOKENIZED`."""


@pytest.mark.parametrize(
    ("raw", "detokenized"),
    [
        (RAW, DETOKENIZED),
        ("well @-@ known", "well-known"),
        ("the dogs ' bowl", "the dogs' bowl"),
        ("who ? he : she ; it ! so", "who? he: she; it! so"),
        (" = = = Notes = = = \n", " === Notes ===\n"),
        ("[ 1 ] and { 2 }", "[1] and {2}"),
        ('he said " no " to it', 'he said "no" to it'),
        ("a ' b ' c", "a 'b' c"),
        ("at 20 ° C", "at 20°C"),
        ("an <unk> N times", "an <unk> 1 times"),
    ],
)
def test_detokenizer_applies_each_rule(raw: str, detokenized: str) -> None:
    assert samples.detokenize(raw) == detokenized


@pytest.mark.parametrize(
    ("tokens", "stride", "expected"),
    [
        (11, 2, [(0, 5, 4), (2, 5, 2), (4, 5, 2), (6, 5, 2)]),
        (10, 2, [(0, 5, 4), (2, 5, 2), (4, 5, 2), (6, 4, 1)]),
        (11, 4, [(0, 5, 4), (4, 5, 4), (8, 3, 2)]),
        (5, 2, [(0, 5, 4)]),
        (3, 2, [(0, 3, 2)]),
    ],
)
def test_windows_advance_by_stride(tokens: int, stride: int, expected: list[tuple[int, int, int]]) -> None:
    assert list(samples.split_windows(tokens, 4, stride)) == expected


def test_every_token_except_the_first_is_scored_once() -> None:
    for tokens, context, stride in itertools.product(range(2, 40), (3, 8), (1, 2, 3, 8)):
        if stride > context:
            continue
        counted = []
        for begin, length, scored in samples.split_windows(tokens, context, stride):
            assert length <= context + 1
            ends = range(begin + length - scored, begin + length)
            assert all(end - begin >= min(end, context - stride + 1) for end in ends)
            counted += ends
        assert counted == list(range(1, tokens))


def lambada(text: str, name: str, context: int = 100) -> tuple[str, str]:
    """Return the context and the target of one text in bytes."""
    found = samples.last_word_samples(
        [text], samples.find_protocol("lambada", name), samples.ByteTokenizer(), context
    )
    ((_, _, scored),) = found.spans.tolist()
    full = bytes(found.tokens.tolist())
    return full[:-scored].decode(), full[-scored:].decode()


@pytest.mark.parametrize(
    ("text", "name", "context", "target"),
    [
        ("the cat sat on a mat", "megatron", "the cat sat on a", " mat"),
        ("  at the bat at \n", "megatron", "at the bat", " at"),
        ("the cat sat on a mat", "last-token", "the cat sat on a ma", "t"),
        (" “no” , he said ", "gpt2", '\n"no" , he sai', "d"),
    ],
)
def test_protocol_defines_context_and_target(text: str, name: str, context: str, target: str) -> None:
    assert lambada(text, name) == (context, target)


def test_long_text_is_truncated_at_its_beginning() -> None:
    assert lambada("the cat sat on a mat", "megatron", context=6) == ("n a", " mat")
    found = samples.last_word_samples(
        ["a b", "the cat", "the dog"], samples.find_protocol("lambada"), samples.ByteTokenizer(), 5
    )
    assert found.truncated == 2


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write `vocab.json` and `merges.txt`; return ids by token."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [*sorted(ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocab = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    return vocab


def write_weights(folder: Path, logits: dict[int, float], vocab_size: int = VOCAB) -> None:
    """Write weights that give these logits at every position, and 0 for the other tokens.

    The final norm returns its bias, which is 1 in element 0. The embedding has the logits in element 0.
    """
    model = replace(TINY, layers=2, vocab=vocab_size, seq=CONTEXT)
    tensors = {pair.theirs: torch.zeros(pair.shape) for pair in GPT2.counterparts(model)}
    tensors["ln_f.bias"][0] = 1
    for token, logit in logits.items():
        tensors["wte.weight"][token, 0] = logit
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", shapes, lambda name: [tensors[name].reshape(-1)], {})
    (folder / "config.json").write_text(json.dumps(GPT2.document(model, vocab_size)))


def test_stop_word_tokens_are_full_words(tmp_path: Path) -> None:
    vocab = write_tokenizer(tmp_path)
    words = samples.read_stop_words(None)
    assert len(words) == 127
    assert samples.Gpt2Tokenizer(tmp_path).word_tokens(words) == [vocab["Ġt"], vocab["Ġthe"]]
    assert samples.ByteTokenizer().word_tokens(words) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights that predict ` the` first and ` mat` second at every position."""
    path = tmp_path_factory.mktemp("known")
    vocab = write_tokenizer(path)
    write_weights(path, {vocab["Ġthe"]: 2.0, vocab["Ġmat"]: 1.0})
    return path


@pytest.mark.parametrize(("name", "target_tokens"), [("megatron", 4), ("last-token", 1)])
def test_lambada_scores_have_the_expected_values(
    folder: Path, tmp_path: Path, name: str, target_tokens: int
) -> None:
    """The targets are ` mat`, ` the`, ` mat`, and ` dog` in four tokens, of which `g` is the last."""
    log_z = math.log(math.exp(2) + math.exp(1) + VOCAB - 2)
    losses = [log_z - 1, log_z - 2, log_z - 1, target_tokens * log_z]
    data = tmp_path / "texts.jsonl"
    texts = ("a cat on a mat", "this is the", "we saw the mat", "he is a dog")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    protocol, tokenizer = samples.find_protocol("lambada", name), samples.open_tokenizer("", folder)
    source = open_weights(folder)
    texts_of_file = samples.read_samples(data, protocol, tokenizer, CONTEXT)
    experiment = Experiment(name="known", model=source.model, layout=Layout(micro_batch=3))
    forbidden = tokenizer.word_tokens(samples.read_stop_words(None))
    one_rank = (meshes.single_rank_mesh(), torch.device("cpu"))
    rows = rank.score_samples(experiment, *one_rank, source, texts_of_file, forbidden)
    assert [row[1] for row in rows] == pytest.approx(losses, rel=1e-6)
    found = compute_metrics(protocol, texts_of_file, rows, filtered=True)
    assert (found["accuracy"], found["accuracy.filtered"], found["samples"]) == (1 / 4, 2 / 4, 4)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / 4), rel=1e-6)


def command(weights: Path, data: Path, *options: str) -> list[str]:
    return ["evaluate", "--weights", str(weights), "--data", str(data), *options]


@pytest.mark.slow
def test_command_evaluates_on_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero weights give all 256 bytes equal probability, so that each perplexity is a power of 256."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "zeros", {}, vocab_size=256)
    data = tmp_path / "wiki.test.tokens"
    data.write_text(RAW)
    options = ["--task", "wikitext103", "--tokenizer", "bytes", "--pp", "2", "--stride", "5", "--json"]
    assert main(command(tmp_path / "zeros", data, *options)) == 0
    output = json.loads(capsys.readouterr().out)
    (record,) = read_records(Path("results"))
    assert isinstance(record, EvaluationRecord)
    assert record.as_dict() == output
    assert record.metrics == pytest.approx(
        {
            "samples": 1 + math.ceil((BYTES - 1 - CONTEXT) / 5),
            "truncated": 0,
            "tokens": BYTES,
            "words": WORDS,
            "loss": math.log(256),
            "perplexity.token": 256,
            "perplexity.word": 256 ** ((BYTES - 1) / (WORDS - 1)),
        },
        rel=1e-6,
    )
    assert (record.name, record.layout["pp"]) == ("zeros-wikitext103-megatron", 2)
    assert record.way["otherwise"] == {"stride": 5}
    assert "Megatron-LM" in record.way["source"]
    assert record.data["bytes"] == len(RAW)
    assert set(record.weights["files"]) == {"model.safetensors"}


def test_gpt2_protocol_divides_by_all_words() -> None:
    windows = samples.Samples(torch.arange(BYTES).numpy(), torch.zeros(1, 3).long().numpy(), words=WORDS)
    rows = [(0, math.log(256) * (BYTES - 1), False, False)]
    found = compute_metrics(samples.find_protocol("wikitext103", "gpt2"), windows, rows, filtered=False)
    assert found["perplexity.word"] == pytest.approx(256 ** ((BYTES - 1) / WORDS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "glue"], "--task = 'glue': must be one of wikitext103, lambada"),
        (["--task", "lambada", "--protocol", "x"], "must be one of megatron, last-token, gpt2"),
        (["--task", "lambada", "--zero", "2"], "--zero = 2: must be 0 or 3, since an evaluation has no"),
        (["--task", "lambada", "--stride", "4"], "needs task wikitext103; the samples of task lambada are"),
        (["--task", "lambada", "--tp", "3"], "--tp = 3: must be a divisor of heads"),
        (["--task", "lambada", "--system", "dgx2"], "--system = 'dgx2': must be local or local-gpu"),
        (["--task", "wikitext103", "--stride", "17"], "at most 16 tokens, the model's context"),
        (["--task", "wikitext103", "--stop-words", "x"], "needs task lambada"),
        (["--task", "lambada", "--tokenizer", "nowhere"], "the folder needs vocab.json and merges.txt"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    data = tmp_path / "texts.txt"
    data.write_text("a cat on a mat\n")
    results = tmp_path / "results"
    assert main([*command(folder, data, *options), "--results", str(results)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not results.exists()


def test_missing_text_is_refused_with_its_source(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {
        "wikitext103": "fetch wikitext-103/wiki.test.tokens from https://s3.amazonaws.com/research.metamind",
        "lambada": "sha256 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    }
    for task, message in sources.items():
        assert main(command(folder, tmp_path / "none", "--task", task)) == 2
        assert message in capsys.readouterr().err


def test_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_weights(tmp_path, {}, vocab_size=200)
    data = tmp_path / "texts.txt"
    data.write_text("a cat on the mat\n")
    options = EvaluationOptions(weights=tmp_path, task="lambada", data=data, tokenizer=str(folder))
    with pytest.raises(ConfigError, match=r"the model with 200 tokens; the selected tokenizer gives id 261"):
        run_evaluation(options, tmp_path)


def test_lines_without_a_sample_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "a b"}\n{"words": 3}\n')
    with pytest.raises(ConfigError, match=r'line 2.* must be a JSON object with the key "text"'):
        samples.read_samples(data, samples.find_protocol("lambada"), samples.ByteTokenizer(), 10)
    data.write_text('{"text": "word"}\n')
    with pytest.raises(ConfigError, match="sample 1"):
        samples.read_samples(data, samples.find_protocol("lambada"), samples.ByteTokenizer(), 10)
