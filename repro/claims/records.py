"""What expressions of the ledger may read from the store: metrics, outcomes and compared ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from repro.claims.expression import Uncertain, Value
from repro.config.experiment import PROTOCOL, from_dict

CONCLUSIVE = ("ok", "oom", "diverged")
"""Outcomes that say something about the experiment and not about the day it was run."""


class Missing(Exception):
    """A record that an expression needs is not there.  ``str`` says which, or how its run ended."""

    def __init__(self, experiment: str, reason: str):
        self.experiment, self.reason = experiment, reason
        self.suite = experiment.partition("/")[0]
        super().__init__(f"{experiment}: {reason}")


class Records:
    """The newest conclusive record of each experiment and the newest comparison of each pair.

    Records of another measurement protocol are left out: they are not comparable with today's.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]):
        self._experiments: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._failures: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._comparisons: dict[tuple[str, str], Mapping[str, Any]] = {}
        for record in sorted(records, key=lambda r: str(r.get("written", ""))):
            if record.get("protocol") != PROTOCOL:
                continue
            suite = record.get("suite")
            if record.get("kind") == "experiment":
                at = (str(record.get("evidence")), f"{suite}/{record.get('name')}")
                conclusive = record.get("outcome") in CONCLUSIVE
                (self._experiments if conclusive else self._failures)[at] = record
            elif record.get("kind") == "comparison":
                subject, baseline = record["subject"]["name"], record["baseline"]["name"]
                self._comparisons[f"{suite}/{subject}", f"{suite}/{baseline}"] = record

    def functions(self, kind: str) -> dict[str, Callable[..., Value | Uncertain]]:
        """The functions for expressions of evidence ``kind`` (``simulated`` or ``measured``)."""

        def find(experiment: str) -> Mapping[str, Any]:
            record = self._experiments.get((kind, experiment))
            if record is not None:
                return record
            failed = self._failures.get((kind, experiment))
            if failed is None:
                raise Missing(experiment, "no record")
            raise Missing(
                experiment, f"ended {failed['outcome']}: {failed.get('reason') or 'no reason given'}"
            )

        def metric(experiment: str, name: str) -> Value | Uncertain:
            """A metric of an experiment that ended ok: ``metric("smoke/parity-tp2", "loss.last")``.

            One that has a confidence interval (``name.low``, ``name.high``) brings it along.
            """
            record = find(experiment)
            if record["outcome"] != "ok":
                raise Missing(
                    experiment, f"ended {record['outcome']}: {record.get('reason') or 'no reason given'}"
                )
            metrics = record.get("metrics", {})
            value = metrics.get(name)
            if not isinstance(value, int | float):
                raise Missing(experiment, f"its record has no metric {name}")
            if f"{name}.low" in metrics:
                return Uncertain(value, metrics[f"{name}.low"], metrics[f"{name}.high"])
            return value

        def setting(experiment: str, name: str) -> Value:
            """A number from the experiment's conditions: ``setting("smoke/parity-3d", "layout.tp")``.

            ``name`` is a field or property of ``model``, ``layout`` or ``training``, or ``seq``.
            """
            value: Any = from_dict(find(experiment)["experiment"])
            for part in name.split("."):
                value = None if part.startswith("_") else getattr(value, part, None)
            if not isinstance(value, int | float):
                raise Missing(experiment, f"its conditions have no number {name}")
            return value

        def parameters(experiment: str) -> Value | Uncertain:
            """The experiment's own Psi, counted on the model that it trained."""
            return metric(experiment, "parameters")

        def outcome(experiment: str) -> Value:
            """``"ok"``, ``"oom"`` or ``"diverged"``."""
            return str(find(experiment)["outcome"])

        def compared(subject: str, baseline: str) -> Value | Uncertain:
            """Throughput of ``subject`` over ``baseline`` in one interleaved run, with its 95 % interval."""
            record = self._comparisons.get((subject, baseline))
            if record is not None:
                return Uncertain(*_interval(record))
            record = self._comparisons.get((baseline, subject))
            if record is not None:
                ratio, low, high = _interval(record)
                return Uncertain(1 / ratio, 1 / high, 1 / low)
            raise Missing(subject, f"not compared with {baseline} in one run")

        return {
            "metric": metric,
            "setting": setting,
            "parameters": parameters,
            "outcome": outcome,
            "compared": compared,
        }


def _interval(comparison: Mapping[str, Any]) -> tuple[float, float, float]:
    """Ratio and its interval; too few rounds have none, and the ratio stands alone."""
    ratio, low, high = (comparison[name] for name in ("ratio", "low", "high"))
    return ratio, ratio if low is None else low, ratio if high is None else high
