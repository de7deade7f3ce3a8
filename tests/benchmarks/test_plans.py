"""Plans at the published scale: seconds of the whole search.

    make benchmarks

Target: under 60 s for 1024 GPUs on two cores.
"""

from __future__ import annotations

import json
from typing import Any

from repro import cli

PLAN = "plan --model megatron-175b --system selene --gpus 1024 --global-batch 1536 --json"


def test_plan(benchmark: Any, capsys: Any) -> None:
    """Every layout of 175B on 1024 GPUs, on as many cores as there are."""
    benchmark.group = "plan a job"

    def answer() -> list[dict[str, Any]]:
        assert cli.main(PLAN.split()) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    rows = benchmark.pedantic(answer, rounds=1, iterations=1)
    fits = [row for row in rows if row["outcome"] == "ok"]
    benchmark.extra_info["layouts"] = len(rows)
    benchmark.extra_info["fit"] = len(fits)
    benchmark.extra_info["best"] = fits[0]["layout"] | {"step_s": fits[0]["time"]["step_s"]}
    assert all(row["evidence"] == "full" for row in fits[:3])
