"""`repro evaluate` and `export-weights`: what models have learnt, and their weights for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli.commands.options import Json, folder

app = typer.Typer()

Weights = Annotated[
    Path,
    typer.Option(
        help="A folder of transformers' GPT-2, of a checkpoint of Megatron-LM, or of one of `repro run`.",
        metavar="DIR",
    ),
]
Sizes = Annotated[
    str,
    typer.Option(
        "--model",
        help="Sizes of a checkpoint of Megatron-LM that says none: a model's name or file.",
        metavar="M",
    ),
]


@app.command(
    "export-weights", epilog="Example:  repro export-weights --weights results/checkpoints/KEY --output gpt2"
)
def export_weights(
    weights: Weights,
    output: Annotated[Path, typer.Option(help="The folder to be written.", metavar="DIR", callback=folder)],
    vocab: Annotated[
        int, typer.Option(help="Tokens that are kept; the rest was padding.  Without: all.", metavar="N")
    ] = 0,
    model: Sizes = "",
    json: Json = False,
) -> int:
    """Write weights as a folder that transformers loads: config.json and safetensors, in fp32."""
    from repro.cli.views.evaluate import export

    return export(weights, output, vocab, model, json)
