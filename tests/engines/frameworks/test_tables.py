"""Tests of framework tables: files are read back, keys have options or reasons, and user scripts are read."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from repro.config import ConfigError, Experiment, Layout, Training, models
from repro.config.files import read_toml
from repro.engines.frameworks.files import LaunchFiles, parse_arguments, read_experiment, write_files
from repro.engines.frameworks.rules import RULES, load_framework
from repro.engines.frameworks.table import settings_of

GPT, LLAMA = models.load_model("megatron-8.3b"), models.load_model("llama3-8b")
COMMON = {"dp", "micro_batch", "global_batch"}
KEYS = {
    "megatron": COMMON | {"tp", "pp", "cp", "zero", "sp", "precision", "grad_dtype"},
    "torchtitan": COMMON | {"tp", "pp", "cp", "schedule", "chunks"},
    "deepspeed": COMMON | {"zero", "precision", "grad_dtype", "overlap", "pa"},
    "nanotron": COMMON | {"tp", "pp", "cp", "sp", "precision"},
}
"""Keys of a layout that each framework can express and must not list as differences."""


def random_layouts(count: int) -> list[Layout]:
    """Return valid layouts of engine `native` with random keys, from a fixed seed."""
    draw, found = random.Random(52), []
    while len(found) < count:
        keys: dict[str, Any] = {axis: draw.choice([1, 2, 4]) for axis in ("dp", "tp", "pp", "micro_batch")}
        keys |= {key: draw.random() < 0.5 for key in ("sp", "recompute", "overlap", "gather_overlap")}
        keys |= {"cp": draw.choice([1, 1, 2]), "zero": draw.randrange(4), "pa": draw.random() < 0.2}
        keys["global_batch"] = keys["dp"] * keys["micro_batch"] * draw.choice([1, 2, 4, 8])
        keys["schedule"] = draw.choice(["1f1b", "gpipe", "interleaved"])
        keys["chunks"] = 2 if keys["schedule"] == "interleaved" else 1
        keys["precision"] = draw.choice(["fp32", "bf16", "fp16"])
        keys["grad_dtype"] = draw.choice(["precision", "fp32"])
        keys["order"] = draw.choice(["tp-dp-pp", "tp-pp-dp", "dp-tp-pp"])
        keys["bucket_bytes"] = draw.choice([25_000_000, 100_000_000, 2**22])
        try:
            found.append(Layout(**keys))
        except ConfigError:
            continue
    return found


@pytest.mark.parametrize("key", RULES)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_50_layouts_are_read_back_or_differ_as_stated(key: str, model: Any, tmp_path: Path) -> None:
    framework = load_framework(key)
    for layout in random_layouts(50):
        experiment = Experiment(name="x", model=model, layout=layout, training=Training(seq=1024))
        differences = framework.differences(experiment)
        differing = {line.partition(" = ")[0] for line in differences}
        written = {path.name: path.read_text() for path in write_files(key, experiment, 8, tmp_path)}
        assert all(any(line in text for text in written.values()) for line in differences)
        assert "@" not in "".join(written.values()).replace("${ARGUMENTS[@]}", "")
        # The JSON file has no parallel degrees; the command line gives them.
        given = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp")} if key == "deepspeed" else {}
        name = model.name if key == "deepspeed" else ""
        found, reading = read_experiment(tmp_path / framework.file, layout.world, given, name)
        assert not reading.unread
        wanted = settings_of(experiment)
        if key in ("deepspeed", "torchtitan"):  # generated code has the other settings
            wanted = {name: value for name, value in wanted.items() if name.startswith("layout.")}
        unlike = {name for name, value in wanted.items() if settings_of(found).get(name) != value} - {"model"}
        unlike -= {"model.seq"} if "model.positions" in differing else set()  # learned positions only
        assert unlike <= differing | ({"training.seq", "training.steps"} if key == "deepspeed" else set())
        if layout.precision != "fp16":
            expressible = {f"layout.{name}" for name in KEYS[key]}
            assert unlike & expressible <= ({"layout.grad_dtype"} if key == "torchtitan" else set())


@pytest.mark.parametrize("key", RULES)
def test_every_layout_key_has_an_option_or_a_reason(key: str) -> None:
    """A new key of `Layout` fails this test until the table contains an option or a reason."""
    framework = load_framework(key)
    plain = Layout(tp=2, pp=2, dp=2, zero=1, sp=True, recompute=True, global_batch=4, precision="bf16")
    experiment = Experiment(name="x", model=LLAMA, layout=plain, training=Training())
    options = framework.options_of(settings_of(experiment))
    covered = framework.read(options, 8, {"model": LLAMA}).settings.keys() | framework.limits.keys()
    assert {f"layout.{field.name}" for field in fields(Layout)} <= covered
    assert all(reason or name.startswith("training.") for name, (_, reason) in framework.limits.items())


def test_megatron_and_torchtitan_files_preserve_uneven_stages(tmp_path: Path) -> None:
    layout = Layout(pp=4, stage_layers=(6, 9, 9, 8), global_batch=8, precision="bf16", grad_dtype="fp32")
    experiment = Experiment(name="x", model=LLAMA, layout=layout, training=Training(seq=1024))
    for key in ("megatron", "torchtitan"):
        write_files(key, experiment, 8, tmp_path)
        found, _ = read_experiment(tmp_path / load_framework(key).file, 4, {})
        assert found.layout.stage_layers == layout.stage_layers


SCRIPT = r"""#!/bin/bash
TP=2
PP=${PP:-4}
GPUS_PER_NODE=8
DISTRIBUTED=(--nproc_per_node $GPUS_PER_NODE --nnodes 4)
MODEL=(
    --num-layers 48 --hidden-size 6144   # GPT
    --num-attention-heads 48 --seq-length 2048 --max-position-embeddings 2048
)
TRAINING="
    --micro-batch-size=1 \
    --global-batch-size 64 --bf16 --use-distributed-optimizer --sequence-parallel
    --hidden-dropout 0 --attention-dropout 0 --recompute-granularity selective
