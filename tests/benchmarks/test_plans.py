"""A plan at the published scale: seconds of the whole search.

    make benchmarks

Target: the rows that are shown, with their intervals, in under 15 s for 1024 GPUs on two cores.
"""

from __future__ import annotations

import json
from typing import Any

from repro import cli

PLAN = "plan --model megatron-175b --system selene --gpus 1024 --global-batch 1536 --top 12 --json"


def test_plan(benchmark: Any, capsys: Any) -> None:
    """The best layouts of 175B on 1024 GPUs, on as many cores as there are."""
    benchmark.group = "plan a job"

    def answer() -> list[dict[str, Any]]:
        assert cli.main(PLAN.split()) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    rows = benchmark.pedantic(answer, rounds=1, iterations=1)
    benchmark.extra_info["best"] = rows[0]["layout"] | {"step_s": rows[0]["time"]["step_s"]}
    assert all(row["evidence"] == "full" for row in rows[:3])
    assert all(row["time"]["interval"] for row in rows)
