"""Tests of wrong commands and wrong files: exit code 2, and one line with the option or key and its accepted values."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from repro import cli
from repro.launch.local_launch import max_ranks
from repro.report.export import TABLES
from tests.claims.test_user_ledger import USER_LEDGER
from tests.launch.runs import MODEL as TINY

ONE = "simulate --model gpt2-1.5b --system dgx2"
STEP, FIT, PLAN = f"{ONE} --gpus 8", "fit --system dgx2 --gpus 8", "plan --model gpt2-1.5b --gpus 8 --system"
MEASURE = "fit --measure --system local --gpus 1"
VERSUS = f"{STEP} --micro-batch 2 --versus"
TWO = "schedule --pp 2 --micro-batches 2"
NO_SELECTIVE = "--recompute = 'selective': must be none or block, since fused attention stores no scores to"
NO_FOLDER = "--results = 'nowhere': no such folder"
PRICED = f"{PLAN} dgx2 --tokens 1e9 --price-per-gpu-hour"
NEEDS_MEMORY = "--memory-limit: is needed, since the memory of yuan is not known (not published"
OTHER_SYSTEMS = "must be one system, or different systems separated by commas"
NOT_AN_INTEGER = "must be an integer of at least 1"
TOO_MANY = "--gpus = 1000000000: must be at most 1,048,576"
RANKS = max_ranks().value + 1
COMMANDS = [
    # usage
    ("runn", "No such command 'runn'. Did you mean 'run'?"),
    ("run s.toml --jsn", "No such option: --jsn"),
    ("models a b", "Got unexpected extra argument(s) (b)"),
    ("models nope", "model = 'nope': no such model; `repro models` lists all models"),
    (ONE, "Missing option '--gpus'."),
    # models, systems and sizes
    ("simulate --model gpt2 --system dgx2 --gpus 1", "--model = 'gpt2': no such model; did you mean gpt3"),
    (f"{STEP} --model bert-large", "--model = 'bert-large': must be a model with architecture = gpt; of"),
    (f"{STEP} --system dgx9", "--system = 'dgx9': did you mean dgx2? known are a100-pcie"),
    (f"{STEP} --gpus 0", f"--gpus = 0: {NOT_AN_INTEGER}"),
    (f"{STEP} --seq 0", f"--seq = 0: {NOT_AN_INTEGER}; or omit the option"),
    (f"{STEP} --seq 4096", "--seq = 4096: must be at most the model's 1024 learned positions"),
    (f"{FIT} --hidden 0", f"--hidden = 0: {NOT_AN_INTEGER}; or omit the option"),
    (f"{FIT} --hidden 100 --heads 3", "--heads = 3: must be a divisor of hidden = 100 (or give head_dim)"),
    ("calibrate --system local --gpus 0", f"--gpus = 0: {NOT_AN_INTEGER}; or omit the option"),
    (f"{STEP} --gpus 1000000000", TOO_MANY),
    (f"{PLAN} dgx2 --gpus 1000000000", TOO_MANY),
    ("fit --system dgx2 --gpus 1000000000", TOO_MANY),
    (f"{FIT} --hidden 100000000000", "--hidden = 100000000000: must be at most 1,048,576 (forty times the"),
    (f"{STEP} --global-batch 8000000000000", "x pp x chunks = 1000000000000: must be at most 131,072 (seven"),
    (f"calibrate --system local --quick --gpus {RANKS}", f"at most {RANKS - 1}"),
    (f"{MEASURE} --memory-limit 500MB --gpus {RANKS}", f"at most {RANKS - 1}"),
    (f"lab up --between 8e6 --nodes {RANKS}", f"at most {RANKS - 1}"),
    # layouts
    (f"{STEP} --gpus 6 --tp 4", "--gpus = 6: must be a multiple of tp x pp = 4 x 1 = 4"),
    (f"{PLAN} dgx2 --tp 3", "--gpus = 8: must be a multiple of tp x pp = 3 x 1 = 3"),
    (f"{PLAN} dgx2 --cp 3", "--gpus = 8: must be a multiple of tp x cp x pp = 1 x 3 x 1"),
    (f"{STEP} --tp 2", "--tp = 2: must be a divisor of heads = 25 (gpt2-1.5b)"),
    (f"{STEP} --gpus 7 --pp 7", "--pp = 7: must be a divisor of layers = 48 (gpt2-1.5b), or stage_layers"),
    (f"{STEP} --zero 4", "--zero = 4: must be a ZeRO stage: 0, 1, 2 or 3"),
    (f"{STEP} --global-batch 3", "--global-batch = 3: must be a multiple of dp * micro_batch = 8 * 1 = 8"),
    (f"{PLAN} dgx2 --global-batch 3", "--global-batch = 3: must be a multiple of dp (one of 1, 2, 4, 8)"),
    (f"{PLAN} dgx2 --dp 3", "--dp = 3: must be gpus / (tp x pp), which can be 1, 2, 4, 8"),
    (f"{PLAN} dgx2 --precision bf16", "--precision = 'bf16': must be a precision that NVIDIA V100 SXM3 32"),
    (f"{PLAN} dgx2 --zero1-reduce x", "--zero1-reduce = 'x': must be one of reduce-scatter, all-reduce"),
    *((f"{each} --recompute-selective", NO_SELECTIVE) for each in (STEP, f"{PLAN} dgx2")),
    (f"{FIT} --model gpt2-1.5b --recompute-selective", NO_SELECTIVE),
    # memory and searches
    (f"{STEP} --memory-limit lots", "--memory-limit = 'lots': must be a size in bytes: 32GB (1e9 each),"),
    (f"{STEP} --memory-limit 1GB", "--memory-limit = 1000000000: must be more than the 1340000000 bytes"),
    ("fit --system yuan --gpus 8", NEEDS_MEMORY),
    (f"{PLAN} yuan", NEEDS_MEMORY),
    (f"{FIT} --search width", "--search = 'width': must be one of layers, micro-batch"),
    (f"{FIT} --search micro-batch", "--model = '': is needed in a search for the largest micro-batch"),
    (f"{FIT} --as-rank 3", "--as-rank = 3: cannot be used without --measure"),
    (f"{FIT} --measure", "--system = 'dgx2': must be a system of this machine with --measure: local,"),
    (MEASURE, "--memory-limit: a limit is required on processor cores: set the memory of each process"),
    (f"{MEASURE} --memory-limit 1GB --expandable", "--expandable: this option does not work with"),
    (f"{MEASURE} --memory-limit 1GB --as-rank 4 --of 4", "--as-rank = 4: must be a rank from 0 to 3"),
    # plans
    (f"{PLAN} dgx2 --top 0", "--top = 0: must be a number of layouts of at least 1"),
    (f"{PLAN} dgx2 --map --top 3", "--top = 3: cannot be combined with --map, because a map shows every tp"),
    (f"{PLAN} dgx2 --map --tokens 1e9", "--tokens = 1000000000.0: cannot be combined with --map, because"),
    (f"{PLAN} dgx2 --map --memory-limit 40GB,much", "--memory-limit = 'much': must be a size in bytes"),
    (f"{PLAN} dgx2 --memory-limit 4GB,5GB", "--memory-limit = '4GB,5GB': must be one memory size without"),
    (f"{PLAN} dgx2 --tokens -1", "--tokens = -1.0: must be a number of tokens"),
    (f"{PLAN} dgx2 --price-per-gpu-hour 2", "--tokens = 0.0: must be more than 0 with --price-per-gpu-hour"),
    (f"{PLAN} selene --rank-by cost", "--tokens = 0.0: must be more than 0 with --price-per-gpu-hour and"),
    (
        f"{PLAN} selene,dgx2 --rank-by cost --tokens 1e9",
        "--rank-by = 'cost': needs the key device.price_per_hour, which dgx2 lacks, or --price-per-gpu-hour",
    ),
    (f"{PRICED} 2 --system selene,dgx2", "--price-per-gpu-hour = '2': must be 2 prices above 0, separated"),
    *((f"{PRICED} {each}", f"--price-per-gpu-hour = '{each}': must be 1 price above") for each in "x0"),
    (f"{PLAN} dgx2,dgx3", "--system = 'dgx3': did you mean dgx2?"),
    (f"{PLAN} dgx2,dgx2", f"--system = 'dgx2,dgx2': {OTHER_SYSTEMS}"),
    (f"{PLAN} selene,dgx-a100", f"--system = 'selene,dgx-a100': {OTHER_SYSTEMS}"),
    (f"{PLAN} dgx2,selene --map", "--system = 'dgx2,selene': must be one system with --map"),
    # two layouts
    (f"{VERSUS} --details", "--versus = '--details': the value may contain model and layout options only,"),
    (f"{VERSUS} 8", "--versus = '8': the value may contain model and layout options only, not 8"),
    (f"{VERSUS} '--memory-limit 9XB'", "--memory-limit = '9XB': must be a size in bytes"),
    (f"{VERSUS} '--tp 3'", "--gpus = 8: must be a multiple of tp x pp = 3 x 1 = 3"),
    (f"{VERSUS} '--pp 2' --timeline t.json", "--versus = '--pp 2': cannot be combined with --timeline"),
    # launch files of other frameworks
    ("simulate --system dgx2 --gpus 8", "--model: no model is given; add --model NAME or --from FILE"),
    ("plan --system dgx2 --gpus 8", "--model: no model is given; add --model NAME or --from FILE"),
    (f"{STEP} --launch megatron", "--launch = 'megatron': --launch and --output must be used together"),
    (f"{PLAN} dgx2 --output x", "--launch = '': --launch and --output must be used together"),
    (f"{STEP} --launch jax --output x", "--launch = 'jax': must be one of megatron, torchtitan"),
    ("simulate --from none.sh --system dgx2 --gpus 8", "--from = 'none.sh': the file cannot be read"),
    ("plan --from none.txt --system dgx2 --gpus 8", "--from = 'none.txt': must be a file that ends in .sh,"),
    # schedules
    ("schedule --pp 4 --micro-batches 6 --chunks 2", "--micro-batches = 6: must be a multiple of"),
    ("schedule --pp 0 --micro-batches 6", "--pp = 0: must be an integer of at least 1"),
    ("schedule --pp 1 --micro-batches 6 --chunks 2", "--pp = 1: must be at least 2"),
    (f"{TWO} --schedule zb", "--schedule = 'zb': must be one of gpipe, 1f1b"),
    (f"{TWO} --schedule interleaved", "--chunks = 1: must be at least 2"),
    (f"{TWO} --forward 0", "--forward = '0': must be a number greater than 0"),
    (f"{TWO} --backward 1e9", "--backward = '1e9': must be a number greater"),
    (f"{TWO} --backward 1/0", "--backward = '1/0': must be a number greater"),
    ("schedule --pp 9999 --micro-batches 9999", "x chunks = 199960002: must be at most 1,000,000 ("),
    (f"{TWO} --json --svg", "--json = true: cannot be combined with --svg"),
    ("schedule --pp 2", "Missing option '--micro-batches'"),
    # empty arguments, missing folders and output files, which are checked before the command runs
    ("run ''", "argument = '': is empty"),
    (f"{STEP} --timeline ''", "--timeline = '': is empty"),
    (f"{PLAN} dgx2 --memory-limit=", "--memory-limit = '': is empty"),
    ("claims --results ''", "--results = '': is empty"),
    *((f"{each} --results nowhere", NO_FOLDER) for each in ("claims", "export", "validate", "report")),
    ("compare a b --results nowhere", NO_FOLDER),
    ("cancel --results nowhere", "--results = 'nowhere': must be a folder that `repro submit`"),
    (f"{STEP} --timeline /nowhere/x.json", "--timeline = '/nowhere/x.json': must be a file in an existing"),
    (f"{STEP} --snapshot /nowhere/x.pickle", "--snapshot = '/nowhere/x.pickle': must be a file in an"),
    (f"{STEP} --timeline .", "--timeline = '.': must be a file that can be written (Is a directory)"),
    # no user can create a file in /proc, not even root
    ("init /proc/x.toml", "FILE = '/proc/x.toml': must be a file that can be written"),
    ("calibrate --system local --quick --output /proc/x.toml", "--output = '/proc/x.toml': must be a file"),
    # runs, claims and clusters
    ("run", "SUITE = '': must be one or more suites without --claim, or no suite with --claim"),
    ("run smoke --claim 5", "SUITE = 'smoke': must be one or more suites without --claim, or no suite with"),
    ("run --claim 5 --only x", "--only = 'x': cannot be combined with --claim"),
    ("run --claim ds-same-loss --evidence simulated", "has no simulated evidence; `repro claims ds"),
    ("run smoke --dry-run --system dgx2", "--system = 'dgx2': this option needs --evidence simulated"),
    ("run smoke --profile --evidence simulated", "--profile = 'simulated': this option needs measured runs"),
    (f"run {'a' * 5000}.toml", "aaa...aaa"),
    ("submit smoke --profile dgx3 --dry-run", "--profile = 'dgx3': unknown profile; did you mean dgx2?"),
    ("submit zero_r --profile dgx2 --dry-run --exclude 'n1\nx'", "exclude = 'n1\\nx': must be text of one"),
    ("claims yuan-bubbles", "no such claim; did you mean yuan-bubble"),
    ("claims --system dgx-h10", "did you mean dgx-h100"),
    ("claims ds-3p75 --system dgx-h100", "did you mean ds-3p75x-lowbw"),
    ("claims tnlg-lambada --system dgx-h100", "for another system: its kind is quality, not one of"),
    ("claims yuan-bubble --system dgx-h100", "for another system: the value depends on sizes or on a"),
    ("export --format excel", "--format = 'excel': must be one of csv, parquet, markdown, latex"),
    ("export --table all", f"--table = 'all': must be one of {', '.join(TABLES)}, reference"),
    ("export --format parquet", "--output"),
    ("export --table records --claims zero-*", "--claims = 'zero-*': cannot be combined with --table rec"),
    ("export --claims no-such-*", "--claims = 'no-such-*': must be a glob that matches ids"),
    ("export --columns claim,size", "--columns = 'size': must be one of claim, about, title"),
    ("export --output /nowhere/x.csv", "a file in an existing folder"),
    ("artifact --output /nowhere/x.md", "--output = '/nowhere/x.md': must be a file in an existing folder"),
    ("doctor --nodes 3", "--nodes = 3: must be 0 without --profile, or 0 or more with --profile"),
]


def error_line(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a wrong command, and return its only output, one short line on stderr."""
    assert cli.main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert len(err) < 600
    return err


