"""Functions by which expressions of the ledger read results that were measured on one device.

`largest_fit`, `fit_outcome` and `fit_states` read records of `repro fit --measure`, in which one process may allocate
the memory of one rank of N. `kernel_speedup` compares two runs that differ in their kernels only. Expressions name
conditions of a run and not its record, so that records of any machine qualify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from repro.claims.expression import Uncertain, Value
from repro.claims.ledger import ONE_RANK, PUBLISHED_SCALE
from repro.claims.records import Missing, uncertain_ratio
from repro.config import ConfigError, Experiment, Layout, models
from repro.config.engines import NATIVE
from repro.model.counts import total_parameters
from repro.results.schema import ExperimentRecord, FitRecord, MeasuredTrial
from repro.results.select import Selection
from repro.util import units

FIT_NAME, KERNELS_NAME = "repro fit", "kernels compared"
"""Names in messages about missing records: of a search for the largest model, and of runs with different kernels."""
LARGEST_GB_PER_GB = 1.024**3
"""Bytes of a GiB over bytes of a GB, because memory of "32 GB" may be 32e9 to 32 * 2**30 bytes."""
_NOT_COMPARED = ("kernels", "global_batch", "overlap", "gather_overlap", "tp_overlap")
"""Fields of a parallel layout that do not affect which model fits in memory."""


def device_functions(
    chosen: Selection, used: list[ExperimentRecord | FitRecord]
) -> dict[str, Callable[..., Value | Uncertain]]:
    """Return the functions by which ledger expressions read one-device results; they append records to `used`."""

    def largest(memory: float, hidden: int, **conditions: Any) -> MeasuredTrial:
        layout = _layout(**conditions)
        for record in reversed(chosen.fits):
            if _answers(record, layout, memory, hidden):
                used.append(record)
                assert record.largest is not None
                return record.largest
        raise Missing(
            FIT_NAME, "no record of `repro fit` has the claim's layout", _fit_command(layout, memory, hidden)
        )

    def largest_fit(*, memory: float, hidden: int, **conditions: Any) -> Value:
        """Return the parameter count of the largest model in `memory` bytes. `conditions`: layout, such as `zero`."""
        return largest(memory, hidden, **conditions).parameters

    def fit_outcome(layers: int, *, memory: float, hidden: int, **conditions: Any) -> Value:
        """Return `"ok"` if the largest measured model in `memory` bytes has `layers` layers or more, else `"oom"`."""
        return "ok" if layers <= largest(memory, hidden, **conditions).layers else "oom"

    def fit_states(model: str, *, ranks: int, zero: int, tp: int = 1) -> Value:
        """Return measured model-state bytes per rank in 16-bit training, from a `repro fit` search with this model."""
        parameters = total_parameters(models.load_model(model))
        for record in reversed(chosen.fits):
            size = _states(record, parameters, Layout(dp=ranks // tp, tp=tp, zero=zero))
            if size:
                used.append(record)
                return size
        command = f"{_FIT} --as-rank 0 --of {ranks} --zero {zero} --precision fp16 --recompute"
        command += f" --model {model} --search micro-batch"
        raise Missing(FIT_NAME, f"no record of a model with the size of {model}", command)

    def kernel_speedup(
        *, layers: int, hidden: int, vocab: int, micro_batch: int, precision: str = "bf16"
    ) -> Value | Uncertain:
        """Return samples/s with fused kernels over samples/s with torch's operators, in two equal runs on one GPU."""
        sizes = (layers, hidden, vocab, micro_batch, precision)
        for fused, reference in _kernel_pairs(chosen, sizes):
            used.extend((fused, reference))
            compared = chosen.by_pair.get((fused.label, reference.label))
            if compared is None:
                return fused.metrics["samples_per_s"] / reference.metrics["samples_per_s"]
            return uncertain_ratio(compared)
        reason = f"no runs with and without fused kernels of {layers} layers of width {hidden} on one GPU"
        raise Missing(KERNELS_NAME, reason, "repro run suites/one_gpu.toml --only '1.5b-*'")

    functions = (largest_fit, fit_outcome, fit_states, kernel_speedup)
    return {function.__name__: function for function in functions}


DEVICE_FUNCTIONS = frozenset({"largest_fit", "fit_outcome", "fit_states", "kernel_speedup"})
"""Functions of ledger expressions that select records by memory, layout and size of a run, not by experiment name."""


def scale_of_fits(used: Sequence[ExperimentRecord | FitRecord]) -> str:
    """Return the scale of the searches for the largest model in `used`, such as `one rank of 64`; empty without one."""
    fits = [record for record in used if isinstance(record, FitRecord)]
    if not fits:
        return ""
    return f"{ONE_RANK}{fits[0].ranks}" if any(fit.one_rank for fit in fits) else PUBLISHED_SCALE


