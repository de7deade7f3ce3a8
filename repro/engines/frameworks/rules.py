"""Conversion rules for framework options that depend on several configuration keys of this suite, or set several."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from repro.config.errors import require
from repro.config.files import read_toml
from repro.config.layout import ELEMENT_BYTES
from repro.engines.frameworks.table import Framework, Reading, Rule, Settings, rule_of

PERSISTED_PER_HIDDEN = 10
"""Maximum elements of a parameter that DeepSpeed's stage 3 does not partition, divided by the hidden size. The value is
that of Transformers' `auto`, and of DeepSpeed's default of 1e5 for a hidden size of 10 000."""
FLAVORS = {"llama3-8b": "8B", "llama3-70b": "70B", "llama3-405b": "405B"}
"""torchtitan's `flavor` (size) of its model `llama3`, by the name of the model in this suite."""


def _grad_bytes(precision: str, grad_dtype: str) -> int:
    return ELEMENT_BYTES["fp32" if grad_dtype == "fp32" else precision]


def _accumulation(settings: Settings) -> int:
    return int(settings["layout.global_batch"] // settings["layout.dp"] // settings["layout.micro_batch"])


# Rules for Megatron-LM


def _read_width(value: Any, reading: Reading) -> None:
    hidden = reading.settings.get("model.hidden", 0)
    default = int(8 * hidden / 3 / 64) * 64 if reading.settings.get("model.mlp") == "swiglu" else 4 * hidden
    if hidden:
        reading.put("model.ffn", value or default)


def _groups(settings: Settings) -> int | None:
    groups: int = settings["model.kv_heads"]
    return groups if groups != settings["model.heads"] else None


def _read_groups(value: Any, reading: Reading) -> None:
    if heads := value or reading.settings.get("model.heads"):
        reading.put("model.kv_heads", heads)


def _read_vocabulary(value: Any, reading: Reading) -> None:
    """Set the vocabulary size, padded as Megatron-LM pads it, unless the framework's file specifies the padded size."""
    if value is not None and "model.vocab" not in reading.settings:
        multiple = 128 * reading.layout("tp")
        reading.put("model.vocab", -(-int(value) // multiple) * multiple)
        reading.remarks.append(f"vocab_size = {value} is padded to a multiple of 128 x tp = {multiple}")


def _layout_string(settings: Settings) -> str | None:
    counts = settings["layout.stage_layers"]
    return "E" + "|".join(f"t*{count}" * bool(count) for count in counts) + "L" if counts else None


def _read_layout_string(value: Any, reading: Reading) -> None:
    if value is not None:
        text = str(value).replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        counts = tuple(part.count("t") for part in text.split("|"))
        reading.put_parts(max(1, len(counts) // reading.layout("pp")), counts)


def _read_chunk_layers(value: Any, reading: Reading) -> None:
    if value is not None:
        layers = reading.settings.get("model.layers", 0) // reading.layout("pp")
        reading.put_parts(max(1, layers // int(value)))


def _read_fp32_grads(value: Any, reading: Reading) -> None:
    is_fp32 = value or reading.layout("precision") == "bf16"
    reading.put(
        "layout.grad_dtype", "fp32" if is_fp32 and reading.layout("precision") != "fp32" else "precision"
    )


def _read_elements(value: Any, reading: Reading) -> None:
    # By default, Megatron-LM's bucket has max(40 000 000, 1 000 000 x dp) elements.
    elements = max(40_000_000, 1_000_000 * reading.dp) if value is None else int(value)
    size = _grad_bytes(reading.layout("precision"), reading.layout("grad_dtype"))
    reading.put("layout.bucket_bytes", elements * size)


MEGATRON = {
    "width": Rule(lambda s: s["model.ffn"], _read_width),
    "grouped": Rule(lambda s: True if _groups(s) else None),
    "groups": Rule(_groups, _read_groups),
    "vocabulary": Rule(lambda s: s["model.vocab"] - 1, _read_vocabulary),
    "chunks": Rule(
        lambda s: s["layout.chunks"] if s["layout.chunks"] > 1 and not s["layout.stage_layers"] else None,
        lambda value, reading: reading.put_parts(int(value or 1)),
    ),
    "chunk_layers": Rule(lambda s: None, _read_chunk_layers),
    "stages": Rule(_layout_string, _read_layout_string),
    "waits": Rule(lambda s: (s["layout.chunks"] > 1 and not s["layout.overlap"]) or None),
    "gather": Rule(
        lambda s: (s["layout.zero"] > 0 and s["layout.overlap"] and s["layout.gather_overlap"]) or None,
        lambda value, reading: reading.put(
            "layout.gather_overlap", bool(value) or not reading.layout("zero")
        ),
    ),
    "fp32_grads": Rule(lambda s: s["layout.grad_dtype"] == "fp32" or None, _read_fp32_grads),
    "bf16_grads": Rule(
        lambda s: (s["layout.precision"] == "bf16" and s["layout.grad_dtype"] == "precision") or None,
        lambda value, reading: reading.put("layout.grad_dtype", "precision") if value else None,
    ),
    "bucket": Rule(
        lambda s: max(
            1, s["layout.bucket_bytes"] // _grad_bytes(s["layout.precision"], s["layout.grad_dtype"])
        ),
        _read_elements,
    ),
    "batch": Rule(
        lambda s: s["layout.global_batch"],
        lambda value, reading: reading.put(
            "layout.global_batch", value or reading.layout("micro_batch") * reading.dp
        ),
    ),
}

# Rules for DeepSpeed


def _bucket(settings: Settings) -> int:
    """Return DeepSpeed's bucket size: even, and at most the model's size, because DeepSpeed allocates full buckets."""
    from repro.model import counts

    elements = settings["layout.bucket_bytes"] // ELEMENT_BYTES[settings["layout.precision"]]
    elements = min(elements, counts.total_parameters(settings["model"]))
    return int(elements + elements % 2)


def _block(settings: Settings) -> int | None:
    """Return the number of elements of a transformer block's matrices on a tp rank; None without ZeRO stage 3."""
    model = settings["model"]
    inner = 2 * (model.heads + model.key_heads) * model.head_width
    block = model.hidden * (inner + model.mlp_matrices * model.ffn_width)
    return int(block // settings["layout.tp"]) if settings["layout.zero"] == 3 else None


def _live(settings: Settings) -> int | None:
    from repro.model import counts

    block, parts = _block(settings), counts.parameters_by_part(settings["model"])
    ends = parts["token_embedding"] // settings["layout.tp"] + parts.get("position_embedding", 0)
    return None if block is None else int(2 * block + ends)


def _read_elements_of_precision(value: Any, reading: Reading) -> None:
    elements = 500_000_000 if value is None else int(value)
    reading.put("layout.bucket_bytes", elements * ELEMENT_BYTES[reading.layout("precision")])


def _read_total_batch(value: Any, reading: Reading) -> None:
    if value is not None:
        reading.put("layout.global_batch", int(value))


def _read_micro_batch(value: Any, reading: Reading) -> None:
    batch = reading.settings.get("layout.global_batch", reading.dp)
    reading.put("layout.micro_batch", int(value) if value else max(1, batch // reading.dp))


def _read_accumulation(value: Any, reading: Reading) -> None:
    if not reading.settings.get("layout.global_batch"):
        reading.put("layout.global_batch", int(value or 1) * reading.layout("micro_batch") * reading.dp)


def _read_overlap(value: Any, reading: Reading) -> None:
    is_always = reading.layout("zero") == 3
    if is_always and value is False:
        reading.remarks.append("zero_optimization.overlap_comm = False is predicted as True in stage 3")
    reading.put("layout.overlap", bool(value) or is_always)


def _read_reduce_scatter(value: Any, reading: Reading) -> None:
    if value is False and reading.layout("zero") == 1:
        reading.put("layout.zero1_reduce", "all-reduce")


def _scale_power(settings: Settings) -> int | None:
    is_scaled = settings["layout.precision"] == "fp16"
    return int(math.log2(settings["training.loss_scale"])) if is_scaled else None


DEEPSPEED = {
    "batch": Rule(lambda s: s["layout.global_batch"], _read_total_batch),
    "micro_batch": Rule(lambda s: s["layout.micro_batch"], _read_micro_batch),
    "accumulation": Rule(_accumulation, _read_accumulation),
    "bucket": Rule(_bucket, _read_elements_of_precision),
    "gather_bucket": Rule(_bucket),
    "overlap": Rule(lambda s: s["layout.overlap"], _read_overlap),
    "reduce_scatter": Rule(lambda s: s["layout.zero1_reduce"] == "reduce-scatter", _read_reduce_scatter),
    "block": Rule(_block),
    "live": Rule(_live),
    "persistence": Rule(
        lambda s: PERSISTED_PER_HIDDEN * s["model.hidden"] if s["layout.zero"] == 3 else None
    ),
    "scale_power": Rule(
        _scale_power,
        lambda value, reading: reading.put("training.loss_scale", 2.0 ** (16 if value is None else value)),
    ),
    "checkpoints": Rule(
        lambda s: s["model.layers"] if s["layout.recompute"] is True else None,
        lambda value, reading: reading.put("layout.recompute", value is not None),
    ),
}

# Rules for torchtitan


def _is_sharded(settings: Settings) -> bool:
    """Return whether torchtitan needs FSDP: with ZeRO, and with tp, pp or cp, with which its DDP cannot be combined."""
    return bool(
        max(settings["layout.zero"] + 1, *(settings[f"layout.{axis}"] for axis in ("tp", "pp", "cp"))) > 1
    )


def _read_replicas(value: Any, reading: Reading) -> None:
    replicas = int(value or 1)
    if 1 < replicas < reading.dp:
        reading.remarks.append(f"parallelism.data_parallel_replicate_degree = {replicas} is predicted as 1")
    is_alone = replicas == reading.dp and reading.layout("cp") == 1
    reading.put("layout.zero", 0 if is_alone else 2)


def _read_resharding(value: Any, reading: Reading) -> None:
    is_freed = value == "always" or (value in (None, "default") and reading.layout("pp") == 1)
    if reading.layout("zero") and is_freed:
        reading.put("layout.zero", 3)


def _local_batch(settings: Settings) -> int:
    """Return torchtitan's `local_batch_size`: samples of a micro-batch, or with a pipeline, of a replica's step."""
    replica = settings["layout.global_batch"] // settings["layout.dp"]
    return int(replica if settings["layout.pp"] > 1 else settings["layout.micro_batch"])


def _read_local_batch(value: Any, reading: Reading) -> None:
    local = int(8 if value is None else value)
    reading.put("layout.global_batch", local * reading.dp)
    if reading.layout("pp") == 1:
        reading.put("layout.micro_batch", local)


def _read_pass(value: Any, reading: Reading) -> None:
    if reading.layout("pp") > 1:
        reading.put("layout.micro_batch", int(value or 1))


def _read_batch(value: Any, reading: Reading) -> None:
    if value is not None and value > 0:
        if reading.layout("pp") > 1 and value > reading.layout("global_batch"):
            reading.remarks.append(
                f"training.global_batch_size = {value}: the prediction assumes one pipeline flush per step, "
                "but torchtitan accumulates gradients over several flushes"
            )
        reading.put("layout.global_batch", int(value))


def _read_tp(value: Any, reading: Reading) -> None:
    reading.put("layout.tp", int(value or 1))
    reading.put("layout.sp", reading.layout("tp") > 1)


def _read_precision(value: Any, reading: Reading) -> None:
    reading.put("layout.precision", "fp32" if value == "float32" else "bf16")
    reading.put("layout.grad_dtype", "precision" if value == "float32" else "fp32")


def _module_names(settings: Settings) -> list[list[str]] | None:
    names: list[list[str]] = []
    for count in settings["layout.stage_layers"]:
        first = sum(map(len, names))
        names.append([f"layers.{layer}" for layer in range(first, first + count)])
    return [["tok_embeddings", *names[0]], *names[1:-1], [*names[-1], "norm", "output"]] if names else None


def _read_module_names(value: Any, reading: Reading) -> None:
    if value:
        counts = tuple(sum(name.startswith("layers.") for name in part) for part in value)
        reading.put_parts(len(counts) // reading.layout("pp"), counts)


def _layers_per_part(settings: Settings) -> int | None:
    parts = settings["layout.pp"] * settings["layout.chunks"]
    return None if settings["layout.stage_layers"] or parts == 1 else settings["model.layers"] // parts


def _read_layers_per_part(value: Any, reading: Reading) -> None:
    """Set the layers of each pipeline part by torchtitan's rule, which counts embedding and logits as layers."""
    first, last = reading.settings.pop("less_layers")
    pp, layers = reading.layout("pp"), reading.settings.get("model.layers", 0)
    if pp == 1 or reading.layout("stage_layers") or not layers:
        return
    total = layers + first + last
    parts = -(-total // int(value)) if value else pp * (1 + (reading.layout("schedule") == "interleaved"))
    counts = [total // parts + (part < total % parts) for part in range(parts)]
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    reading.put_parts(parts // pp, () if len(set(counts)) == 1 else tuple(counts))


def _read_weight(value: Any, reading: Reading) -> None:
    weights = reading.settings.get("less_layers", ())
    reading.settings["less_layers"] = (*weights, 1 if value is None else int(value))


def _read_flavor(value: Any, reading: Reading) -> None:
    """Set the model's sizes by a known flavor of torchtitan or a model name. Unknown flavors need option `--model`."""
    from repro.config import models

    name = {flavor: name for name, flavor in FLAVORS.items()}.get(value, value)
    if name in models.model_names() and "model" not in reading.settings:
        reading.settings["model"] = models.load_model(name)
    if "model" in reading.settings:
        reading.settings["model.layers"] = reading.settings["model"].layers


def _final_factor(settings: Settings) -> float:
    is_cosine = settings["training.schedule"] == "cosine"
    return float(settings["training.min_lr"] / settings["training.lr"]) if is_cosine else 1.0


def _read_final_factor(value: Any, reading: Reading) -> None:
    is_constant = value == 1.0
    reading.put(
        "training.min_lr", 0.0 if is_constant else float(value or 0) * reading.settings["training.lr"]
    )
    if is_constant:
        reading.put("training.schedule", "constant")


TORCHTITAN = {
    "flavor": Rule(lambda s: FLAVORS.get(s["model"].name, s["model"].name), _read_flavor),
    "module": Rule(lambda s: None if s["model"].name in FLAVORS else "repro_model"),
    "tp": Rule(lambda s: s["layout.tp"], _read_tp),
    "weight": Rule(lambda s: 0, _read_weight),
    "stages": Rule(_module_names, _read_module_names),
    "parts": Rule(_layers_per_part, _read_layers_per_part),
    "replicas": Rule(lambda s: 1 if _is_sharded(s) else s["layout.dp"], _read_replicas),
    "shards": Rule(lambda s: s["layout.dp"] if _is_sharded(s) else 1),
    "resharding": Rule(lambda s: "always" if s["layout.zero"] == 3 else "never", _read_resharding),
    "local_batch": Rule(_local_batch, _read_local_batch),
    "micro_batch": Rule(lambda s: s["layout.micro_batch"] if s["layout.pp"] > 1 else None, _read_pass),
    "batch": Rule(lambda s: s["layout.global_batch"], _read_batch),
    "precision": Rule(
        lambda s: "float32" if s["layout.precision"] == "fp32" else "bfloat16", _read_precision
    ),
    "final_factor": Rule(_final_factor, _read_final_factor),
}

# Rules for nanotron


def _read_main_grads(value: Any, reading: Reading) -> None:
    is_mixed = reading.layout("precision") != "fp32"
    reading.put("layout.grad_dtype", "fp32" if is_mixed else "precision")
    if is_mixed and not value:
        reading.remarks.append(
            "optimizer.accumulate_grad_in_fp32 = False is predicted as True, with master weights"
        )


def _read_final_rate(value: Any, reading: Reading) -> None:
    is_constant = value is None or value == reading.settings.get("training.lr")
    reading.put("training.min_lr", 0.0 if is_constant else float(value))
    if is_constant:
        reading.put("training.schedule", "constant")


NANOTRON = {
    "async": Rule(
        lambda s: s["layout.tp_overlap"] and s["layout.sp"],
        lambda value, reading: reading.put("layout.tp_overlap", bool(value) or reading.layout("tp") == 1),
    ),
    "accumulation": Rule(_accumulation, _read_accumulation),
    "bucket": Rule(
        lambda s: max(1, s["layout.bucket_bytes"] // 2**20),
        lambda value, reading: reading.put("layout.bucket_bytes", int(value or 25) * 2**20),
    ),
    "fp32_grads": Rule(lambda s: s["layout.precision"] != "fp32", _read_main_grads),
    "final_rate": Rule(
        lambda s: s["training.lr" if s["training.schedule"] == "constant" else "training.min_lr"],
        _read_final_rate,
    ),
}
RULES = {"megatron": MEGATRON, "torchtitan": TORCHTITAN, "deepspeed": DEEPSPEED, "nanotron": NANOTRON}


@cache
def load_framework(key: str) -> Framework:
    """Return the framework `key`, for example `deepspeed`, with the version and options in `<key>.toml`."""
    require(key in RULES, "launch", key, f"one of {', '.join(RULES)}")
    table = read_toml(Path(__file__).parent / f"{key}.toml")
    rows = table["options"]
    return Framework(
        name=table["name"],
        version=table["version"],
        file=table["file"],
        rules={row["name"]: RULES[key][row["rule"]] if "rule" in row else rule_of(row) for row in rows},
        notes={row["name"]: row["note"] for row in rows if "note" in row},
        limits={
            name: (tuple(value) if isinstance(value, list) else value, reason)
            for name, (value, reason) in table["limits"].items()
        },
        ignored=frozenset(table["ignored"]),
        code=tuple(table.get("code", ())),
        files=table["files"],
        command=table["command"],
        environment=table.get("environment", ""),
    )