@pytest.mark.parametrize(("command", "message"), COMMANDS, ids=lambda text: text[:99])
def test_error_of_a_wrong_command_is_one_line(
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(command, capsys)


def test_error_of_a_wrong_command_precedes_the_import_of_torch(tmp_path: Path) -> None:
    """The error therefore also precedes each simulation, search and measurement."""
    code = (
        "import shlex, sys, repro.cli\n"
        f"for command in {[command for command, _ in COMMANDS]!r}:\n"
        "    print(repro.cli.main(shlex.split(command)), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["2 False"] * len(COMMANDS), done.stderr


SUITE = '[suite]\nname = "s"\n'
EXPERIMENT = f'{SUITE}[[experiment]]\nname = "a"\nmodel = "gpt2-tiny"\n'
OTHER = '[[experiment]]\nname = "b"\nmodel = "gpt2-tiny"\n'
MODEL = "layers = 2\nhidden = 64\nheads = 4\nvocab = 128\nseq = 64\n"
ROOT = Path(__file__).parents[2]
SYSTEM = (ROOT / "repro/config/systems/lowbw-v100.toml").read_text(encoding="utf-8")
PROFILE = (ROOT / "slurm/dgx2.toml").read_text(encoding="utf-8")
DEVICES = "devices_per_node = { value = 4"
assert DEVICES in SYSTEM
RUN, SUBMIT = "run s.toml --dry-run", "submit zero_r --profile p.toml --dry-run"
DOCTOR = "doctor --profile p.toml"
NOT_A_FOLDER = "must be the path of a folder, not of a file"
BAD_HEADS = MODEL.replace("heads = 4", "heads = 3")
NOT_A_NAME = "must be a name of at most 100 characters without /"
SCHEDULED = "needs 400 GPUs of system dgx2"
GIVEN = [
    # command, text of the first file that it names, part of the error
    (RUN, "nonsense", "not TOML: "),
    (RUN, f"x = {'[' * 5000}{']' * 5000}", "s.toml: not TOML: tables or lists are nested too deeply"),
    (RUN, EXPERIMENT.replace("gpt2-tiny", "a\\u0000.toml"), "must be the path of a TOML file"),
    (RUN, f"{EXPERIMENT}[models]\nx = 3", "models.x = 3: must be a table"),
    (RUN, f'{EXPERIMENT}training.data = "empty.txt"', "at least seq + 1 = 129 tokens; the file has 0"),
    *(
        (RUN, EXPERIMENT.replace(old, f'"{name}"'), NOT_A_NAME)
        for old in ('"a"', '"s"')
        for name in (" ", "--all", "a/b", "../a", ".a", "a" * 5000, "a\\nb")
    ),
    ("run nowhere.toml", EXPERIMENT, "No such file or directory: must be the path of a TOML file"),
    ("run s.toml", f"{EXPERIMENT}layout.tp = 3", "layout.tp = 3: must be a divisor of heads = "),
    ("run s.toml --only z*", EXPERIMENT, "--only = 'z*': must be a glob that matches an experiment of"),
    ("run s.toml", f'{EXPERIMENT}system = "dgx2"\nlayout.dp = 400', f'experiment "a": not run: {SCHEDULED}'),
    (
        "run s.toml",
        f'{EXPERIMENT}system = "selene"\nlayout.dp = 8\n{OTHER}system = "selene"',
        '2 experiments, of which the first is "a": not run: needs 8 GPUs of system selene',
    ),
    ("run s.toml", f"{EXPERIMENT}layout.dp = {RANKS}", f"this machine runs at most {RANKS - 1} (16 a core"),
    ("run s.toml s.toml --dry-run", EXPERIMENT, "s.toml: suite.name = 's': must be a name that no other"),
    ("run s --dry-run", EXPERIMENT, "suite = 's': did you mean s.toml?"),
    ("run s.toml --results s.toml", EXPERIMENT, f"'s.toml': {NOT_A_FOLDER}"),
    ("run s.toml --results s.toml --evidence simulated", EXPERIMENT, f"'s.toml': {NOT_A_FOLDER}"),
    ("collect --into s.toml", EXPERIMENT, f"--into = 's.toml': {NOT_A_FOLDER}"),
    ("report --out s.toml", EXPERIMENT, "--out = 's.toml': must be a writable folder"),
    # models and systems
    ("models m.toml", f"{MODEL}published_params = inf", "m.toml: m.published_params = inf: must be finite"),
    ("models m.toml", f'name = ""\n{MODEL}', "m.toml: name = '': must be a name"),
    ("models m.toml", f'name = "../x"\n{MODEL}', "name = '../x': must be a name"),
    ("fit --model m.toml --system dgx2 --gpus 1", BAD_HEADS, "error: m.toml: m.heads = 3: must be a"),
    *(
        ("systems s.toml", SYSTEM.replace(DEVICES, DEVICES[:-1] + value), f"per_node.value = {value}: {rule}")
        for value, rule in (("inf", "must be finite"), ("true", "must be a number"))
    ),
    # ledgers and clusters
    ("claims --ledger yuan.toml", 'title = "Mine"\n', "must be a file name that no other file of claims has"),
    *(
        (
            "claims mine-states --json --ledger mine.toml",
            USER_LEDGER.replace("model_state_bytes(1e9, 8, 3)", expression),
            "has the same value for all numbers of the row, so the test can never fail",
        )
        for expression in ("sqrt(-2)", "'a' * 10**9", "10**9 * 'a'")
    ),
    (SUBMIT, f"price_per_gpu_hour = -1.0\n{PROFILE}", "p.toml: price_per_gpu_hour = -1.0: must be 0"),
    (SUBMIT, '[slurm]\npartition = "a\\n#SBATCH"\n', "slurm.partition = 'a\\n#SBATCH': must be text of one"),
    (DOCTOR, '[slurm]\noptions = { "a b" = "x" }\n', "p.toml: slurm.options = 'a b': must be names of"),
    # commands that import torch before they check these arguments
    ("twin nope", "", "CLAIM = 'nope': must be the id of a claim"),
    ("twin ds-3p75x-lowbw --within nan", "", "--within = 'nan': must be bytes/s"),
    ("twin ds-3p75x-lowbw --steps 0", "", "--steps = 0: must be 2 or more"),
    ("twin ds-3p75x-lowbw --tp 0", "", f"--tp = 0: {NOT_AN_INTEGER}"),
]


@pytest.mark.parametrize(("command", "text", "message"), GIVEN, ids=lambda text: text[:40])
def test_error_in_a_file_is_one_line_and_nothing_starts(
    command: str,
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = next((word for word in command.split() if word.endswith(".toml")), "s.toml")
    given = {"s.toml" if name == "nowhere.toml" else name: text, "empty.txt": "", "tiny.toml": TINY}
    for file, content in given.items():
        (tmp_path / file).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert message in error_line(command, capsys)
    assert {path.name for path in tmp_path.iterdir()} == given.keys()


def test_error_of_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["artifact", "--output", "/dev/full"]) == 1
    assert capsys.readouterr().err == "error: /dev/full: No space left on device\n"
