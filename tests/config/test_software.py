"""Tests of named software of the reports in suites, plans, searches and commands of claims."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from repro import cli
from repro.claims.reader import load_ledger
from repro.claims.run_commands import SuiteCatalogue, experiments_of
from repro.config import ConfigError, Layout, models, systems
from repro.config.engines import SOFTWARE, with_software
from repro.config.enums import OperatorSet
from repro.config.words import layout_options
from repro.simulate.plan.candidates import PlanRequest, candidates
from repro.simulate.step import simulate
from tests.config.suites.test_layouts import layouts

BATCH = ("--global-batch", "64", "--precision", "bf16")
CASES = [(name, int(stage)) for name, software in SOFTWARE.items() for stage in software.stages]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_options_repeat_the_layout_of_each_software_and_stage(name: str, stage: int) -> None:
    layout = Layout(**with_software({"precision": "bf16", "software": name, "dp": 64, "zero": stage}))
    assert set(layout_options(layout, "bf16", name).split()) <= {"--zero", str(stage), *BATCH}
    found = layout_options(Layout(dp=64, zero=stage, precision="bf16", bucket_bytes=3), "bf16", name).split()
    assert {f"--{key}".replace("_", "-") for key in ("kernels", "bucket_bytes")} <= set(found)


def test_layout_keys_of_a_suite_override_its_software(tmp_path: Path) -> None:
    text = """
    layouts.old = { software = "megatron-2019", tp = 2 }
    experiment = [
        { name = "ddp", layout = { use = "old", dp = 2, zero = 0 } },
        { name = "one copy", layout = { use = "old", zero = 0, precision = "bf16" } },
        { name = "buckets", layout = { software = "today", dp = 64, micro_batch = 1 } },
    ]
    """
    head = 'suite.name = "s"\ndefaults = { model = "tiny.toml", layout = { precision = "fp16", micro_batch = 2 } }'
    old = {"kernels": OperatorSet.UNFUSED, "tp_overlap": False, "tp": 2, "micro_batch": 2}
    assert layouts(tmp_path, text, head) == [
        Layout(**old, precision="fp16", dp=2, gradient_as_bucket_view=False),
        Layout(**old, precision="bf16"),
        # Megatron-core: the larger of 40 million elements and 1 million per replica, 2 bytes each.
        Layout(kernels=OperatorSet.FUSED_2024, precision="fp16", dp=64, bucket_bytes=2 * 64_000_000),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('software = "megatron-2020"', "layout.software = 'megatron-2020': unknown software; did you mean"),
        (
            'software = "megatron-2019", zero = 2',
            "2: must be a ZeRO stage that software megatron-2019 has: 0",
        ),
        ("software = 2019", "layout.software = 2019: unknown software; known are"),
        ('software = "today", dp = "4"', "layout.dp = '4': must be an integer"),
        ('software = "today", zero = true', "layout.zero = true: must be an integer"),
    ],
)
def test_error_for_an_unknown_software_or_stage(tmp_path: Path, keys: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layouts(tmp_path, f'[[experiment]]\nname = "x"\nlayout = {{ {keys} }}')
    assert message in str(caught.value)
    assert 's.toml: experiment "x"' in str(caught.value)


def test_plan_has_only_options_of_its_software() -> None:
    system, model = systems.load_system_file("dgx2"), models.load_model("gpt2-1.5b")
    given = SOFTWARE["deepspeed-2020"].layout | {"software": "deepspeed-2020"}
    found = candidates(PlanRequest(model, system, 16, int(32e9), 1024, given))
    assert {layout.zero for layout in found if layout.dp > 1} == {0, 1, 2}
    assert {layout.zero1_reduce for layout in found if layout.zero == 1} == {"all-reduce"}
    assert {layout.md for layout in found} == {False, True}
    assert not any(layout.sp or layout.recompute == "selective" for layout in found)


def test_claim_command_finds_the_size_of_its_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes are compared with two digits, as published."""
    suites, commands = SuiteCatalogue().suites, 0
    for claim in load_ledger().claims:
        if not claim.repeat:
            continue
        commands += 1
        main = [row for row in claim.rows if row.main][:1]
        read = [full.partition("/") for kind, full in experiments_of(main) if kind == "simulated"]
        found = [suites[suite].entry(name).experiment for suite, _, name in read]
        fit = (e for e in found if simulate(e, systems.load_system_file(e.system)).fits)
        assert cli.main([*shlex.split(claim.repeat)[1:], "--json"]) == 0
        out, note = capsys.readouterr()
        assert (
            f"{json.loads(out)['largest']['params']:.1e}"
            == f"{max(e.model.published_params for e in fit):.1e}"
        ), claim.id
        assert len(note.splitlines()) == 1
        assert "kernels = unfused" in note
        cli.main(["claims", claim.id])
        assert f" the search: {claim.repeat}\n" in capsys.readouterr().out
    assert commands >= 2


def test_software_cannot_be_combined_with_another_frameworks_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["simulate", "--from", str(tmp_path / "x.sh"), "--system", "dgx2", "--gpus", "8"]
    assert cli.main([*command, "--software", "today"]) == 2
    assert "--software = 'today': cannot be combined with --from" in capsys.readouterr().err
