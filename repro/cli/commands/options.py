"""Options that several commands share, and one option for each key of a layout (`repro.Layout`)."""

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
"""Keys of the parallel layout without an option: `--gpus` determines `dp`; no optimizer offload is simulated."""
WITHOUT = {
    "global_batch": "Default: micro-batch x dp x pp samples per step; in repro plan, 2 samples per GPU and step.",
    "precision": "Default: fp16 on GPUs before A100, bf16 on A100 and later, fp32 on CPUs.",
}
"""Help text on defaults that depend on other settings, by key of the parallel layout (`repro.Layout`)."""


def check_folder(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the path `value` of an option; raise `ConfigError` if it is a file instead of a folder."""
    fine = value is None or value.is_dir() or not value.exists()
    require(fine, option.opts[0], str(value), "the path of a folder, not of a file")
    return value


def check_writable_file(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the path `value` of an option; raise `ConfigError` if this path cannot be written as a file."""
    if value is not None:
        from repro.config.files import check_writable

        check_writable(option.opts[0], value)
    return value


def _existing(context: typer.Context, option: typer.CallbackParam, value: Path) -> Path:
    """Return the folder `value` of an option; raise `ConfigError` if the command line names a missing folder."""
    if _given(context, option) and not value.exists():
        raise ConfigError("--results", str(value), says="no such folder")
    check_folder(option, value)
    return value


def check_count(context: typer.Context, option: typer.CallbackParam, value: int) -> int:
    """Return the `value` of an option; raise `ConfigError` if it is below 1, except for the default 0."""
    right = "an integer of at least 1; or omit the option"
    require(not _given(context, option) or value >= 1, option.opts[0], value, right)
    return value


def option(text: str, metavar: str | None = None, *, name: str | None = None, **settings: Any) -> Any:
    """Return a command-line option with the help `text`; `name`: its name if it differs from the parameter's name."""
    return typer.Option(*filter(None, [name]), help=text, metavar=metavar, **settings)


def argument(text: str, metavar: str) -> Any:
    """Return a positional command-line argument with the help `text`."""
    return typer.Argument(help=text, metavar=metavar)


def flag(name: str, text: str) -> Any:
    """Return a command-line flag: an option without a value and without a counterpart `--no-NAME`."""
    return option(text, name=name)


def count_option(text: str, metavar: str | None = None) -> Any:
    """Return a command-line option for a number of at least 1, whose default the help does not show."""
    return option(text, metavar, callback=check_count, show_default=False)


def file_option(text: str, metavar: str | None = None) -> Any:
    """Return a command-line option for the path of a file that the command writes."""
    return option(text, metavar, callback=check_writable_file)


def layout_option(text: str, metavar: str | None = None, **settings: Any) -> Any:
    """Return a command-line option that the help lists under the heading `Layout`."""
    return option(text, metavar, rich_help_panel=PANEL, **settings)


def folder_option(text: str, name: str | None = None) -> Any:
    """Return a command-line option for the path of a folder; an existing file is an error."""
    return option(text, "DIR", name=name, callback=check_folder)


# typer evaluates the annotations of options at run time, on every supported version of Python.
OptionalInt = Optional[int]  # noqa: UP045
OptionalNames = Optional[list[str]]  # noqa: UP045
OptionalPath = Optional[Path]  # noqa: UP045
OptionalPaths = Optional[list[Path]]  # noqa: UP045
OptionalRange = Optional[tuple[float, float]]  # noqa: UP045


def _given(context: typer.Context, option: typer.CallbackParam) -> bool:
    source = context.get_parameter_source(option.name or "")
    return source is not None and source.name == "COMMANDLINE"


Json = Annotated[bool, flag("--json", "Print the results as one JSON document and nothing else.")]
Details = Annotated[bool, flag("--details", "Print all results instead of a summary that fits one screen.")]
SuiteFiles = Annotated[OptionalPaths, argument("Suite files, or names of packaged suites.", "SUITE...")]
SuiteFile = Annotated[Path, argument("A suite file, or the name of a packaged suite.", "SUITE")]
Only = Annotated[
    OptionalNames, option("Select experiments of this name or glob; may be repeated.", "GLOB", name="--only")
]
Rerun = Annotated[bool, flag("--rerun", "Also run experiments that already have a record.")]
ProfileFile = Annotated[Path, option("File or packaged name of SLURM settings.", "PROFILE", name="--profile")]
Results = Annotated[Path, folder_option("Folder in which result records are stored.", name="--results")]
StoredResults = Annotated[
    Path, option("Folder in which result records are stored.", "DIR", name="--results", callback=_existing)
]
Ledger = Annotated[
    OptionalPaths, option("Also check this file's claims; may be repeated.", "FILE.toml", name="--ledger")
]

ModelName = Annotated[
    str, option("Packaged model, model file, or FILE.toml:NAME.", "M", name="--model", show_default=False)
]
LaunchSource = Annotated[
    OptionalPath,
    option(
        "Launch file with model and layout: Megatron-LM .sh, torchtitan .toml, DeepSpeed .json or nanotron .yaml.",
        "FILE",
        name="--from",
    ),
]
LaunchFramework = Annotated[
    str,
    option("Write launch files for megatron, torchtitan, deepspeed or nanotron.", "NAME", show_default=False),
]
LaunchFolder = Annotated[OptionalPath, folder_option("Folder for the written launch files.", name="--output")]


def first_sentences(kind: type[Any]) -> dict[str, str]:
    """Return the first sentence of each field's docstring in a dataclass, without backticks, by field name."""
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


def _layout_options() -> dict[str, tuple[Any, Any]]:
    """Return type and command-line option of each `int`, `str` or `bool` field of the parallel layout, by field."""
    hints, sentences = get_type_hints(Layout), first_sentences(Layout)
    found = {}
    for field in dataclasses.fields(Layout):
        hint = hints[field.name]
        # In Python 3.10 `isinstance(hint, type)` is also true for `tuple[int, ...]`, which `issubclass` rejects.
        is_class = isinstance(hint, type) and get_origin(hint) is None
        hint, is_class = (bool, True) if hint == bool | str else (hint, is_class)
        kind = next((kind for kind in (bool, int, str) if is_class and issubclass(hint, kind)), None)
        if kind is not None and field.name not in NO_OPTIONS:
            found[field.name] = _option(field.name, kind, field.default, sentences[field.name])
    return found


def _option(key: str, kind: type[Any], default: Any, sentence: str) -> tuple[Any, Any]:
    name = key.replace("_", "-")
    after = WITHOUT.get(key, "")
    if not after and (kind is str or default is True):
        after = "The default." if default is True else f"Default: {default}."
    return Optional[kind], layout_option(  # noqa: UP045
        f"{' '.join(sentence.split())}  {after}".strip(),
        {int: "N", str: "NAME"}.get(kind),
        name=f"--{name}/--no-{name}" if kind is bool else f"--{name}",
        show_default=False,
    )


LAYOUT = _layout_options()


def _parameter(
    name: str, kind: Any, option: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


_SOFTWARE = f"Layout settings of a published software, which other options override: {', '.join(SOFTWARE)}."
_SELECTIVE = "Recompute only the core of attention: scores, softmax, dropout (recompute = selective)."
_SEQ = "Tokens per sample. Default: the model's sequence length, which is the maximum for learned positions."
QUESTION = [
    _parameter("system", str, option("Name or file of the system: devices and links.", "S", name="--system")),
    _parameter("gpus", int, option("Number of devices: tp x cp x pp x dp.", "N", name="--gpus")),
    _parameter("software", str, layout_option(_SOFTWARE, "NAME", show_default=False), ""),
    *(_parameter(key, *kind_and_option, None) for key, kind_and_option in LAYOUT.items()),
    _parameter("recompute_selective", bool, layout_option(_SELECTIVE, name="--recompute-selective"), False),
    _parameter("seq", int, count_option(_SEQ), 0),
    _parameter(
        "memory_limit",
        str,
        option("Memory per device (32GB, 32GiB, 16e9) instead of the system's.", "SIZE"),
        "",
    ),
    _parameter("expandable", bool, flag("--expandable", "Use torch's expandable memory segments."), False),
]
"""Command-line parameters that describe a simulated parallel layout: system, devices, each key of `repro.Layout`."""


def question_options(command: Callable[..., int]) -> Callable[..., int]:
    """Replace the parameter `query` of a command by options for system, devices and each key of the parallel layout.

    An error about a key names the command-line option that sets this key.
    """
    taken = list(inspect.signature(command, eval_str=True).parameters.values())
    at = next(i for i, parameter in enumerate(taken) if parameter.name == "query")
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken]
    signature = inspect.Signature([*own[:at], *QUESTION, *own[at + 1 :]])

    @functools.wraps(command)
    def with_options(**values: Any) -> int:
        try:
            query = _layout_query({parameter.name: values.pop(parameter.name) for parameter in QUESTION})
            return command(**values, query=query)
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
    """Return model name and layout query of the running command after options in `text` replace its own options.

    `option`: name of the option whose value is `text`. Raises `ConfigError` if `text` contains other options.
    """
    values, names = dict(context.params), ("model", *(parameter.name for parameter in QUESTION))
    given, rest, order = context.command.make_parser(context).parse_args(shlex.split(text))
    others = [*rest, *(f"--{p.name}" for p in order if p.name not in names)]
    wrong = f"the value may contain model and layout options only, not {' '.join(others)}"
    require(not others, option, text, says=wrong)
    for parameter in order:
        values[parameter.name] = parameter.process_value(context, given[parameter.name])
    if "recompute" in given:
        values["recompute_selective"] = False
    return values["model"], _layout_query({name: values[name] for name in names[1:]})


def as_option(error: ConfigError, options: Container[str]) -> ConfigError:
    """Return `error` with the command-line option in place of the key that it sets; file errors are unchanged."""
    if error.file or error.key not in options:
        return error
    return error.for_key(f"--{error.key.replace('_', '-')}")
