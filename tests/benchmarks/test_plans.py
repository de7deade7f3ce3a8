"""Benchmark of `repro plan` at the published scale: seconds on two cores, and their ratio to the limit.

make benchmarks PYTEST_ARGS='-k plan'
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from repro import cli

PLANS = {
    "175B on 1024": "plan --model megatron-175b --system selene --gpus 1024",
    "405B on 16384": "plan --model llama3-405b --system dgx-h100 --gpus 16384",
}
LIMIT_S = 5.0


@pytest.mark.parametrize("name", PLANS)
def test_plan_of_published_clusters(benchmark: Any, capsys: Any, name: str) -> None:
    """The search simulates the best layouts with intervals, on all cores."""
    benchmark.group = "plan a job"

    def run_plan() -> list[dict[str, Any]]:
        assert cli.main([*PLANS[name].split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    rows = benchmark.pedantic(run_plan, rounds=1, iterations=1)
    benchmark.extra_info["of_limit"] = benchmark.stats.stats.min / LIMIT_S
    benchmark.extra_info["best"] = rows[0]["layout"] | {"step_s": rows[0]["time"]["step_s"]}
    assert all(row["evidence"] == "full" for row in rows[:3])
    assert all(row["time"]["interval"] for row in rows[:12])