def describe_fits(used: Sequence[ExperimentRecord | FitRecord]) -> str:
    """Return `46 layers fit with 30.2 GB reserved, 47 layers do not fit`; empty without a conclusive search."""
    for record in used:
        if isinstance(record, FitRecord) and record.search == "layers" and record.conclusive:
            assert record.largest is not None
            assert record.first_failing is not None
            memory = record.largest.memory
            reserved = memory.cuda.get("reserved_peak", 0) if memory else 0
            size = f" with {units.size(reserved)} reserved" if reserved else ""
            failing = f"{record.first_failing.layers} layers do not fit"
            return f"{record.largest.layers} layers fit{size}, {failing}"
    return ""


def _layout(
    *,
    ranks: int,
    zero: int,
    tp: int = 1,
    micro_batch: int = 1,
    recompute: int = 1,
    cb: int = 1,
    precision: str = "fp16",
) -> Layout:
    dp = ranks // tp
    return Layout(
        dp=dp,
        tp=tp,
        zero=zero,
        micro_batch=micro_batch,
        global_batch=dp * micro_batch,
        recompute=bool(recompute),
        cb=bool(cb),
        precision=precision,
    )


def _answers(record: FitRecord, layout: Layout, memory: float, hidden: int) -> bool:
    """Return whether a search on a GPU found the maximum number of layers with the given memory, layout and width."""
    experiment = _experiment(record)
    return (
        record.conclusive
        and record.search == "layers"
        and experiment is not None
        and experiment.system != "local"
        and memory <= record.limit_bytes <= memory * LARGEST_GB_PER_GB
        and experiment.model.hidden == hidden
        and _memory_conditions(experiment.layout) == _memory_conditions(layout)
    )


def _memory_conditions(layout: Layout) -> dict[str, Any]:
    return {key: value for key, value in asdict(layout).items() if key not in _NOT_COMPARED}


def _experiment(record: ExperimentRecord | FitRecord) -> Experiment | None:
    """Return the experiment of a record; None if its conditions are invalid, for example from a newer suite version."""
    try:
        return record.experiment
    except ConfigError:
        return None


def _states(record: FitRecord, parameters: int, layout: Layout) -> int:
    """Return the model-state bytes per rank of a search's largest model; 0 unless it has the given size and layout."""
    experiment, trial = _experiment(record), record.largest
    if experiment is None or trial is None or trial.memory is None or not trial.memory.states:
        return 0
    found = experiment.layout
    same = (found.dp, found.tp, found.pp, found.zero) == (layout.dp, layout.tp, 1, layout.zero)
    same = same and found.precision != "fp32" and found.grad_dtype == layout.grad_dtype
    same = same and not found.offload_optimizer
    return sum(trial.memory.states.values()) if same and trial.parameters == parameters else 0


_FIT = "repro fit --measure --system local-gpu --gpus 1"


def _fit_command(layout: Layout, memory: float, hidden: int) -> str:
    parts = [_FIT, f"--as-rank 0 --of {layout.world} --zero {layout.zero}"]
    parts += [f"--tp {layout.tp}"] * (layout.tp > 1)
    parts += ["--no-cb"] * (not layout.cb)
    parts += [f"--precision {layout.precision}"] + ["--recompute"] * layout.has_checkpoints
    parts += [f"--hidden {hidden} --micro-batch {layout.micro_batch} --memory-limit {memory / 1e9:g}GB"]
    return " ".join(parts)


def _kernel_pairs(
    chosen: Selection, sizes: tuple[int, int, int, int, str]
) -> Iterator[tuple[ExperimentRecord, ExperimentRecord]]:
    """Yield pairs (fused, reference) of runs on one GPU with equal `sizes` and different kernels, newest first."""
    sides: dict[str, list[ExperimentRecord]] = {}
    for record in sorted(chosen.measured, key=lambda record: record.order, reverse=True):
        experiment = _experiment(record)
        if experiment is None or record.outcome != "ok":
            continue
        model, layout = experiment.model, experiment.layout
        found = (model.layers, model.hidden, model.vocab, layout.micro_batch, layout.precision)
        on_gpu = experiment.engine == NATIVE and experiment.system != "local" and layout.world == 1
        if on_gpu and found == sizes and model.architecture == "gpt":
            sides.setdefault(layout.kernels.value, []).append(record)
    for fused in sides.get("fused", ()):
        for reference in sides.get("reference", ()):
            if _without_kernels(fused) == _without_kernels(reference):
                yield fused, reference


def _without_kernels(record: ExperimentRecord) -> dict[str, Any]:
    """Return the conditions of a run that must equal those of another run for a comparison of their kernels."""
    experiment = record.experiment.as_dict()
    layout = {key: value for key, value in experiment["layout"].items() if key != "kernels"}
    named = {key: value for key, value in experiment.items() if key not in ("name", "limits")}
    return {**named, "layout": layout, "suite": record.suite, "host": record.provenance.get("host")}
