"""Tests of invalid suite files: the error has one line with file, experiment, key, value and accepted values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro.config import ConfigError, suites
from tests.launch.runs import MODEL

EXPERIMENT = '[[experiment]]\nname = "a"\nmodel = "tiny.toml"'
PARTS = {
    "A": EXPERIMENT,
    "B": EXPERIMENT.replace('"a"', '"b"') + "\ntraining.seed = 2",
    "COMPARE": '[[compare]]\nbaseline = "a"\nsubjects = ["b"]',
}
NETWORK = "layout.dp = 2; network = { nodes = 2, ranks_per_node = 1"
KEYS = """
layout.tp = 3 => layout.tp = 3: must be a divisor of heads = 4 (tiny)
layout = { dp = 2, tp = 2, world = 8 } => layout.world = 8: must be tp x pp x dp = 2 x 1 x 2 = 4
layout = { dp = 2, micro_batch = 3, global_batch = 8 }
    => layout.global_batch = 8: must be a multiple of dp * micro_batch = 2 * 3 = 6
layout.zerro = 1 => layout.zerro = 1: unknown key; did you mean zero?
modell = 1 => modell = 1: unknown key; did you mean model?
layout.micro_batch = -4 => layout.micro_batch = -4: must be an integer of at least 1
layout.dp = true => layout.dp = true: must be an integer
layout.sp = 1 => layout.sp = 1: must be true or false
training.lr = "1e-3" => training.lr = '1e-3': must be a number
training.lr = inf => training.lr = inf: must be finite
training = { lr = 1.0, min_lr = 10 } => training.min_lr = 10.0: must be at most lr = 1
training.steps = "many" => training.steps = 'many': must be an integer
training = { steps = 3, untimed_steps = 3 } => training.untimed_steps = 3: must be fewer than steps = 3
training.seq = 1000 => training.seq = 1000: must be at most the model's 16 learned positions
training.seed = -1 => training.seed = -1: must be 0 or more and below 2**63
training.seed = 9223372036854775808 => training.seed = 9223372036854775808: must be 0 or more and below 2**63
training.data = "nowhere.txt" => training.data = 'nowhere.txt': must be synthetic, shakespeare, shakesp
training.data = "shakespeare-gpt2" => training.data = 'shakespeare-gpt2': needs a model with GPT-2's voca
training.checkpoint_every = -1 => training.checkpoint_every = -1: must be 0 or more
engine = "torch"; training.checkpoint_every = 5
    => training.checkpoint_every = 5: must be 0 with engine torch; only engine native writes
training = { checkpoint_every = 5, continues = "a" }
    => training.continues = 'a': unknown experiment; no other experiment is defined
limits.timeout_s = inf => limits.timeout_s = inf: must be finite
limits.memory_bytes = -1 => limits.memory_bytes = -1: must be 0 (no limit) or more
limits.memory_bytes = 9223372036854775807 => limits.memory_bytes = 9223372036854775807: must be at most
engine = "alpa" => engine = 'alpa': must be one of native, torch, deepspeed, megatron
engine = "torch"; layout = { tp = 2, recompute = true, pa = true }
    => layout.pa = true: must be false with engine torch
expect = "fail" => expect = 'fail': must be one of ok, oom, diverged
system = "dgx" => system = 'dgx': did you mean dgx2? known are
layout = "C2" => layout.use = 'C2': unknown layout; the suite file has no table [layouts]
layout = { pp = 2, stage_layers = [1, 2] }
    => layout.stage_layers = [1, 2]: must be numbers of layers whose sum is layers = 2 (tiny), not 3
layout = { pp = 2, stage_layers = [true, 3] } => layout.stage_layers = [True, 3]: must be a list of numbers or texts
NETWORK, between = 8e6 }; layout.tp = 2
    => network.nodes x ranks_per_node = 2: must be the number of ranks of the layout, tp x pp x dp = 4
NETWORK } => network.between = 0.0: must be a rate in bytes/s
NETWORK, between = inf } => network.between = inf: must be finite
NETWORK, between = 1e-9 } => network.between = 1e-09: must be 0 (no limit), or at least 1 byte/s
layout.dp = 2; network = { nodes = 1, ranks_per_node = 2, between = 8e6 }
    => network.between = 8000000.0: must be omitted with one node
system = "dgx2"; NETWORK, between = 8e6 }
    => system = 'dgx2': must be local, or a file of `repro calibrate`, since an emulated network
