"""Test of bytes that library engines send: counters of interfaces equal counted messages plus headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulate.on_networks import experiments, most_over_ledger, run, suite
from tests.engines.needs import needs

pytestmark = pytest.mark.usefixtures("emulation")
LAYOUTS = {"deepspeed": "dp = 4, zero = 2", "megatron": "dp = 2, tp = 2", "torch": "dp = 4"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in LAYOUTS])
def test_interface_bytes_equal_counted_bytes_plus_headers(engine: str, tmp_path: Path) -> None:
    body = f'[[experiment]]\nname = "one"\nengine = "{engine}"\nnetwork = "slow"\nlayout = {{ {LAYOUTS[engine]} }}\n'
    code, err = run(suite(tmp_path, body), tmp_path / "results")
    assert code == 0, err
    (record,) = experiments(tmp_path / "results")
    assert record.network is not None
    for rank, rows in enumerate(record.comm_by_rank):
        counted = sum(row.sent_bytes for row in rows)
        assert counted > 1e5
        assert (
            counted <= record.network.sent_bytes[rank] <= most_over_ledger(record.network) * counted + 50_000
        )
