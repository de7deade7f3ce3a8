"""What `repro simulate`, `fit` and `plan` have in common on the command line, and what it comes to.

Options that are not given are absent: for a simulation they then have the layout's defaults, for a plan they
are what is searched.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Optional, TypeVar

import typer

from repro.config.errors import ConfigError, require
from repro.config.layout import Layout
from repro.config.system import System

T = TypeVar("T")
PANEL = "Layout"


def _option(kind: type[Any], *names: str, metavar: str = "N", help: str) -> Any:
    shown = None if kind is bool else metavar
    option = typer.Option(*names, help=help, metavar=shown, show_default=False, rich_help_panel=PANEL)
    return Annotated[Optional[kind], option]  # noqa: UP045 - typer evaluates this on Python 3.10 as well


LAYOUT: dict[str, Any] = {
    "tp": _option(int, "--tp", help="Tensor-parallel degree."),
    "pp": _option(int, "--pp", help="Pipeline stages."),
    "zero": _option(int, "--zero", help="ZeRO stage, 0 to 3."),
    "micro_batch": _option(int, "--micro-batch", help="Samples of one pass of a replica."),
    "global_batch": _option(
        int,
        "--global-batch",
        help="Samples of an optimizer step.  Without: what fills the pipeline once; for a plan 2 per GPU.",
    ),
    "recompute": _option(bool, "--recompute/--no-recompute", help="Recompute activations, block by block."),
    "sp": _option(bool, "--sp/--no-sp", help="Megatron's sequence parallelism."),
    "pa": _option(bool, "--pa/--no-pa", help="P_a: tp ranks share each activation checkpoint."),
    "pa_cpu": _option(bool, "--pa-cpu/--no-pa-cpu", help="P_a+cpu: checkpoints wait in host memory."),
    "md": _option(bool, "--md/--no-md", help="M_D: memory for checkpoints and gradients set aside once."),
    "cb": _option(bool, "--cb/--no-cb", help="C_B: fused buffers of constant size (the default)."),
    "schedule": _option(str, "--schedule", metavar="NAME", help="gpipe, 1f1b (default) or interleaved."),
    "chunks": _option(int, "--chunks", metavar="V", help="Model chunks of a stage (interleaved)."),
    "scatter_gather": _option(
        bool, "--scatter-gather/--no-scatter-gather", help="Send 1/tp of boundary tensors."
    ),
    "order": _option(str, "--order", metavar="AXES", help="Axes from neighbours outwards: tp-dp-pp."),
    "precision": _option(
        str,
        "--precision",
        metavar="P",
        help="fp32, bf16 or fp16.  Without: fp16 before A100, then bf16; fp32 on CPUs.",
    ),
    "zero1_reduce": _option(
        str, "--zero1-reduce", metavar="HOW", help="reduce-scatter, or all-reduce as released in 2020."
    ),
    "kernels": _option(
        str,
        "--kernels",
        metavar="NAME",
        help="fused (default), reference (torch's operators), softmax as in 2020, unfused as in 2019.",
    ),
    "overlap": _option(
        bool, "--overlap/--no-overlap", help="Communicate while computing (the default), or after it."
    ),
    "gather_overlap": _option(
        bool,
        "--gather-overlap/--no-gather-overlap",
        help="Gather parameters (ZeRO 1, 2) in the next forward pass (the default), or before it.",
    ),
}
"""Name in `Layout`: what typer makes of it."""


@dataclass(frozen=True)
class Asked:
    """What `repro simulate`, `fit` and `plan` are asked alike, as it was typed."""

    system: str
    gpus: int
    layout: dict[str, Any]
    """Keys of the layout that were given."""
    seq: int = 0
    """Tokens of a sample; 0: the model's longest."""
    memory_limit: str = ""
    expandable: bool = False


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


QUESTION = [
    _parameter(
        "system", Annotated[str, typer.Option("--system", help="A system's name, or its file.", metavar="S")]
    ),
    _parameter("gpus", Annotated[int, typer.Option("--gpus", help="Devices: tp x pp x dp.", metavar="N")]),
    *(_parameter(key, annotation, None) for key, annotation in LAYOUT.items()),
    _parameter(
        "seq",
        Annotated[
            int, typer.Option(help="Tokens of a sample; the model's longest by default.", show_default=False)
        ],
        0,
    ),
    _parameter(
        "memory_limit",
        Annotated[
            str,
            typer.Option(help="Take the device's memory for this much: 32GB, 32GiB or 16e9.", metavar="SIZE"),
        ],
        "",
    ),
    _parameter(
        "expandable",
        Annotated[bool, typer.Option("--expandable", help="torch's expandable segments.")],
        False,
    ),
]
"""The options that make an `Asked`."""


