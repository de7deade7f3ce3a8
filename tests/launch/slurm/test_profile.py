"""Tests of site profiles: provided files, defaults, errors, and profiles that fit a fake cluster or do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro.config import ConfigError
from repro.config.files import read_toml
from repro.launch.slurm import profile
from repro.launch.slurm.scheduler import UNLIMITED, format_time_limit, parse_time_limit
from tests.launch.runs import experiments
from tests.launch.slurm.conftest import SiteCommands

PROVIDED = sorted((Path(__file__).parents[3] / "slurm").glob("*.toml"))


@pytest.mark.parametrize("path", PROVIDED, ids=lambda path: path.stem)
def test_provided_profiles_load(path: Path) -> None:
    site = profile.load_profile(path)
    assert site.description
    assert site.ranks_per_node >= 1


def test_defaults_equal_the_values_of_generic_toml() -> None:
    """Only the keys in `filled` differ: the file sets the system, its GPUs, cores and memory."""
    written = read_toml(PROVIDED[0].with_name("generic.toml"))
    filled = {"system", "description", "gpus_per_node", "cpus_per_task", "memory"}
    site = profile.parse_profile({}, file="mine.toml")
    for table in (site, site.slurm, site.environment, site.storage):
        keys = written if table is site else written[type(table).__name__.lower()]
        for key, value in keys.items():
            assert isinstance(value, dict) or key in filled or getattr(table, key) == value, key
    assert (site.system, site.slurm.cpus_per_task, site.slurm.memory) == ("local", 0, "")
    assert (site.ranks_per_node, site.storage.private) == (1, True)
    assert site.class_of("a") == profile.CaseClass(match="*")


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("slurm", ("gpus_per_node", "tasks_per_node", "cpus_per_task", "requeues")),
        ("case", ("requeues", "nodes")),
    ],
)
def test_counts_may_be_zero_but_not_negative(table: str, keys: tuple[str, ...]) -> None:
    def parse(values: dict[str, int]) -> None:
        rows = [{"match": "x", **values}] if table == "case" else values
        profile.parse_profile({table: rows}, file="f")

    parse(dict.fromkeys(keys, 0))
    for key in keys:
        with pytest.raises(ConfigError, match=f"{key} = -1: must be 0 or more"):
            parse({key: -1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('system = "dgx3"', "system = 'dgx3'"),
        ('system = "dgx2"\n[slurm]\ngpus_per_node = 17', "slurm.gpus_per_node = 17: must be at most 16"),
        ('system = "dgx2"', "slurm.gpus_per_node = 0"),
        ('[slurm]\npartitions = "x"', "did you mean partition?"),
        ('[slurm]\ntime_limit = "soon"', "slurm.time_limit = 'soon'"),
        ('[slurm]\ntime_limit = "1"', "time_limit = '1': must be longer than signal_delay_s = 90 s"),
        ('[slurm]\ntime_limit = "01:59"', "longer than signal_delay_s"),  # sbatch ignores the seconds
        ('[slurm]\nsignal_delay_s = 60\ntime_limit = "1"', "longer than signal_delay_s = 60 s"),
        ('[[case]]\nmatch = "a*"\ntime_limit = "1"', "case a*.time_limit = '1': must be longer"),
        ('[slurm]\ngpu_request = "please"', "one of gpus-per-node, gres, none"),
        ("[slurm]\narray_parallelism = 0", "1 or more"),
        ('[[case]]\ntime_limit = "1:00:00"', "match: is missing"),
        ('[case]\nmatch = "x"', "tables [[case]]"),
        ('[environment]\nmodules = "cuda"', "environment.modules"),
        ('file = "x"', "unknown key"),
        ("[slurm", "not TOML"),
    ],
)
def test_profile_error_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        profile.load_profile(path)
    line = str(raised.value)
    assert line.startswith(str(path))
    assert message in line
    assert "\n" not in line


def test_time_limits_above_the_signal_delay_are_valid() -> None:
    for limit, delay in (("2", 90), ("1", 59), ("UNLIMITED", 90)):
        profile.parse_profile({"slurm": {"time_limit": limit, "signal_delay_s": delay}}, file="f")


def test_first_matching_case_class_applies() -> None:
    rows = [{"match": "a*", "nodes": 2}, {"match": "*", "nodes": 3}]
    site = profile.parse_profile({"case": rows}, file="f")
    assert (site.class_of("ab").nodes, site.class_of("b").nodes) == (2, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("90", 90), ("01:30:00", 90), ("10:30", 10.5), ("1-00", 1440), ("1-01:30", 1530)),
        *(("2-01:00:30", 2940.5), ("infinite", UNLIMITED)),
    ],
)
def test_time_limits_are_parsed_in_slurm_format(text: str, value: float) -> None:
    assert parse_time_limit(text) == value
    assert parse_time_limit(format_time_limit(value)) == value


def submit(commands: SiteCommands, text: str) -> tuple[int, str]:
    """Submit cases with 2 and with 4 ranks; return exit code and standard error."""
    commands.profile.write_text(text)
    body = experiments("a") + experiments("c4", extra="layout.dp = 4\n")
    code, _, error = commands.submit(commands.suite(body))
    return code, error


def examine(commands: SiteCommands, text: str, *options: str) -> tuple[int, dict[str, str]]:
    """Return the exit code of `repro doctor --profile`, and state and result of each check by name."""
    commands.profile.write_text(text)
    code, out, _ = commands.repro("doctor", "--profile", str(commands.profile), "--json", *options)
    return code, {check["name"]: f"{check['state']}: {check['found']}" for check in json.loads(out)["checks"]}


@pytest.mark.parametrize(
    ("text", "error", "check"),
    [
        (
            'partition = "nowhere"',
            "partition = 'nowhere': the cluster has no such partition; its partitions are debug, old",
            ("partition", "its partitions are debug, old, short"),
        ),
        (
            'partition = "old"',
            "partition = 'old': must be a partition that is up",
            ("partition", "no: old: 4 nodes, time limit UNLIMITED, down"),
        ),
        (
            'partition = "short"',
            "time_limit = '01:00:00': must be at most 00:10:00, the time limit of partition short",
            ("partition", "slurm.time_limit is 01:00:00"),
        ),
        (
            "gpus_per_node = 17",
            "gpus_per_node = 17: must be at most 16, the number of GPUs in a node of partition debug",
            ("GPUs", "16 per node, v100; slurm.gpus_per_node is 17"),
        ),
        (
            'gpus_per_node = 4\ngpu_type = "a100"',
            "gpu_type = 'a100': must be one of v100",
            ("GPUs", "slurm.gpu_type is a100"),
        ),
        ("tasks_per_node = 2\ncpus_per_task = 64", "cpus_per_task = 64: must be at most 48", None),
        (
            'tasks_per_node = 1\npartition = "short"\ntime_limit = "10:00"',
            "nodes = 4: must be at most 3, the number of nodes in partition short; c4 has 4 ranks, 1 per node",
            None,
        ),
    ],
)
def test_profile_that_does_not_fit_the_cluster_is_refused(
    commands: SiteCommands, text: str, error: str, check: tuple[str, str] | None
) -> None:
    """`repro submit` submits no job, and the doctor names the wrong key. The doctor knows no cases."""
    code, message = submit(commands, f"[slurm]\n{text}\n")
    assert (code, message.count("\n"), message[:7]) == (2, 1, "error: ")
    assert f"slurm.{error}" in message
    assert commands.slurm.state["scripts"] == {}
    assert list(commands.results.glob("jobs/*/submission.json")) == []
    code, checks = examine(commands, f"[slurm]\n{text}\n")
    assert code == bool(check)
    if check:
        assert checks[check[0]].startswith("no: ")
        assert check[1] in checks[check[0]]


@pytest.mark.parametrize(
    "text",
    [
        'partition = "short"\ntime_limit = "10:00"\ntasks_per_node = 2\ncpus_per_task = 48',
        'gpus_per_node = 16\ngpu_type = "V100"\n[[case]]\nmatch = "c4"\nnodes = 4',
    ],
)
def test_profile_at_the_limits_of_the_cluster_is_accepted(commands: SiteCommands, text: str) -> None:
    assert submit(commands, f"[slurm]\n{text}\n")[0] == 0


def test_results_must_be_in_an_existing_shared_folder(commands: SiteCommands) -> None:
    code, message = submit(commands, '[storage]\nshared = "/nowhere/at/all"\n')
    assert (code, "must be a folder in /nowhere/at/all, the folder storage.shared" in message) == (2, True)
    commands.results = commands.results.parent / "missing" / "results"
    code, message = submit(commands, f'[storage]\nshared = "{commands.results.parent}"\n')
    assert (code, message.count("\n")) == (2, 1)
    assert f"storage.shared = '{commands.results.parent}': must be a folder that can be written" in message
    assert commands.slurm.state["scripts"] == {}


def test_valid_profile_passes_and_missing_parts_of_slurm_are_named(
    commands: SiteCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.slurm.set(accounting=False)
    code, checks = examine(commands, "")
    assert code == 0
    assert checks["accounting"].startswith("limited")
    assert checks["partition"] == "yes: debug: 4 nodes, time limit 02:00:00"
    assert checks["request"].startswith("yes")
    commands.slurm.set(accounting=True)
    code, checks = examine(commands, "", "--nodes", "1")
    assert (code, checks["accounting"]) == (1, "yes: sacct answers")
    assert "this is no cluster" in checks["nodes"]
    monkeypatch.setenv("PATH", "/nowhere")
    code, checks = examine(commands, "")
    assert (code, "no sbatch" in checks["SLURM"]) == (1, True)


def test_case_classes_and_bound_gpus_are_limited(commands: SiteCommands) -> None:
    gpus = "[slurm]\ngpus_per_node = 4\n"
    assert "GPU binding" not in examine(commands, gpus)[1]
    rows = [
        ("a*", 'partition = "nowhere"'),
        ("b*", 'time_limit = "3:00:00"'),
        ("c*", 'partition = "short"\ntime_limit = "9"'),
    ]
    tables = "".join(f'[[case]]\nmatch = "{match}"\n{more}\n' for match, more in rows)
    code, checks = examine(commands, f'{gpus}options = {{ gpu-bind = "single:1" }}\n{tables}')
    assert code == 0, "other cases can be submitted"
    assert checks["GPU binding"].startswith("limited: gpu-bind = single:1")
    assert "its partitions are debug, old, short" in checks["case a*"]
    assert checks["case b*"] == "limited: debug: 4 nodes, time limit 02:00:00; case b*.time_limit is 3:00:00"
    assert checks["case c*"].startswith("yes: short")
