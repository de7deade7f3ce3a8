"""The options that `repro simulate`, `fit` and `plan` have in common: a system, and every key of a layout.

Options that are not given are absent: for a simulation they then have the layout's defaults, for a plan they are
what is searched.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Container
from itertools import pairwise
from typing import Annotated, Any, Optional, get_origin, get_type_hints

import typer

from repro.cli.commands.options import check_count
from repro.config.errors import ConfigError
from repro.config.layout import SELECTIVE, Layout
from repro.simulate.plan.candidates import LayoutQuery

PANEL = "Layout"
NO_OPTIONS = ("dp", "offload_optimizer")
"""The GPUs say how many replicas there are, and no step that is traced offloads."""
WITHOUT = {
    "global_batch": "Without: what fills the pipeline once; for a plan 2 per GPU.",
    "precision": "Without: fp16 before A100, then bf16; fp32 on CPUs.",
}
"""What is taken where it is not the layout's default."""


def first_sentences(kind: type[Any]) -> dict[str, str]:
    """The first sentence of the text under each field of a dataclass, without backticks."""
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
    """Name in `Layout`: what typer makes of it.  A number, a word or a switch can be given; lists cannot."""
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
            typer.Option(
                help="Tokens of a sample; by default those of the model. Learned positions allow no more.",
                callback=check_count,
                show_default=False,
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
"""The options that make an `Asked`."""


def question_options(command: Callable[..., int]) -> Callable[..., int]:
    """`command` with the options of `QUESTION` in the place of its parameter `asked`.

    What is wrong in one of its options is said of the option.
    """
    taken = list(inspect.signature(command, eval_str=True).parameters.values())
    at = next(i for i, parameter in enumerate(taken) if parameter.name == "asked")
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken]
    signature = inspect.Signature([*own[:at], *QUESTION, *own[at + 1 :]])

    @functools.wraps(command)
    def with_options(**values: Any) -> int:
        given = {parameter.name: values.pop(parameter.name) for parameter in QUESTION}
        layout = {key: given.pop(key) for key in LAYOUT}
        if given.pop("recompute_selective"):
            layout["recompute"] = SELECTIVE
        asked = LayoutQuery(layout={k: v for k, v in layout.items() if v is not None}, **given)
        try:
            return command(**values, asked=asked)
        except ConfigError as error:
            raise as_option(error, signature.parameters) from None

    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return with_options


def as_option(error: ConfigError, options: Container[str]) -> ConfigError:
    """`error` about the option that sets its key, if one does; the key of a file stays what it is."""
    if error.file or error.key not in options:
        return error
    return error.for_key(f"--{error.key.replace('_', '-')}")