def question_options(command: Callable[..., int]) -> Callable[..., int]:
    """`command` with the options of `QUESTION` in the place of its parameter `asked`."""
    taken = list(inspect.signature(command, eval_str=True).parameters.values())
    at = next(i for i, parameter in enumerate(taken) if parameter.name == "asked")
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken]

    @functools.wraps(command)
    def with_options(**values: Any) -> int:
        given = {parameter.name: values.pop(parameter.name) for parameter in QUESTION}
        layout = {key: given.pop(key) for key in LAYOUT}
        asked = Asked(layout={k: v for k, v in layout.items() if v is not None}, **given)
        return command(**values, asked=asked)

    signature = inspect.Signature([*own[:at], *QUESTION, *own[at + 1 :]])
    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return with_options


_SIZE = re.compile(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*(?:([kmgt])(i?)b|b)?\s*", re.IGNORECASE)


def size(text: str, key: str = "--memory-limit") -> int | None:
    """Bytes in `32GB` (1e9), `32GiB` (2**30), `16e9`; None where nothing is given."""
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    number = float(found[1]) if found else 0.0
    if found is None or not 0 < number < 1e18:
        raise ConfigError(key, text, "a size in bytes: 32GB (1e9 each), 32GiB (2**30 each) or 16e9")
    power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
    return int(number * (1024 if found[3] else 1000) ** power)


def limit_of(system: System, given: int | None) -> int:
    """Bytes of a device's memory: as `given`, or the system's.  `ConfigError` where neither is known."""
    if given is None:
        known = system.device.memory_bytes
        if known.value is None:
            what = f"needed, since the memory of {system.name} is not known ({known.source})"
            raise ConfigError("--memory-limit", expected=what)
        given = int(known.value)
    require(
        given > system.context(),
        "--memory-limit",
        given,
        f"more than the {system.context()} bytes of {system.name} that no allocator can have (CUDA, NCCL)",
    )
    return given


def precision_of(system: System) -> str:
    """As the device computes best: fp16 before compute capability 8.0, which has no bf16; fp32 on processors."""
    if "memory" in system.links:  # its devices are processor cores
        return "fp32"
    capability = system.device.compute_capability
    return "fp16" if capability and float(capability) < 8 else "bf16"


def replicas(gpus: int, tp: int, pp: int) -> int:
    """The data-parallel degree of `gpus` devices."""
    require(gpus >= 1, "--gpus", gpus, "a whole number of at least 1")
    for key, degree in (("--tp", tp), ("--pp", pp)):
        require(degree >= 1, key, degree, "a whole number of at least 1")
    require(gpus % (tp * pp) == 0, "--gpus", gpus, f"a multiple of tp x pp = {tp} x {pp} = {tp * pp}")
    return gpus // (tp * pp)


def complete(given: dict[str, Any], gpus: int, system: System) -> Layout:
    """The layout that is meant: dp from the GPUs, precision from the device, schedule from the chunks.

    Without a global batch it is the smallest that fills the pipeline: micro_batch x dp x pp.
    """
    keys = with_defaults(given, system)
    keys["dp"] = replicas(gpus, keys.get("tp", 1), keys.get("pp", 1))
    if not keys.get("global_batch"):
        keys["global_batch"] = keys.get("micro_batch", 1) * keys["dp"] * keys.get("pp", 1)
    return named(lambda: Layout(**keys))


def with_defaults(given: dict[str, Any], system: System) -> dict[str, Any]:
    """`given` and what follows from it and from the device."""
    keys = {"precision": precision_of(system), **given}
    if keys.get("chunks", 1) > 1:
        keys.setdefault("schedule", "interleaved")
    return keys


def named(make: Callable[[], T]) -> T:
    """`make()`; a `ConfigError` names the option instead of the layout's key."""
    try:
        return make()
    except ConfigError as error:
        raise as_option(error) from None


def as_option(error: ConfigError) -> ConfigError:
    """`error`, about the option that sets its key."""
    known = error.key in LAYOUT or error.key in ("seq", "heads", "hidden", "vocab", "layers")
    key = f"--{error.key.replace('_', '-')}" if known else error.key
    return ConfigError(key, error.value, error.expected, file=error.file)
