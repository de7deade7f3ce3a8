"""Tests of ZeRO's traffic with several micro-batches: simulated bytes, the table of results, the suite template."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import cli
from repro.config import Layout
from repro.config.suites import load_suite, write_template
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny


def sent_bytes(layout: Layout) -> int:
    """Return the bytes that rank 0 sends in a step."""
    experiment = tiny(layout)
    return sum(times * message.sent for times, message in trace(experiment, roles(experiment)[0]).messages())


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_accumulation_multiplies_the_traffic_of_stages_2_and_3(micro_batches: int) -> None:
    """Relative to stage 0 with m micro-batches, stage 2 sends (m + 1) / 2 times the bytes, and stage 3 up to 1.5 m."""
    sent = [sent_bytes(Layout(dp=4, zero=stage, global_batch=4 * micro_batches)) for stage in range(4)]
    assert [n / sent[0] for n in sent[:3]] == pytest.approx([1, 1, (micro_batches + 1) / 2], rel=0.002)
    assert micro_batches < sent[3] / sent[0] <= 1.502 * micro_batches


def test_zero2_and_plain_template_layouts_send_equal_bytes(tmp_path: Path) -> None:
    write_template(suite := tmp_path / "s.toml")
    layouts = {e.experiment.name: e.experiment.layout for e in load_suite(suite).entries}
    assert sent_bytes(layouts["zero2"]) == pytest.approx(sent_bytes(layouts["plain"]), rel=0.002)


@pytest.mark.parametrize(("micro_batch", "has_note"), [(8, False), (4, True)])
def test_results_explain_the_traffic_of_stage_2_with_accumulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], micro_batch: int, has_note: bool
) -> None:
    write_template(suite := tmp_path / "s.toml")
    text = suite.read_text().replace("micro_batch = 8 ", f"micro_batch = {micro_batch} ")
    suite.write_text(text.replace("layers = 4", "layers = 1"))
    store = str(tmp_path / "store")
    assert cli.main(["run", str(suite), "--evidence", "simulated", "--results", store]) == 0
    capsys.readouterr()
    assert cli.main(["results", "--results", store, "s", "--details"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert ("with m micro-batches ZeRO 2 sends (m + 1)/2 times" in output) is has_note
