"""`repro evaluate` and `repro export-weights`: scores of trained weights, and their export for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli.commands.options import (
    Json,
    OptionalPath,
    Results,
    check_count,
    folder_option,
    layout_option,
    option,
)

app = typer.Typer()
Weights = Annotated[
    Path,
    option(
        "Folder of transformers weights (GPT-2, Llama), or checkpoint of Megatron-LM or `repro run`.", "DIR"
    ),
]
Sizes = Annotated[
    str,
    option("Name or file of the model, for Megatron-LM checkpoints without sizes.", "M", name="--model"),
]


@app.command(
    epilog="Example:  repro evaluate --weights gpt2-xl --task lambada --protocol gpt2 --data lambada_test.jsonl"
)
def evaluate(
    weights: Weights,
    task: Annotated[str, option("wikitext103 (perplexity) or lambada (accuracy).", "TASK")],
    data: Annotated[
        Path,
        option("wiki.test.tokens; lambada_test.jsonl, or LAMBADA as text, one sample per line.", "FILE"),
    ],
    protocol: Annotated[
        str,
        option("Scoring rules: megatron, gpt2, or last-token (lambada). Default: megatron.", "NAME"),
    ] = "",
    tokenizer: Annotated[
        str,
        option(
            "Folder with vocab.json and merges.txt, or `bytes`. Default: tokenizer of the weights, or GPT-2's.",
            "DIR",
        ),
    ] = "",
    stride: Annotated[
        int, option("Tokens between windows. Default: stride of the protocol.", "N", callback=check_count)
    ] = 0,
    stop_words: Annotated[
        OptionalPath, option("Stop words for lambada. Default: 127 English words.", "FILE")
    ] = None,
    model: Sizes = "",
    system: Annotated[str, option("Devices of the ranks. local: cores; local-gpu: GPUs.", "S")] = "local",
    tp: Annotated[int, layout_option("Tensor-parallel ranks.", "N")] = 1,
    pp: Annotated[int, layout_option("Pipeline stages.", "N")] = 1,
    dp: Annotated[int, layout_option("Replicas, each with its share of the samples.", "N")] = 1,
    zero: Annotated[int, layout_option("3: divide the weights among the replicas.")] = 0,
    micro_batch: Annotated[int, layout_option("Samples per forward pass.", "N")] = 4,
    precision: Annotated[str, layout_option("fp32, bf16 or fp16.")] = "fp32",
    results: Results = Path("results"),
    json: Json = False,
) -> int:
    """Score weights on WikiText-103 or LAMBADA by a published protocol, from local files only."""
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
    output: Annotated[Path, folder_option("Folder for the exported files.")],
    vocab: Annotated[int, option("Number of exported tokens, without padding. Default: all.", "N")] = 0,
    model: Sizes = "",
    json: Json = False,
) -> int:
    """Write weights as a folder that transformers loads: config.json and safetensors, in fp32."""
    from repro.report.text.predictions import print_exported_weights

    return print_exported_weights(weights, output, vocab, model, json)
