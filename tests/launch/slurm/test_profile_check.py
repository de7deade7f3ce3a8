"""Tests of profiles that fit a fake cluster or do not: `repro submit` and `repro doctor --profile`."""

from __future__ import annotations

import json

import pytest

from tests.launch.runs import experiments
from tests.launch.slurm.conftest import SiteCommands


def submit(commands: SiteCommands, profile: str) -> tuple[int, str]:
    """Submit cases with 2 and with 4 ranks; return exit code and standard error."""
    commands.profile.write_text(profile)
    body = experiments("a") + experiments("c4", extra="layout.dp = 4\n")
    code, _, error = commands.submit(commands.suite(body))
    return code, error


def examine(commands: SiteCommands, profile: str, *options: str) -> tuple[int, dict[str, str]]:
    """Return the exit code of `repro doctor --profile`, and state and result of each check by name."""
    commands.profile.write_text(profile)
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
