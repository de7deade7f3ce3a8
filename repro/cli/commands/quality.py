"""`repro evaluate` and `export-weights`: what models have learnt, and their weights for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from repro.cli.commands.options import Json, Results, check_count, check_folder

app = typer.Typer()

PANEL = "Layout"


def _degree(text: str) -> Any:
    return typer.Option(help=text, metavar="N", rich_help_panel=PANEL)


Weights = Annotated[
    Path,
    typer.Option(
        help="A folder of transformers (GPT-2, Llama, ...), or a checkpoint of Megatron-LM or `repro run`.",
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
    epilog="Example:  repro evaluate --weights gpt2-xl --task lambada --protocol gpt2 --data lambada_test.jsonl"
)
def evaluate(
    weights: Weights,
    task: Annotated[
        str, typer.Option(help="wikitext103 (perplexity) or lambada (accuracy).", metavar="TASK")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="wiki.test.tokens; lambada_test.jsonl, or LAMBADA's plain text, one sample a line.",
            metavar="FILE",
        ),
    ],
    protocol: Annotated[
        str,
        typer.Option(
            help="How it is scored: megatron, gpt2, and of lambada last-token.  Without: megatron.",
            metavar="NAME",
        ),
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            help="A folder with vocab.json and merges.txt, or bytes.  Without: that of the weights, or GPT-2's.",
            metavar="DIR",
        ),
    ] = "",
    stride: Annotated[
        int,
        typer.Option(
            help="Tokens between windows.  Without: the protocol's.", callback=check_count, metavar="N"
        ),
    ] = 0,
    stop_words: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Stop words of lambada, in place of 127 English ones.", metavar="FILE"),
    ] = None,
    model: Sizes = "",
    system: Annotated[str, typer.Option(help="local: processor cores; local-gpu.", metavar="S")] = "local",
    tp: Annotated[int, _degree("Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, _degree("Pipeline stages.")] = 1,
    dp: Annotated[int, _degree("Replicas, each with its share of the samples.")] = 1,
    zero: Annotated[
        int, typer.Option(help="3: a replica keeps its share of the weights.", rich_help_panel=PANEL)
    ] = 0,
    micro_batch: Annotated[int, _degree("Samples of one pass.")] = 4,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=PANEL)] = "fp32",
    results: Results = Path("results"),
    json: Json = False,
) -> int:
    """Score weights on WikiText-103 or LAMBADA by a published protocol; nothing is fetched, all files are named."""
    from repro.config.layout import Layout
    from repro.report.text.predictions import print_scores

    layout = Layout(tp=tp, pp=pp, dp=dp, zero=zero, micro_batch=micro_batch, precision=precision)
    how = {"protocol": protocol, "tokenizer": tokenizer, "stride": stride, "stop_words": stop_words}
    return print_scores(weights, task, data, layout, results, json, model=model, system=system, **how)


@app.command(
    "export-weights", epilog="Example:  repro export-weights --weights results/checkpoints/KEY --output gpt2"
)
def export_weights(
    weights: Weights,
    output: Annotated[
        Path, typer.Option(help="The folder to be written.", metavar="DIR", callback=check_folder)
    ],
    vocab: Annotated[
        int, typer.Option(help="Number of exported tokens, without padding.  Default: all.", metavar="N")
    ] = 0,
    model: Sizes = "",
    json: Json = False,
) -> int:
    """Write weights as a folder that transformers loads: config.json and safetensors, in fp32."""
    from repro.report.text.predictions import print_exported_weights

    return print_exported_weights(weights, output, vocab, model, json)
