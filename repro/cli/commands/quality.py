"""`repro evaluate` and `repro export-weights`: scores of trained model weights, and their export to other formats."""

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
    Path, option("Hugging Face weights (GPT-2, Llama), or a checkpoint of Megatron-LM or `repro run`.", "DIR")
]
Sizes = Annotated[
    str, option("Model name or file, for Megatron-LM checkpoints without a head count.", "M", name="--model")
]


@app.command(
    epilog="Example:  repro evaluate --weights gpt2-xl --task lambada --protocol gpt2 --data lambada_test.jsonl"
)
def evaluate(
    weights: Weights,
    task: Annotated[str, option("Evaluation task: wikitext103 (perplexity) or lambada (accuracy).", "TASK")],
    data: Annotated[
        Path,
        option("Text to score: wiki.test.tokens, lambada_test.jsonl, or a LAMBADA sample per line.", "FILE"),
    ],
    protocol: Annotated[
        str, option("Published scoring rules: megatron (default), gpt2, or last-token (lambada).", "NAME")
    ] = "",
    tokenizer: Annotated[
        str, option("Tokenizer folder, or `bytes`. Default: tokenizer of the weights, or GPT-2's.", "DIR")
    ] = "",
    stride: Annotated[
        int, option("Tokens between starts of text windows. Default: by protocol.", "N", callback=check_count)
    ] = 0,
    stop_words: Annotated[
        OptionalPath, option("Stop words that lambada predictions skip. Default: 127 English words.", "FILE")
    ] = None,
    model: Sizes = "",
    system: Annotated[str, option("Devices: local (processor cores) or local-gpu (GPUs).", "S")] = "local",
    tp: Annotated[int, layout_option("Tensor-parallel ranks.", "N")] = 1,
    pp: Annotated[int, layout_option("Pipeline stages.", "N")] = 1,
    dp: Annotated[int, layout_option("Model replicas, among which the samples are divided.", "N")] = 1,
    zero: Annotated[int, layout_option("ZeRO stage, 0 or 3; 3 partitions the weights among replicas.")] = 0,
    micro_batch: Annotated[int, layout_option("Samples per forward pass.", "N")] = 4,
    precision: Annotated[str, layout_option("fp32, bf16 or fp16.")] = "fp32",
    results: Results = Path("results"),
    json: Json = False,
) -> int:
    """Score model weights on WikiText-103 or LAMBADA by a published protocol, from local files only."""
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
    output: Annotated[Path, folder_option("Folder for the exported weight files.")],
    vocab: Annotated[int, option("Exported vocabulary size without padding. Default: all rows.", "N")] = 0,
    model: Sizes = "",
    json: Json = False,
) -> int:
    """Write model weights as a folder that Hugging Face transformers loads: config.json and safetensors, in fp32."""
    from repro.report.text.predictions import print_exported_weights

    return print_exported_weights(weights, output, vocab, model, json)