"""
"""Keys of the experiment "a" => error after the names of the file and the experiment."""
SUITES = """
[[experiment] => not TOML:
# nothing => experiment: is missing: add at least one [[experiment]] table
[experiment]; name = "a" => experiment: must be [[experiment]] tables, in double brackets
[[experiment]]; name = "a" => experiment "a": model: is missing
[[experiment]]; name = "a"; model = "gpt2-1.5"
    => experiment "a": model = 'gpt2-1.5': no such model; did you mean gpt2-1.5b
A; [[experiment]]; layout.dp = 2 => name: is missing in [[experiment]] number 2
A; A => name = 'a': must be a name that no other experiment has
A; [[experiment]]; name = "b"; model = "tiny.toml"
    => experiment "b": has the same conditions as "a"; remove one of the two experiments
[default]; A => default: unknown key; did you mean defaults?
[defaults.training]; step = 1; A => defaults.training.step = 1: unknown key; did you mean steps?
[defaults.layout]; tp = 3; A => experiment "a": defaults.layout.tp = 3: must be a divisor of heads = 4 (tiny)
[layouts.C1]; zero = 1; [defaults]; layout = "C3"; A
    => experiment "a": defaults.layout.use = 'C3': unknown layout; known are C1
[layouts]; C1 = 1; A => layouts.C1 = 1: must be a table with layout settings
[layouts.C1]; zerro = 1; A => layouts.C1.zerro = 1: unknown key; did you mean zero?
[layouts.C1]; tp = 3; A; layout = { use = "C1", dp = 2 }
    => experiment "a": layouts.C1.tp = 3: must be a divisor of heads = 4 (tiny)
[networks.slow]; nods = 2; A => networks.slow.nods = 2: unknown key; did you mean nodes?
[networks.slow]; nodes = 2; A; network = "slwo"
    => experiment "a": network.use = 'slwo': unknown network; did you mean slow?
A; B; layout.dp = 2; COMPARE
    => compare with baseline "a": experiment "b": layout.world = 2: must be 1, as in experiment "a"
A; launch = "x"; B; launch = "x"; layout.tp = 2
    => launch "x": experiment "b": layout.world = 2: must be 1, as in experiment "a" (same processes)
A; NETWORK, between = 8e6 }; B; layout.dp = 2; COMPARE
    => compare with baseline "a": experiment "b": network = 'none': must be '2 nodes x 1 ranks, between 8e+06', as in
       experiment "a" (same processes)
A; [[compare]]; baseline = "a"; subjects = ["aa"] => compare.subjects = 'aa': unknown experiment; did you mean a?
A; [[compare]]; baseline = "a"; subjects = ["a"] => compare.baseline = 'a': must name each experiment once
A; B; COMPARE; rounds = 18 => compare.rounds = 18: must be at most the number of timed steps of a: 17
A; B; COMPARE; rounds = 0 => compare.rounds = 0: must be 1 or more
A; B; launch = "x"; COMPARE
    => experiment "b": launch = 'x': must be omitted, because the experiments of a [[compare]] share one launch
A; B; training.checkpoint_every = 5; COMPARE
    => experiment "b": training.checkpoint_every = 5: must be 0 for experiments of [[compare]]
A; training = { checkpoint_every = 5, continues = "c" }; B
    => experiment "a": training.continues = 'c': unknown experiment; known are b
A; training = { continues = "b" }; B => experiment "a": training.continues = 'b': needs checkpoint_every of 1 or more
A; training = { checkpoint_every = 5, continues = "b" }; B
    => experiment "a": training.continues = 'b': must be an experiment with checkpoint_every of 1 or more
A; training = { steps = 30, checkpoint_every = 5, continues = "b" }; B; training.checkpoint_every = 5
    => experiment "a": training.continues = 'b': must be an experiment with equal model and training settings; the
       named experiment has training.seed = 2, and this experiment has its default
A; training = { checkpoint_every = 5, continues = "b" }; B; training.checkpoint_every = 5
    => experiment "a": training.steps = 20: must be more than the 20 steps of "b", which it continues
"""
"""Text of the suite after its name => error after the name of the file; A and B are experiments (`PARTS`)."""


def cases(table: str, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the text of the suite and the error of each row; `; ` separates lines of the suite."""
    for case in re.split(r"\n(?! )", table.strip()):
        text, message = re.split(r"\s+=> ", case)
        lines = text.replace("NETWORK", NETWORK).split("; ")
        yield "\n".join(PARTS.get(line, line) for line in lines), before + " ".join(message.split())


IN_A = [(f"{EXPERIMENT}\n{keys}", message) for keys, message in cases(KEYS, 'experiment "a": ')]


@pytest.mark.parametrize(("text", "expected"), [*IN_A, *cases(SUITES)], ids=lambda text: text[-50:])
def test_error_in_a_suite_names_file_experiment_and_key(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "tiny.toml").write_text(MODEL)
    path = tmp_path / "s.toml"
    path.write_text(f'[suite]\nname = "s"\n{text}')
    with pytest.raises(ConfigError) as caught:
        suites.load_suite(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.removeprefix(f"{path}: ").startswith(expected)
    assert str(path) in line


def test_error_in_a_model_file_names_this_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(MODEL.replace("heads = 4", "heads = 5"))
    (tmp_path / "s.toml").write_text(f'[suite]\nname = "s"\n{EXPERIMENT}')
    with pytest.raises(ConfigError, match=r"tiny\.toml.*heads = 5: must be a divisor of hidden = 16"):
        suites.load_suite(tmp_path / "s.toml")


def test_suite_needs_a_suite_table() -> None:
    with pytest.raises(ConfigError, match=r"s\.toml: suite: is missing"):
        suites.parse_suite({"experiment": []}, file="s.toml")
