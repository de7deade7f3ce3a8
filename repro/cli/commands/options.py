"""Options of several commands: each with one name and one help text, and an option for every key of a layout."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Container
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Optional, get_origin, get_type_hints

import typer

from repro.config.engines import SOFTWARE, find_software
from repro.config.errors import ConfigError, require
from repro.config.layout import SELECTIVE, Layout
from repro.simulate.plan.candidates import LayoutQuery

PANEL = "Layout"
NO_OPTIONS = ("dp", "offload_optimizer")
"""Keys without an option: `--gpus` gives the number of replicas, and no traced step offloads."""
WITHOUT = {
    "global_batch": "Without: what fills the pipeline once; for a plan 2 per GPU.",
    "precision": "Without: fp16 before A100, then bf16; fp32 on CPUs.",
}
"""Help on the value without the option, where it is not the default of the layout."""


def check_folder(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return `value`; raise `ConfigError` if it is a file."""
    fine = value is None or value.is_dir() or not value.exists()
    require(fine, option.opts[0], str(value), "a folder; this is a file")
    return value


def check_writable_file(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return `value`; raise `ConfigError` if no file can be written there."""
    if value is not None:
        from repro.config.files import check_writable

        check_writable(option.opts[0], value)
    return value


def _existing(context: typer.Context, option: typer.CallbackParam, value: Path) -> Path:
    """Return `value`; raise `ConfigError` if it is a missing folder that the command line names."""
    if _given(context, option) and not value.exists():
        raise ConfigError("--results", str(value), says="no such folder")
    check_folder(option, value)
    return value


def check_count(context: typer.Context, option: typer.CallbackParam, value: int) -> int:
    """Return `value`; raise `ConfigError` if it is given and below 1. The default 0 means that it is not given."""
    right = "a whole number of at least 1, or left out"
    require(not _given(context, option) or value >= 1, option.opts[0], value, right)
    return value


def count_option(text: str, metavar: str | None = None) -> Any:
    """Return an option for a count, without a default that help shows."""
    return typer.Option(help=text, callback=check_count, metavar=metavar, show_default=False)


def file_option(text: str, metavar: str | None = None) -> Any:
    """Return an option for a file that the command writes."""
    return typer.Option(help=text, callback=check_writable_file, metavar=metavar)


def _given(context: typer.Context, option: typer.CallbackParam) -> bool:
    source = context.get_parameter_source(option.name or "")
    return source is not None and source.name == "COMMANDLINE"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Details = Annotated[bool, typer.Option("--details", help="Print all results, not one screen of them.")]
SuiteFiles = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Argument(help="Suites: files, or names of packaged ones.", metavar="SUITE..."),
]
SuiteFile = Annotated[
    Path, typer.Argument(help="A suite: a file, or the name of a packaged one.", metavar="SUITE")
]
Only = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates this on Python 3.10 as well
    typer.Option("--only", help="Only experiments of this name or glob; may be repeated.", metavar="GLOB"),
]
Rerun = Annotated[bool, typer.Option("--rerun", help="Run again what the store already holds.")]
ProfileFile = Annotated[
    Path,
    typer.Option(
        "--profile", help="How the site's SLURM is asked: a file, or a packaged name.", metavar="PROFILE"
    ),
]
Results = Annotated[
    Path, typer.Option("--results", help="Where records are stored.", metavar="DIR", callback=check_folder)
]
StoredResults = Annotated[
    Path, typer.Option("--results", help="Where records are stored.", metavar="DIR", callback=_existing)
]
Ledger = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--ledger", help="Judge the claims of this file too; may be repeated.", metavar="FILE.toml"),
]

ModelName = Annotated[
    str,
    typer.Option(
        "--model", help="A model's name, its file, or FILE.toml:NAME.", metavar="M", show_default=False
    ),
]
LaunchSource = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--from",
        help="Take model and layout from a file of Megatron-LM (.sh), torchtitan (.toml), DeepSpeed (.json) or "
        "nanotron (.yaml).",
        metavar="FILE",
    ),
]
LaunchFramework = Annotated[
    str,
    typer.Option(
        help="Write what launches the layout: megatron, torchtitan, deepspeed or nanotron.",
        metavar="NAME",
        show_default=False,
    ),
]
LaunchFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--output", help="The folder of the files of --launch.", metavar="DIR", callback=check_folder
    ),
]


def first_sentences(kind: type[Any]) -> dict[str, str]:
    """Return the first sentence of the text under each field of a dataclass, without backticks."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ).body
    return {
        field.target.id: re.split(r"(?<=\.)\s+(?=[A-Z`])", ast.literal_eval(text.value))[0].replace("`", "")
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _layout_options() -> dict[str, Any]:
    """Return the option of each field of `Layout` that is a number, a word or a switch, by name of the field."""
    hints, sentences = get_type_hints(Layout), first_sentences(Layout)
    found = {}
    for field in dataclasses.fields(Layout):
        hint = hints[field.name]
        # `tuple[int, ...]` is no class, although `isinstance(hint, type)` is true for it in Python 3.10.
        is_class = isinstance(hint, type) and get_origin(hint) is None
        hint, is_class = (bool, True) if hint == bool | str else (hint, is_class)
        kind = next((kind for kind in (bool, int, str) if is_class and issubclass(hint, kind)), None)
        if kind is not None and field.name not in NO_OPTIONS:
            found[field.name] = _option(field.name, kind, field.default, sentences[field.name])
    return found


def _option(key: str, kind: type[Any], default: Any, sentence: str) -> Any:
    name = key.replace("_", "-")
    after = WITHOUT.get(key, "")
    if not after and (kind is str or default is True):
        after = "The default." if default is True else f"Default: {default}."
    option = typer.Option(
        f"--{name}/--no-{name}" if kind is bool else f"--{name}",
        help=f"{' '.join(sentence.split())}  {after}".strip(),
        metavar={int: "N", str: "NAME"}.get(kind),
        show_default=False,
        rich_help_panel=PANEL,
    )
    return Annotated[Optional[kind], option]  # noqa: UP045 - typer evaluates this on Python 3.10 as well


LAYOUT = _layout_options()


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


QUESTION = [
    _parameter(
        "system", Annotated[str, typer.Option("--system", help="A system's name, or its file.", metavar="S")]
    ),
    _parameter(
        "gpus", Annotated[int, typer.Option("--gpus", help="Devices: tp x cp x pp x dp.", metavar="N")]
    ),
    _parameter(
        "software",
        Annotated[
            str,
            typer.Option(
                help=f"Settings of a report's software, over which options take precedence: {', '.join(SOFTWARE)}.",
                metavar="NAME",
                show_default=False,
                rich_help_panel=PANEL,
            ),
        ],
        "",
    ),
    *(_parameter(key, annotation, None) for key, annotation in LAYOUT.items()),
    _parameter(
        "recompute_selective",
        Annotated[
            bool,
            typer.Option(
                "--recompute-selective",
                help="Recompute the core of attention alone (recompute = selective).",
                rich_help_panel=PANEL,
            ),
        ],
        False,
    ),
    _parameter(
        "seq",
        Annotated[
            int,
            count_option(
                "Tokens of a sample; by default those of the model. Learned positions allow no more."
            ),
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
"""Options of a `LayoutQuery`: a system, and every key of a layout. A key without its option is absent."""


def question_options(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with the options of `QUESTION` in place of its parameter `asked`; errors name the option."""
    taken = list(inspect.signature(command, eval_str=True).parameters.values())
    at = next(i for i, parameter in enumerate(taken) if parameter.name == "asked")
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken]
    signature = inspect.Signature([*own[:at], *QUESTION, *own[at + 1 :]])

    @functools.wraps(command)
    def with_options(**values: Any) -> int:
        try:
            asked = _layout_query({parameter.name: values.pop(parameter.name) for parameter in QUESTION})
            return command(**values, asked=asked)
        except ConfigError as error:
            raise as_option(error, signature.parameters) from None

    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return with_options


def _layout_query(given: dict[str, Any]) -> LayoutQuery:
    layout = {key: given.pop(key) for key in LAYOUT}
    if given.pop("recompute_selective"):
        layout["recompute"] = SELECTIVE
    keys = {key: value for key, value in layout.items() if value is not None}
    if software := given.pop("software"):
        keys = find_software(software).layout | keys | {"software": software}
    return LayoutQuery(layout=keys, **given)


def read_alternative(context: typer.Context, option: str, text: str) -> tuple[str, LayoutQuery]:
    """Return the model and the query of the running command after the options in `text` replace its own.

    Raises `ConfigError` about `option`, which has this text, if it contains anything else.
    """
    values, names = dict(context.params), ("model", *(parameter.name for parameter in QUESTION))
    given, rest, order = context.command.make_parser(context).parse_args(shlex.split(text))
    others = [*rest, *(f"--{p.name}" for p in order if p.name not in names)]
    require(
        not others, option, text, says=f"takes the model and options of the query, not {' '.join(others)}"
    )
    for parameter in order:
        values[parameter.name] = parameter.process_value(context, given[parameter.name])
    if "recompute" in given:
        values["recompute_selective"] = False
    return values["model"], _layout_query({name: values[name] for name in names[1:]})


def as_option(error: ConfigError, options: Container[str]) -> ConfigError:
    """Return `error` with the option that sets its key in place of the key; an error about a file is unchanged."""
    if error.file or error.key not in options:
        return error
    return error.for_key(f"--{error.key.replace('_', '-')}")
