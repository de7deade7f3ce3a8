"""One simulated step for a reader who changes something: nothing is stored, nothing is judged."""

from __future__ import annotations

from typing import Any

from repro.config import ConfigError, Experiment, Layout, Training, models
from repro.measure.local_system import load_system
from repro.results.metrics import shown


def simulated_step(model: str, system: str, **layout: Any) -> dict[str, float | str]:
    """Trace one step of `model` on `system` in this process: its metrics, and `outcome` (`ok` or `oom`).

    `layout`: fields of `repro.Layout`, as in a suite: `dp=64, zero=2, micro_batch=8, precision="fp16"`.
    Names of metrics are those of simulated records.  Raises `ConfigError` for what cannot be.
    """
    from repro.launch.simulated import attempt

    known = models.load(model)
    experiment = Experiment(
        name="what-if",
        model=known,
        layout=Layout(**layout),
        training=Training(seq=known.seq),
        system=system,
    )
    record = attempt(experiment, load_system(system), "notebook")
    if record.outcome not in ("ok", "oom"):
        raise ConfigError("layout", layout, f"one that can be simulated: {record.reason}")
    return {"outcome": record.outcome, **shown(record.metrics, record.outcome)}
