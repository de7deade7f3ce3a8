"""Tests of site profiles: the provided files, the defaults, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config import ConfigError
from repro.config.files import read_toml
from repro.launch.slurm import profile
from repro.launch.slurm.scheduler import UNLIMITED, format_time_limit, parse_time_limit

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
    assert (site.system, site.slurm.gpus_per_node, site.slurm.tasks_per_node) == ("local", 0, 0)
    assert (site.slurm.cpus_per_task, site.slurm.memory, site.slurm.signal_delay_s) == (0, "", 90)
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
