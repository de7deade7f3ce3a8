"""Tests of invalid suite files: exit code 2 and one line with file, experiment, key, value and accepted values."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import cli
from repro.config import ConfigError, suites
from tests.launch.runs import MODEL

EXPERIMENT = '[[experiment]]\nname = "a"\nmodel = "tiny.toml"\n'
OTHER = '[[experiment]]\nname = "b"\nmodel = "tiny.toml"\ntraining.seed = 2\n'


def load(folder: Path, text: str) -> suites.Suite:
    (folder / "tiny.toml").write_text(MODEL)
    path = folder / "s.toml"
    path.write_text('[suite]\nname = "s"\n' + text)
    return suites.load_suite(path)


KEYS = [
    # Keys of the experiment, and the error after the names of the file and the experiment.
    ("layout.tp = 3", "layout.tp = 3: must be a divisor of heads = 4 (tiny)"),
    ("layout = { dp = 2, tp = 2, world = 8 }", "layout.world = 8: must be tp x pp x dp = 2 x 1 x 2 = 4"),
    (
        "layout = { dp = 2, micro_batch = 3, global_batch = 8 }",
        "layout.global_batch = 8: must be a multiple of dp * micro_batch = 2 * 3 = 6",
    ),
    ("layout.zerro = 1", "layout.zerro = 1: unknown key; did you mean zero?"),
    ("modell = 1", "modell = 1: unknown key; did you mean model?"),
    ("layout.micro_batch = -4", "layout.micro_batch = -4: must be an integer of at least 1"),
    ("layout.dp = true", "layout.dp = true: must be an integer"),
    ('training.lr = "1e-3"', "training.lr = '1e-3': must be a number"),
    ("limits.memory_bytes = -1", "limits.memory_bytes = -1: must be 0 (no limit) or more"),
    ('training.steps = "many"', "training.steps = 'many': must be an integer"),
    ("training.seq = 1000", "training.seq = 1000: must be at most the model's 16 learned positions"),
    (
        "training = { steps = 3, untimed_steps = 3 }",
        "training.untimed_steps = 3: must be fewer than steps = 3",
    ),
    ('engine = "alpa"', "engine = 'alpa': must be one of native, torch, deepspeed, megatron"),
    (
        'engine = "torch"\nlayout = { tp = 2, recompute = true, pa = true }',
        "layout.pa = true: must be false with engine torch",
    ),
    ('expect = "fail"', "expect = 'fail': must be one of ok, oom, diverged"),
    (
        'training.data = "nowhere.txt"',
        "training.data = 'nowhere.txt': must be synthetic, shakespeare, shakespeare-gpt2, or",
    ),
    (
        'training.data = "shakespeare-gpt2"',
        "training.data = 'shakespeare-gpt2': needs a model with GPT-2's vocabulary of 50257",
    ),
    (
        "layout.dp = 4\nnetwork = { nodes = 2, ranks_per_node = 1, between = 8e6 }",
        "network.nodes x ranks_per_node = 2: must be as many ranks as tp x pp x dp = 4",
    ),
    (
        "layout.dp = 2\nnetwork = { nodes = 2, ranks_per_node = 1 }",
        "network.between = 0.0: must be a rate in bytes/s",
    ),
    (
        "layout.dp = 2\nnetwork = { nodes = 1, ranks_per_node = 2, between = 8e6 }",
        "network.between = 8000000.0: must be omitted with one node",
    ),
    (
        'system = "dgx2"\nlayout.dp = 2\nnetwork = { nodes = 2, ranks_per_node = 1, between = 8e6 }',
        "system = 'dgx2': must be local, or a file of `repro calibrate`, since an emulated network",
    ),
    ('layout = "C2"', "layout.use = 'C2': unknown layout; the file has no [layouts]"),
    (
        "layout = { pp = 2, stage_layers = [1, 2] }",
        "layout.stage_layers = [1, 2]: must be numbers that add up to layers = 2 (tiny), not 3",
    ),
    ('system = "dgx"', "system = 'dgx': did you mean dgx2? known are"),
    (
        'engine = "torch"\ntraining.checkpoint_every = 5',
        "training.checkpoint_every = 5: must be 0 with engine torch; only engine native writes",
    ),
    ("training.checkpoint_every = -1", "training.checkpoint_every = -1: must be 0 or more"),
    ("training.lr = inf", "training.lr = inf: must be finite"),
    ("limits.timeout_s = inf", "limits.timeout_s = inf: must be finite"),
    (
        "limits.memory_bytes = 9223372036854775807",
        "limits.memory_bytes = 9223372036854775807: must be at most",
    ),
    ("training.seed = -1", "training.seed = -1: must be 0 or more and below 2**63"),
    (
        "training.seed = 18446744073709551616",
        "training.seed = 18446744073709551616: must be 0 or more and below 2**63",
    ),
    ('layout.overlap = "no"', "layout.overlap = 'no': must be true or false"),
    ("layout.sp = 1", "layout.sp = 1: must be true or false"),
    ("training = { lr = 1.0, min_lr = 10 }", "training.min_lr = 10.0: must be at most lr = 1"),
    (
        "layout = { pp = 2, stage_layers = [true, 3] }",
        "layout.stage_layers = [True, 3]: must be a list of numbers or texts",
    ),
    (
        "layout.dp = 2\nnetwork = { nodes = 2, ranks_per_node = 1, between = inf }",
        "network.between = inf: must be finite",
    ),
    (
        "layout.dp = 2\nnetwork = { nodes = 2, ranks_per_node = 1, between = 1e-9 }",
        "network.between = 1e-09: must be 0 (no limit), or at least 1 byte/s",
    ),
    (
        'training = { checkpoint_every = 5, continues = "a" }',
        "training.continues = 'a': unknown experiment; there is no other experiment",
    ),
]
CASES = {
    # Mistake: (text of the suite, error after the name of the file).
    "heads not divisible by tp of the defaults": (
        "[defaults.layout]\ntp = 3\n" + EXPERIMENT,
        'experiment "a": defaults.layout.tp = 3: must be a divisor of heads = 4 (tiny)',
    ),
    "unknown key in defaults": (
        "[defaults.training]\nstep = 1\n" + EXPERIMENT,
        "defaults.training.step = 1: unknown key; did you mean steps?",
    ),
    "unknown table": ("[default]\n" + EXPERIMENT, "default: unknown key; did you mean defaults?"),
    "no model": ('[[experiment]]\nname = "a"', 'experiment "a": model: is missing'),
    "unknown model": (
        '[[experiment]]\nname = "a"\nmodel = "gpt2-1.5"',
        "experiment \"a\": model = 'gpt2-1.5': no such model; did you mean gpt2-1.5b",
    ),
    "no name": (EXPERIMENT + "[[experiment]]\nlayout.dp = 2", "name: is missing in [[experiment]] number 2"),
    "same name": (EXPERIMENT + EXPERIMENT, "name = 'a': must be a name that no other experiment has"),
    "same conditions": (
        EXPERIMENT + EXPERIMENT.replace('"a"', '"b"'),
        'experiment "b": has the same conditions as "a"; remove one of the two experiments',
    ),
    "no experiment": ("", "experiment: is missing: add at least one [[experiment]] table"),
    "single brackets": (
        '[experiment]\nname = "a"',
        "experiment: must be [[experiment]] tables, in double brackets",
    ),
    "different world sizes in a comparison": (
        EXPERIMENT + OTHER + 'layout.dp = 2\n[[compare]]\nbaseline = "a"\nsubjects = ["b"]',
        'compare with baseline "a": experiment "b": layout.world = 2: must be 1 as in "a", with which it shares',
    ),
    "different world sizes in a launch": (
        EXPERIMENT + 'launch = "x"\n' + OTHER + 'launch = "x"\nlayout.tp = 2',
        'launch "x": experiment "b": layout.world = 2: must be 1 as in "a", with which it shares a launch',
    ),
    "different networks in a comparison": (
        EXPERIMENT
        + "layout.dp = 2\nnetwork = { nodes = 2, ranks_per_node = 1, between = 8e6 }\n"
        + OTHER
        + 'layout.dp = 2\n[[compare]]\nbaseline = "a"\nsubjects = ["b"]',
        'compare with baseline "a": experiment "b": network = \'none\': '
        "must be '2 nodes x 1 ranks, between 8e+06' as in \"a\", with which it shares a launch",
    ),
    "unknown network": (
        "[networks.slow]\nnodes = 2\n" + EXPERIMENT + 'network = "slwo"',
        "experiment \"a\": network.use = 'slwo': unknown network; did you mean slow?",
    ),
    "unknown key of a named network": (
        "[networks.slow]\nnods = 2\n" + EXPERIMENT,
        "networks.slow.nods = 2: unknown key; did you mean nodes?",
    ),
    "unknown experiment in a comparison": (
        EXPERIMENT + '[[compare]]\nbaseline = "a"\nsubjects = ["aa"]',
        "compare.subjects = 'aa': unknown experiment; did you mean a?",
    ),
    "experiment twice in a comparison": (
        EXPERIMENT + '[[compare]]\nbaseline = "a"\nsubjects = ["a"]',
        "compare.baseline = 'a': must name each experiment once",
    ),
    "more rounds than steps": (
        EXPERIMENT + OTHER + '[[compare]]\nbaseline = "a"\nsubjects = ["b"]\nrounds = 18',
        "compare.rounds = 18: must be at most the timed steps of a: 17",
    ),
    "no rounds": (
        EXPERIMENT + OTHER + '[[compare]]\nbaseline = "a"\nsubjects = ["b"]\nrounds = 0',
        "compare.rounds = 0: must be 1 or more",
    ),
    "launch of a compared experiment": (
        EXPERIMENT + OTHER + 'launch = "x"\n[[compare]]\nbaseline = "a"\nsubjects = ["b"]',
        "experiment \"b\": launch = 'x': must be omitted, because the experiments of a [[compare]] share one launch",
    ),
    "unknown layout": (
        "[layouts.C1]\nzero = 1\n" + EXPERIMENT + 'layout = "C2"',
        "experiment \"a\": layout.use = 'C2': unknown layout; known are C1",
    ),
    "unknown layout in defaults": (
        '[layouts.C1]\nzero = 1\n[defaults]\nlayout = "C3"\n' + EXPERIMENT,
        "experiment \"a\": defaults.layout.use = 'C3': unknown layout; known are C1",
    ),
    "a wrong value in a named layout": (
        "[layouts.C1]\ntp = 3\n" + EXPERIMENT + 'layout = { use = "C1", dp = 2 }',
        'experiment "a": layouts.C1.tp = 3: must be a divisor of heads = 4 (tiny)',
    ),
    "a wrong key in a named layout": (
        "[layouts.C1]\nzerro = 1\n" + EXPERIMENT,
        "layouts.C1.zerro = 1: unknown key; did you mean zero?",
    ),
    "a layout that is not a table": (
        "[layouts]\nC1 = 1\n" + EXPERIMENT,
        "layouts.C1 = 1: must be a table with keys of a layout",
    ),
    "compared runs with checkpoints": (
        EXPERIMENT + OTHER + 'training.checkpoint_every = 5\n[[compare]]\nbaseline = "a"\nsubjects = ["b"]\n',
        'experiment "b": training.checkpoint_every = 5: must be 0 for experiments of [[compare]]',
    ),
    "continues an unknown experiment": (
        EXPERIMENT + 'training = { checkpoint_every = 5, continues = "c" }\n' + OTHER,
        "experiment \"a\": training.continues = 'c': unknown experiment; known are b",
    ),
    "continues without writing checkpoints": (
        EXPERIMENT + 'training.continues = "b"\n' + OTHER,
        "experiment \"a\": training.continues = 'b': needs checkpoint_every of 1 or more",
    ),
    "continues an experiment without checkpoints": (
        EXPERIMENT + 'training = { checkpoint_every = 5, continues = "b" }\n' + OTHER,
        "experiment \"a\": training.continues = 'b': must be an experiment with checkpoint_every of 1 or more",
    ),
    "continues another training": (
        EXPERIMENT
        + 'training = { steps = 30, checkpoint_every = 5, continues = "b" }\n'
        + OTHER
        + "training.checkpoint_every = 5",
        "experiment \"a\": training.continues = 'b': must be an experiment with the same training; "
        "training.seed is 2 in that experiment and its default in this one",
    ),
    "continues without further steps": (
        EXPERIMENT
        + 'training = { checkpoint_every = 5, continues = "b" }\n'
        + OTHER
        + "training.checkpoint_every = 5",
        'experiment "a": training.steps = 20: must be more than the 20 steps of "b", which it continues',
    ),
    "not TOML": ("[[experiment]\n", "not TOML: "),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((EXPERIMENT + keys, f'experiment "a": {message}') for keys, message in KEYS),
        *CASES.values(),
    ],
    ids=[*(keys for keys, _ in KEYS), *CASES],
)
def test_error_in_a_suite_names_file_experiment_and_key(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    line = str(caught.value)
    assert "\n" not in line
    assert line.removeprefix(f"{tmp_path / 's.toml'}: ").startswith(expected)
    assert str(tmp_path / "s.toml") in line


def test_error_in_a_model_file_names_this_file(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(MODEL.replace("heads = 4", "heads = 5"))
    with pytest.raises(ConfigError, match=r"wrong\.toml.*heads = 5: must be a divisor of hidden = 16"):
        load(tmp_path, '[[experiment]]\nname = "a"\nmodel = "wrong.toml"')


def test_suite_needs_a_suite_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"s\.toml: suite: is missing"):
        suites.parse_suite({"experiment": []}, file="s.toml")


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (None, [], "No such file or directory: must be the path of a TOML file"),
        ("nonsense", [], "not TOML: "),
        (EXPERIMENT + "layout.tp = 3", [], "layout.tp = 3: must be a divisor of heads = 4"),
        (EXPERIMENT, ["--only", "z*"], "--only = 'z*': must be a glob that matches an experiment of"),
        (
            EXPERIMENT + 'system = "dgx2"\nlayout.dp = 400\n' + OTHER,
            ["--only", "a"],
            'experiment "a": not run: needs 400 GPUs of system dgx2',
        ),
        (
            '[defaults]\nsystem = "selene"\n' + EXPERIMENT + "layout.dp = 8\n" + OTHER,
            [],
            '2 experiments, the first of them "a": not run: needs 8 GPUs of system selene',
        ),
    ],
)
def test_run_with_an_invalid_suite_starts_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    arguments: list[str],
    expected: str,
) -> None:
    (tmp_path / "tiny.toml").write_text(MODEL)
    path = tmp_path / "s.toml"
    if text is not None:
        path.write_text('[suite]\nname = "s"\n' + text)
    results = tmp_path / "results"
    assert cli.main(["run", str(path), "--results", str(results), "--json", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert expected in err
    assert not results.exists()


def test_run_needs_as_many_visible_gpus_as_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "tiny.toml").write_text(MODEL)
    path = tmp_path / "s.toml"
    path.write_text('[suite]\nname = "s"\n' + EXPERIMENT + 'system = "local-gpu"\nlayout.dp = 2')
    assert cli.main(["run", str(path)]) == 2
    assert "not run: needs 2 GPUs of system local-gpu, and 1 are visible here" in capsys.readouterr().err
