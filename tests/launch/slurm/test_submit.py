"""Tests of `repro submit` on a fake cluster: scripts for sbatch, the number of calls, and refused input."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from repro.config import suites
from repro.launch.slurm import profile
from repro.launch.slurm.allocation import srun_step
from repro.launch.slurm.allocation.bundle import SubmissionWork
from repro.launch.slurm.case_states import Registry
from repro.launch.slurm.submission import job_array
from repro.launch.slurm.submission.job_array import ArrayShape, JobArray
from repro.results.store import Store
from tests.launch.runs import experiments
from tests.launch.slurm.conftest import EVERY_KEY, SiteCommands
from tests.records import made_up

pytest.importorskip("submitit")
BODY = experiments("a", "b") + experiments("c4", extra="layout.dp = 4\n")


def refused(commands: SiteCommands, suite: Path, *options: str) -> str:
    """Return the one-line error with which `repro submit` refuses a suite."""
    code, _, error = commands.submit(suite, *options)
    assert (code, error.count("\n"), error[:7]) == (2, 1, "error: ")
    return error


def test_submitted_scripts_equal_the_dry_run(commands: SiteCommands) -> None:
    suite, options = commands.suite(BODY), ("--exclude", "n3", "--json")
    code, out, _ = commands.submit(suite, *options, "--dry-run")
    planned = json.loads(out)
    shapes = [(a["nodes"], a["tasks_per_node"], a["time_limit_s"]) for a in planned["arrays"]]
    assert (code, shapes) == (0, [(2, 2, 1800), (1, 2, 1800)])
    assert commands.slurm.state["calls"] == []
    assert not commands.results.exists()
    code, out, _ = commands.submit(suite, *options)
    message, scripts = json.loads(out), commands.slurm.state["scripts"]
    assert (code, message["jobs"]) == (0, ["12", "13"])
    for array, number in zip(planned["arrays"], message["jobs"], strict=True):
        assert scripts[number] == array["script"].replace("SUBMISSION", message["submission"])
    assert "--exclude=n3" in scripts["12"]
    assert "--array=0-1%2" in scripts["13"]


def test_live_cases_are_not_submitted_again(commands: SiteCommands) -> None:
    suite = commands.suite(BODY)
    assert commands.submit(suite, "--only", "a")[0] == 0
    code, out, _ = commands.submit(suite)
    assert (code, "1 case in a live job: a (job 12)" in out) == (0, True)
    code, out, _ = commands.submit(suite)
    assert (code, "Nothing to submit." in out) == (0, True)
    with Registry(commands.results).submitting():
        assert "another `repro submit` uses this store" in refused(commands, suite)
    assert len(commands.slurm.state["scripts"]) == 3
    commands.slurm.job("12", state="CANCELLED")  # lost cases are submitted again
    assert commands.submit(suite)[0] == 0
    assert len(commands.slurm.state["scripts"]) == 4


def test_submission_is_private_and_takes_few_slurm_calls(commands: SiteCommands) -> None:
    with Store(commands.results) as store:
        store.append(made_up("other"))
        (record,) = store.records()
    body = experiments(*(f"x{i}" for i in range(30)))
    body += experiments(*(f"y{i}" for i in range(10)), extra="layout.dp = 4\n")
    assert commands.submit(commands.suite(body))[0] == 0
    assert len(commands.slurm.calls("sbatch")) == 2
    (submission,) = Registry(commands.results).all()
    assert submission.newest_record == record.sequence
    for path in (commands.results / "jobs").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert len(commands.status()) == 40
    assert len(commands.slurm.calls("squeue")) == 1


def test_earlier_arrays_remain_after_a_refused_array(commands: SiteCommands) -> None:
    suite = commands.suite(BODY)
    commands.slurm.set(refuse_after=1)
    code, _, error = commands.submit(suite)
    assert (code, "Invalid account" in error) == (1, True)
    (submission,) = Registry(commands.results).all()
    assert [array.job_id for array in submission.arrays] == ["12", ""]
    states = {name: case["state"] for name, case in commands.status().items()}
    assert states == {"c4": "pending", "a": "not submitted", "b": "not submitted"}
    commands.slurm.set(refuse_after=None)
    assert commands.submit(suite)[0] == 0
    assert len(commands.slurm.state["scripts"]) == 2


def test_script_contains_all_keys_of_the_profile(commands: SiteCommands) -> None:
    commands.profile.write_text(EVERY_KEY)
    body = experiments("a", extra='system = "dgx2"\nlayout.dp = 16\n')
    body += experiments("large-1t", extra='system = "dgx2"\nlayout.dp = 32\n')
    code, out, _ = commands.submit(commands.suite(body), "--dry-run", "--json")
    assert code == 0
    large, a = (array["script"].splitlines() for array in json.loads(out)["arrays"])
    for script, options in (
        (a, "partition=gpu account=lab qos=long constraint=nvlink exclude='n3,n[7-8]' mem=0"),
        (a, "gres=gpu:v100:16 cpus-per-task=6 ntasks-per-node=16 nodes=1 exclusive time=90 signal=USR2@120"),
        (a, "reservation=bench distribution=block requeue"),
        (large, "partition=wide time=1500 nodes=4 ntasks-per-node=8"),
    ):
        assert {f"#SBATCH --{option}" for option in options.split()} <= set(script)
    text = "\n".join(a)
    order = ["module load cuda/12.6", "source /shared/venv/bin/activate", "export NCCL_IB_HCA=mlx5", "srun "]
    assert [text.index(line) for line in order] == sorted(text.index(line) for line in order)
    # The controller runs outside the container, which has no srun. The steps of the ranks run inside.
    (command,) = (line for line in a if line.startswith("srun "))
    assert {"--nodes=1", "--ntasks=1", "--relative=0", "--overlap", sys.executable} <= set(command.split())
    assert "container" not in command
    ranks = srun_step.srun_command(profile.load_profile(commands.profile), 18, 8, ["module", "folder"])
    inside = {"--container-image=image.sqsh", "--container-mounts=/data", "--cpus-per-task=6", "--nodes=3"}
    assert inside <= set(ranks)
    assert ranks[-4:] == ["/opt/my python", "-m", "module", "folder"]


def test_missing_profile_keys_add_no_parameters() -> None:
    def request(time_min: float, **slurm: Any) -> dict[str, Any]:
        shape = ArrayShape(nodes=3, tasks_per_node=2, time_min=time_min, partition="")
        site = profile.parse_profile({"slurm": slurm}, file="f")
        return job_array.submitit_parameters(JobArray(shape=shape, bundles=()), site, "name")

    common = {
        "job_name": "name",
        "nodes": 3,
        "ntasks_per_node": 2,
        "time": 1,
        "signal_delay_s": 90,
        "array_parallelism": 4,
        "setup": ["umask 077"],
        "srun_args": ["--nodes=1", "--ntasks=1", "--relative=0", "--overlap"],
        "exclusive": True,
        "additional_parameters": {"requeue": True, "distribution": "block"},
    }
    assert request(0.5) == common, "to SLURM, 0 minutes mean no limit"
    assert request(1.9) == common
    assert request(2.0) == common | {"time": 2}
    gpus = {"gpus_per_node": 4, "gpu_type": "a100"}
    assert request(1.0, **gpus) == common | {"gpus_per_node": "a100:4"}
    assert request(1.0, **gpus, gpu_request="gres") == common | {"gres": "gpu:a100:4"}
    assert request(1.0, **gpus, gpu_request="none") == common
    shared = {key: value for key, value in common.items() if key != "exclusive"}
    assert request(1.0, **gpus, exclusive=False) == shared | {"gpus_per_node": "a100:2"}, "one GPU per rank"


def test_profile_sets_the_number_of_requeues(commands: SiteCommands) -> None:
    """submitit stores the remaining requeues in the pickled submission."""
    from submitit.core.utils import DelayedSubmission

    commands.profile.write_text('[slurm]\nrequeues = 3\n[[case]]\nmatch = "long"\nrequeues = 7\n')
    assert commands.submit(commands.suite(experiments("a", "long")))[0] == 0
    (folder,) = commands.results.glob("jobs/*/submitit")
    pickled = [DelayedSubmission.load(path) for path in sorted(folder.glob("*_submitted.pkl"))]
    bundles = SubmissionWork.load(folder.parent).bundles
    found = {bundles[one.function.bundle].experiments[0].name: one._timeout_countdown for one in pickled}
    assert found == {"a": 3, "long": 7}


def test_dry_run_estimates_hours_and_out_of_memory_cases(commands: SiteCommands) -> None:
    """The hours follow from time limits, and also from simulated records if the store has any."""
    commands.profile.write_text('system = "dgx2"\nprice_per_gpu_hour = 2.0\n[slurm]\ngpus_per_node = 16\n')
    suite = commands.suite(experiments("a", "large", extra='system = "dgx2"\n'))
    with Store(commands.results) as store:
        for entry in suites.load_suite(suite).entries:
            outcome = "oom" if entry.experiment.name == "large" else "ok"
            keys: dict[str, Any] = {"key": entry.experiment.key, "outcome": outcome, "evidence": "simulated"}
            store.append(made_up(entry.experiment.name, metrics={"step_seconds.median": 30.0}, **keys))
    code, out, _ = commands.submit(suite, "--dry-run", "--details")
    assert code == 0
    most = "32 GPU-hours, 64.00 at 2 per GPU-hour"  # 1 h of 16 GPUs for each of 2 cases
    predicted = "0.1 GPU-hours, 0.20 at 2 per GPU-hour"  # 6 steps of 30 s on 2 GPUs
    for text in (
        f"Maximum cost, if all jobs reach their time limits: {most}.",
        f"Predicted cost of the training steps of 1 case: {predicted}.",
        "1 case predicted to run out of memory: large",
        "# array 0: 2 cases in 2 jobs of 1 node x 2 ranks, time limit 01:00:00\n#   a (0.1 GPU-hours)\n#   large",
    ):
        assert f"{text}\n" in out


def test_suite_of_another_system_is_refused_without_move(commands: SiteCommands) -> None:
    commands.profile.write_text('system = "dgx2"\n[slurm]\ngpus_per_node = 16\ngpu_type = "v100"\n')
    suite = commands.suite(BODY)
    for how in ([], ["--move"]):  # cases of system local do not move
        message = refused(commands, suite, "--dry-run", "--json", *how)
        assert f"Use a profile of system local, or `repro run {suite}` on one machine" in message
        assert ("--move cannot move cases of system local" in message) == bool(how)
    suite = commands.suite(experiments("a", extra='system = "dgx2h"\n'))
    message = refused(commands, suite, "--dry-run")
    assert "--move runs a on dgx2 as a@dgx2" in message
    code, out, _ = commands.submit(suite, "--dry-run", "--move", "--json")
    found: dict[str, Any] = json.loads(out)
    assert (code, found["cases"]) == (0, ["a@dgx2"])
    assert "--gpus-per-node=v100:16" in found["arrays"][0]["script"]