"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL[@]} $TRAINING --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage 6 --vocab-size 50257 --num-experts 8
"""


def test_user_script_with_shell_syntax_is_read(tmp_path: Path) -> None:
    """The script has variables, arrays, quoted lists and comments, as in the examples of Megatron-LM."""
    script = tmp_path / "user.sh"
    script.write_text(SCRIPT)
    files = LaunchFiles(source=script)
    found, notes = files.read("", 32, {}, 0)
    assert found is not None
    chosen = {"global_batch": 64, "chunks": 2, "schedule": "interleaved", "bucket_bytes": 160_000_000}
    chosen |= {"precision": "bf16", "grad_dtype": "fp32", "overlap": False, "gather_overlap": False}
    assert found.layout == Layout(tp=2, pp=4, dp=4, sp=True, zero=1, micro_batch=1, **chosen)
    assert (found.model.layers, found.model.hidden, found.model.vocab) == (48, 6144, 50432)
    assert any("num_experts" in note for note in notes)
    assert any("recompute_granularity = selective" in note for note in notes)
    assert files.read("", 32, {"tp": 4, "pp": 1, "chunks": 1, "schedule": "1f1b"}, 0)[0].layout.dp == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "--num-layers many", "num_layers = 'many': must be an integer"),
        ("a.sh", SCRIPT.replace("-parallel-size $TP", "-parallel-size 3"), "--gpus = 32: must be 24"),
        ("a.sh", "--normalization Batch", "normalization = 'Batch': must be one of LayerNorm, RMSNorm"),
        ("a.json", "{}", "the file lacks the sizes of the model; add --model NAME"),
        ("a.json", "{", "cannot be read as JSON"),
        ("a.yaml", "a: [", "cannot be read as YAML"),
        ("a.txt", "", "must be a file that ends in .sh, .toml, .json"),
    ],
)
def test_invalid_file_is_named_in_the_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_experiment(tmp_path / name, 32, {})
    assert message in str(error.value)
    assert name in str(error.value)


def test_unknown_deepspeed_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "zero_hpz_partition_size": 8}
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}))
    found, notes = LaunchFiles(source=path).read("megatron-8.3b", 4, {"tp": 2}, 0)
    assert found is not None
    assert (found.layout.dp, found.layout.zero, found.layout.global_batch) == (2, 2, 4)
    assert found.layout.overlap is False  # DeepSpeed's default below stage 3
    assert notes == ["options that the prediction ignores: zero_optimization.zero_hpz_partition_size"]


def test_torchtitan_distributes_layers_by_its_own_rule(tmp_path: Path) -> None:
    """Without options, embedding and logits count as one layer each: 34 layers over 4 stages are 9, 9, 8, 8."""
    path = tmp_path / "t.toml"
    path.write_text('[model]\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = 4\n')
    found, reading = read_experiment(path, 8, {})
    assert found.layout.stage_layers == (8, 9, 8, 7)
    layout = found.layout
    assert (found.model.name, layout.zero, layout.dp, layout.micro_batch) == ("llama3-8b", 2, 2, 1)
    assert any("activation_checkpoint.mode = selective" in remark for remark in reading.remarks)


def test_all_forms_of_arguments_are_parsed() -> None:
    text = "A='--x 1 --y'\nB=2\nrun.py $A --z=$B --w ${C:-3} --flag # --no\n"
    assert parse_arguments(text) == {"x": 1, "y": True, "z": 2, "w": 3, "flag": True}


def test_custom_model_becomes_a_flavor_of_torchtitan(tmp_path: Path) -> None:
    model = replace(LLAMA, name="mine", ffn=5000, heads=16, kv_heads=4, head_dim=0)
    experiment = Experiment(name="x", model=model, layout=Layout(), training=Training(seq=64))
    code = next(path for path in write_files("torchtitan", experiment, 8, tmp_path) if path.suffix == ".py")
    found: dict[str, Any] = {}
    text = "\n".join(line for line in code.read_text().splitlines() if "import" not in line)
    exec(text, {"TransformerModelArgs": dict, "llama3_args": found})
    args = found["mine"]
    # torchtitan/models/llama3/model/model.py, class FeedForward
    width = int(args["ffn_dim_multiplier"] * int(2 * 4 * args["dim"] / 3))
    assert args["multiple_of"] * ((width + args["multiple_of"] - 1) // args["multiple_of"]) == 5000


@pytest.mark.parametrize("key", ["megatron", "torchtitan", "nanotron"])
def test_every_option_exists_in_the_framework_sources(key: str) -> None:
    """`test_launched.py` runs DeepSpeed with its options."""
    known = read_toml(Path(__file__).parent / "option_names.toml")[key]["names"].split()
    framework = load_framework(key)
    torchrun = "nproc_per_node nnodes node_rank master_addr master_port rdzv_id rdzv_backend rdzv_endpoint standalone"
    known += torchrun.split() if key == "megatron" else []  # scripts also contain the options of the launcher
    assert {*framework.rules, *framework.ignored} <= set(known)


def test_documented_differences_match_the_documented_layout() -> None:
    layout = Layout(tp=2, dp=8, sp=True, zero=1, grad_dtype="fp32", precision="bf16", global_batch=64)
    experiment = Experiment(name="x", model=LLAMA, layout=layout, training=Training())
    page = (Path(__file__).parents[3] / "docs/launch.md").read_text()
    documented = [line.strip()[2:] for line in page.splitlines() if line.startswith("    # layout.")]
    assert documented == load_framework("torchtitan").differences(experiment)
