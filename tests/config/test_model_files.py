"""Tests of model files: packaged models have sources and the printed shapes, and errors of user files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repro.config import ConfigError, Layout, engines
from repro.config.files import build_dataclass
from repro.config.model import Model
from repro.config.models import _packaged, load_model, model_names
from repro.model.counts import total_parameters
from tests import committed

SMALL = {
    *("smoke-states", "smoke-speed", "char-1m", "tiny-parity", "gpt2-tiny", "limit-29m", "limit-39m"),
    *("limit-40m", "equal-stages", "odd-sizes", "tiny-shallow", "tiny-stages", "tiny-deep"),
}
"""Models for smoke runs and tests; this project chose their shapes."""
TABLES = """
# NAME=LAYERSxHIDDENxHEADS/MP DEGREES.  ZERO3 Tables 6 to 9.
zero-60b-fig3=75x8192x32/16 zero-40b-fig6=50x8192x32/16 zero-50b=62x8192x32/16 zero-150b=187x8192x64/16
zero-60b-fig8=75x8192x64/16
# Tables 1 and 2 print sizes only; this project chose the shapes.
table1-7.5b=4x12288x96/1 table1-128b=4x50944x398/1 table1-1t=4x144128x1126/1 table2-1.3b=27x1920x16/1
table2-1.4b=30x1920x16/1 table2-5b=43x3072x24/4 table2-6.2b=53x3072x24/1 table2-12.5b=61x4096x32/2,8
table2-25b=55x6144x32/4,16 table2-2t=155x32768x256/16
# DS-FEB20 tutorial sec. 3.1 and 3.3, figure; DS-HEAD zero.md.
deepspeed-40b=88x6144x32/16 deepspeed-60b=132x6144x32/16 deepspeed-80b=100x8192x64/16
deepspeed-100b=125x8192x64/16 deepspeed-10b=50x4096x32/1 deepspeed-200b=250x8192x64/16
# MEG1 Tables 1, 2 and 7; images/tables.tex.
megatron-355m=24x1024x16/1 megatron-1.2b=40x1536x16/1 megatron-2.5b=54x1920x20/2 megatron-4.2b=64x2304x24/4
megatron-8.3b=72x3072x32/8 megatron-8.3b-h24=72x3072x24/8 megatron-8.3b-h16=72x3072x16/8
megatron-2020-1b=24x1920x15/1 megatron-2020-2b=30x2304x18/2 megatron-2020-4b=36x3072x24/4
megatron-2020-8b=42x4096x32/8 megatron-175b=96x12288x96/8
# MEG-SC21 run_figure_16.sh.
megatron-91b=32x15360x128/8
# MEG2 Fig. 7.
megatron-fig7-1b=4x4096x128/1
# MEG-SC21 run_figure_11.sh, 13 and 14.
megatron-fig11-3=3x20480x128/8 megatron-fig11-6=6x20480x128/8 megatron-fig11-12=12x20480x128/8
megatron-fig11-24=24x20480x128/8 megatron-162.2b=32x20480x128/2,4,8,16,32 megatron-5.9b=32x3840x32/1
turing-nlg-17b=78x4256x28/4 turing-nlg-17b-h32=78x4256x32/16 yuan-1.0-245b=76x16384x128/8 gpt2-1.5b=48x1600x25/1
gpt3-175b=96x12288x96/1
# FOUNDRY scripts/train/yamls/pretrain; FLASH-REPO configs/experiment/pile.
mpt-760m=24x1536x12/1 mpt-1b=24x2048x16/1 mpt-3b=32x2560x20/1 mpt-7b=32x4096x32/1 mpt-13b=40x5120x40/1
mpt-30b=48x7168x56/1 mpt-70b=80x8192x64/1 flash-1.3b=24x2048x16/1 flash-2.7b=32x2560x20/1
# DLPERF Megatron-LM/README.md; BIGSCIENCE experiments and train.
oneflow-16x1536=16x1536x16/1,2,4,8 oneflow-16x3072=16x3072x32/16 oneflow-24x2304=24x2304x24/4,8
bigscience-1.3b=24x2048x16/1,2 bigscience-13b=40x5120x32/2 bigscience-18b=40x6144x32/4
bigscience-22b=32x8192x32/4 bigscience-39b=48x8192x32/4 bigscience-52b=64x8192x32/4 bigscience-65b=64x9216x32/4
bigscience-104b=64x11600x80/4
# VTRAIN data; CALCULON validation/seqsel/tab5; NEMO conf/training/gpt3/5b.yaml.
vtrain-1.3b=24x2048x16/1,2,4,8 megatron-22b=48x6144x64/8 nemo-5b=24x4096x32/1,2
"""
"""Published shapes of GPT-2 models."""
OTHERS = """
# NAME=LAYERSxHIDDENxHEADSxKEY HEADSxMLPxVOCABULARY.  2307.09288 Table 1 and config.json of the releases.
llama2-7b=32x4096x32x32x11008x32000 llama2-13b=40x5120x40x40x13824x32000 llama2-70b=80x8192x64x8x28672x32000
# 2407.21783 Table 3.
llama3-8b=32x4096x32x8x14336x128256 llama3-70b=80x8192x64x8x28672x128256
llama3-405b=126x16384x128x8x53248x128256
# 2310.06825 Table 1.
mistral-7b=32x4096x32x8x14336x32000
# 2412.15115 Table 1, and config.json.
qwen2.5-0.5b=24x896x14x2x4864x151936 qwen2.5-1.5b=28x1536x12x2x8960x151936 qwen2.5-3b=36x2048x16x2x11008x151936
qwen2.5-7b=28x3584x28x4x18944x152064 qwen2.5-14b=48x5120x40x8x13824x152064 qwen2.5-32b=64x5120x40x8x27648x152064
qwen2.5-72b=80x8192x64x8x29568x152064
# 2204.06745 sec. 2, 2211.05100 Table 3, config.json of Falcon.
gpt-neox-20b=44x6144x64x64x24576x50432 bloom-176b=70x14336x112x112x57344x250880
falcon-7b=32x4544x71x1x18176x65024 falcon-40b=60x8192x128x8x32768x65024
# SimuMax 4dcaae52 run_pretrain_llama3.sh: some layers of Llama 3, with a padded vocabulary.
llama3-70b-12l-tp1=12x8192x64x8x28672x128384 llama3-70b-12l-tp2=12x8192x64x8x28672x128512
llama3-70b-12l-tp8=12x8192x64x8x28672x129024 llama3-405b-4l-tp1=4x16384x128x16x53248x128384
llama3-405b-4l-tp2=4x16384x128x16x53248x128512 llama3-405b-4l-tp8=4x16384x128x16x53248x129024
# Sizes of the reports with the layers of Llama 2; this project chose the shapes.
llama-like-1.5b=28x2048x16x16x5632x32000 llama-like-3b=26x3072x24x24x8192x32000
llama-like-17b=37x6144x48x48x16384x32000 llama-like-20b=43x6144x48x48x16384x32000
llama-like-40b=49x8192x64x64x22016x32000 llama-like-60b=73x8192x64x64x22016x32000
llama-like-80b=98x8192x64x64x22016x32000 llama-like-100b=123x8192x64x64x22016x32000
llama-like-175b=96x12288x96x96x32768x32000 llama-like-245b=76x16384x128x128x43776x32000
llama-like-1t=128x25600x200x200x68352x32000
"""
"""Models whose layers differ from those of GPT-2."""


def shapes(table: str) -> dict[str, tuple[tuple[int, ...], list[int]]]:
    """Return the sizes and the degrees of each model of a table."""
    found = {}
    for entry in re.sub("#.*", "", table).split():
        name, sizes, *degrees = re.split("[=/]", entry)
        found[name] = tuple(map(int, sizes.split("x"))), [int(n) for part in degrees for n in part.split(",")]
    return found


def test_every_packaged_model_has_its_printed_shape_and_tensor_parallel_degrees() -> None:
    """`suites/test_published.py` compares the models of ZERO3 Tables 5 and 10, MEG2 Table 1 and the release."""
    in_ledger = set()
    for suite in ("zero_throughput", "deepspeed_64gpu", "megatron_2021"):
        for entry in committed.suite(Path(__file__).parents[2] / f"suites/{suite}.toml").entries:
            if entry.experiment.name.startswith(("fig2-", "fig4-", "64gpu-", "table1-")):
                in_ledger.add(entry.experiment.model.name)
    plain, others = shapes(TABLES), shapes(OTHERS)
    assert sorted(model_names()) == sorted({*plain, *others, *SMALL, "bert-large", "t5-11b", *in_ledger})
    found = {name: load_model(name) for name in model_names()}
    assert {name for name, model in found.items() if model.departures()} == set(others)
    for name, (sizes, _) in others.items():
        m = found[name]
        assert (m.layers, m.hidden, m.heads, m.key_heads, m.ffn_width, m.vocab) == sizes, name
    for name, (sizes, degrees) in plain.items():
        m = found[name]
        assert (m.layers, m.hidden, m.heads, m.ffn_width) == (*sizes, 4 * m.hidden), name
        for degree in degrees:
            engines.check_layout_fits(Layout(tp=degree), m, m.seq)


def test_incompatible_model_options_are_rejected() -> None:
    valid = {"name": "m", "layers": 1, "hidden": 24, "heads": 4, "vocab": 8, "seq": 8}
    rotary = {"positions": "rotary"}
    for keys, message in (
        ({"norm": "batch"}, "norm = 'batch': must be one of layer, rms"),
        ({"kv_heads": 3}, "kv_heads = 3: must be a divisor of heads = 4"),
        ({"norm_eps": 0.0}, "norm_eps = 0.0: must be more than 0"),
        ({"rotary_base": 5.0}, "rotary_base = 5.0: must be omitted unless positions = rotary"),
        ({"norm": "rms", "architecture": "bert"}, "norm = 'rms': must be omitted with architecture = bert"),
        *((rotary | {"rotary_fraction": part}, f"rotary_fraction = {part}: ") for part in (0.5, 0.1, 1.5)),
    ):
        with pytest.raises(ConfigError) as caught:
            Model(**valid | keys)  # type: ignore[arg-type]
        assert str(caught.value).startswith(message)


def test_fast_reader_equals_the_pydantic_reader() -> None:
    for name in model_names():
        table, path = _packaged()[name]
        keys = {key: value for key, value in table.items() if key != "aliases"}
        assert load_model(name) == build_dataclass(Model, keys, file=str(path))
        assert load_model(name).name == name == name.lower()


def test_model_with_a_source_has_its_printed_count_or_a_note_on_the_difference() -> None:
    for name in set(model_names()) - SMALL:
        model = load_model(name)
        if "l-tp" in name:  # some layers of a model, which have no printed count
            continue
        assert model.source
        digits, unit = model.published_name[:-1], {"M": 1e6, "B": 1e9, "T": 1e12}[model.published_name[-1]]
        assert float(digits) * unit == pytest.approx(model.published_params)
        psi = total_parameters(model) / unit
        if f"{psi:.{len(digits.partition('.')[2])}f}" != digits:
            assert any(f"{psi:.{places}f}{model.published_name[-1]}" in model.note for places in (1, 2)), name


VALID = "layers = 2\nhidden = 8\nheads = 2\nvocab = 16\nseq = 4\n"


@pytest.mark.parametrize(
    "text", [VALID, "[[model]]\n" + VALID, "[model]\n" + VALID, "[defaults]\n" + VALID + "[model]"]
)
def test_user_file_without_a_name_names_its_model(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    expected = Model(name="mine", layers=2, hidden=8, heads=2, vocab=16, seq=4)
    assert load_model(path) == load_model(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VALID.replace("heads = 2", "heads = 3"), "heads = 3: must be a divisor of hidden = 8"),
        (VALID.replace("layers = 2", "layers = -2"), "layers = -2: must be an integer of at least 1"),
        (VALID.replace("vocab = 16", "vocab = 'many'"), "vocab = 'many'"),
        (VALID.replace("vocab = 16", "vocab = 16.5"), "vocab = 16.5"),
        (VALID.replace("seq = 4", ""), "seq: is missing"),
        (VALID + "head = 2", "head = 2: unknown key; did you mean heads?"),
        (f"[[model]]\n{VALID}[[model]]\n{VALID}", "[[model]] tables with different names"),
        ("[defaults]\n" + VALID, "[[model]] tables with different names"),
        ("[[models]]\n[defaults]\n" + VALID, "only [defaults] and [[model]] tables"),
        ("model = 3", "[[model]] tables"),
        ("layers: 2", "not TOML"),
    ],
)
def test_error_in_a_user_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    line = str(caught.value)
    assert message in line
    assert str(path) in line
    assert "\n" not in line


def test_file_with_two_models_needs_a_model_name(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    tables = (f'[[model]]\nname = "{name}"\nlayers = {n}\n' for name, n in (("small", 2), ("large", 9)))
    path.write_text("[defaults]\n" + VALID.replace("layers = 2\n", "") + "".join(tables))
    assert load_model(f"{path}:large").layers == 9
    assert load_model(f"{path}:small") == Model(name="small", layers=2, hidden=8, heads=2, vocab=16, seq=4)
    for wrong in (str(path), f"{path}:huge"):
        with pytest.raises(ConfigError, match=r"ours\.toml:small or .*ours\.toml:large"):
            load_model(wrong)


def test_error_for_an_unknown_name_or_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*zero-100b"):
        load_model("zero-100")
    with pytest.raises(ConfigError, match="repro models"):
        load_model("chinchilla")
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_model("nowhere.toml")
