"""Traffic of ZeRO with several micro-batches: the rule of `docs/concepts.md`, the table of results, the first suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro import cli
from repro.config import Layout
from repro.config.suites import load_suite, write_template
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny


def sent(layout: Layout) -> int:
    """Bytes that rank 0 sends in a step."""
    experiment = tiny(layout)
    return sum(times * message.sent for times, message in trace(experiment, roles(experiment)[0]).messages())


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_traffic_by_stage_and_micro_batches(micro_batches: int) -> None:
    plain = Layout(dp=4, global_batch=4 * micro_batches)
    found = [sent(replace(plain, zero=stage)) / sent(plain) for stage in range(4)]
    assert found[:3] == pytest.approx([1, 1, (micro_batches + 1) / 2], rel=0.002)
    assert micro_batches < found[3] <= 1.502 * micro_batches


def test_the_first_suite_shows_the_case_of_the_paper(tmp_path: Path) -> None:
    write_template(suite := tmp_path / "s.toml")
    layouts = {e.experiment.name: e.experiment.layout for e in load_suite(suite).entries}
    assert sent(layouts["zero2"]) == pytest.approx(sent(layouts["plain"]), rel=0.002)


@pytest.mark.parametrize(("micro_batch", "is_noted"), [(8, False), (4, True)])
def test_the_table_explains_more_than_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], micro_batch: int, is_noted: bool
) -> None:
    write_template(suite := tmp_path / "s.toml")
    text = suite.read_text().replace("micro_batch = 8 ", f"micro_batch = {micro_batch} ")
    suite.write_text(text.replace("layers = 4", "layers = 1"))
    store = str(tmp_path / "store")
    assert cli.main(["run", str(suite), "--evidence", "simulated", "--results", store]) == 0
    capsys.readouterr()
    assert cli.main(["results", "--results", store, "s", "--details"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert ("with m micro-batches ZeRO 2 sends (m + 1)/2 times" in words) is is_noted
