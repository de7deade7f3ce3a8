"""Random layouts of small models, for property tests of plans and lower bounds."""

from __future__ import annotations

import random
from dataclasses import replace

from repro.config import ConfigError, Layout, Model, engines, systems
from repro.simulate.plan.candidates import PlanRequest

SMALL = Model(name="small", layers=8, hidden=512, heads=8, vocab=1024, seq=128)
MODELS = {
    "gpt": SMALL,
    "wide": replace(SMALL, hidden=2048, heads=16, vocab=8192, layers=4, seq=256),
    "llama": replace(
        SMALL, norm="rms", positions="rotary", mlp="swiglu", kv_heads=2, biases="none", ffn=1408, tied=False
    ),
    "neox": replace(SMALL, blocks="parallel", positions="rotary", rotary_fraction=0.25, tied=False),
    "falcon": replace(SMALL, blocks="parallel-one-norm", positions="rotary", kv_heads=1, biases="none"),
    "bloom": replace(SMALL, positions="alibi", embedding_norm=True),
}
SYSTEMS = ("dgx2", "selene", "dgx-h100", "lowbw-v100")


def random_layout(seed: int) -> tuple[PlanRequest, Layout]:
    """Return a valid layout, and the request of which it is a candidate. Equal seeds give equal layouts."""
    choose = random.Random(seed)
    has_fp32_gradients = random.Random(f"gradients of {seed}").random() < 0.4
    while True:
        model = choose.choice(list(MODELS.values()))
        system = systems.load_system_file(choose.choice(SYSTEMS))
        keys = {
            "dp": choose.choice([1, 2, 4, 16]),
            "tp": choose.choice([1, 1, 2, 4, 8]),
            "pp": choose.choice([1, 1, 2, 4]),
            "cp": choose.choice([1, 1, 1, 2]),
            "zero": choose.choice([0, 1, 2, 3]),
            "micro_batch": choose.choice([1, 1, 2, 3, 4]),
            "sp": choose.random() < 0.3,
            "recompute": choose.random() < 0.3,
            "schedule": choose.choice(["1f1b", "1f1b", "gpipe", "interleaved"]),
            "kernels": choose.choice(["fused", "fused", "softmax", "unfused", "reference"]),
            "overlap": choose.random() < 0.8,
            "tp_overlap": choose.random() < 0.8,
            "bucket_bytes": choose.choice([200_000, 25_000_000]),
            "cb": choose.random() < 0.9,
            "scatter_gather": choose.random() < 0.2,
            "order": choose.choice(["tp-dp-pp", "tp-dp-pp", "tp-pp-dp", "dp-tp-pp"]),
            "zero1_reduce": choose.choice(["reduce-scatter", "reduce-scatter", "all-reduce"]),
            "zero3_gather": choose.choice(["block", "block", "parameter"]),
            "md": choose.random() < 0.2,
            "gather_overlap": choose.random() < 0.8,
            "precision": choose.choice([system.best_precision, system.best_precision, "fp32"]),
        }
        keys["chunks"] = 2 if keys["schedule"] == "interleaved" else 1
        keys["pa"] = bool(keys["recompute"]) and choose.random() < 0.5
        keys["pa_cpu"] = bool(keys["recompute"]) and choose.random() < 0.3
        if has_fp32_gradients and keys["precision"] != "fp32":
            keys["grad_dtype"] = "fp32"
        if keys["zero"] != 1:
            keys["zero1_reduce"] = "reduce-scatter"
        if keys["zero"] != 3:
            keys["zero3_gather"] = "block"
        if keys["zero"] == 3 and keys["schedule"] == "gpipe":  # no such step exists
            continue
        if keys["kernels"] in ("softmax", "unfused") and not keys["recompute"] and choose.random() < 0.5:
            keys["recompute"] = "selective"
        keys["global_batch"] = keys["dp"] * keys["micro_batch"] * choose.choice([1, 2, 4, 8])
        try:
            layout = Layout(**keys)
            engines.check_layout_fits(layout, model, model.seq)
        except ConfigError:
            continue
        limit = int(system.device.memory_bytes.value or 0)
        return PlanRequest(model, system, layout.world, limit, model.seq, keys), layout
