# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kernels: what a set of operators changes
#
# Megatron-LM of 2019 ran every operator by itself, that of 2020 fused scale, mask and softmax, and today's attention
# never writes its scores. The engine really runs all three (`kernels = "unfused"`, `"softmax"`, `"fused"`), so the
# difference can be counted, simulated and measured.

# %%
import time

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import torch

from repro.report import evidence
from repro.report.evidence import simulated_step

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
found.table("meg1-baseline-39tf")

# %% [markdown]
# ## The same step with each set of operators, from the store

# %%
rows = []
for record in found.latest("kernels/*"):
    layout, metrics = record.experiment.layout, record.metrics
    if record.outcome == "ok" and "step_seconds.median" in metrics:
        rows.append(
            {
                "case": record.name.rsplit("-", 1)[0],
                "kernels": layout.kernels,
                "evidence": record.evidence,
                "step, s": metrics["step_seconds.median"],
                "live peak, GB": metrics["memory.peak_bytes"] / 1e9,
            }
        )
steps = pd.DataFrame(rows)
if len(steps):
    chart = sns.catplot(
        steps,
        x="step, s",
        y="case",
        hue="kernels",
        col="evidence",
        kind="bar",
        height=3.4,
        aspect=1.5,
        sharex=False,
    )
    chart.set_titles("{col_name}")
    plt.show()
steps if len(steps) else "nothing yet: repro run suites/kernels.toml --evidence simulated"

# %% [markdown]
# ## Change something: a longer sequence
# Scores take the square of the sequence. Attention that never writes them does not notice.

# %%
MODEL, SYSTEM, MICRO_BATCH = "megatron-1.2b", "dgx2h", 8

rows = []
for kernels in ("unfused", "fused"):  # and "softmax", of 2020
    step = simulated_step(
        MODEL, SYSTEM, micro_batch=MICRO_BATCH, kernels=kernels, recompute=True, precision="fp16"
    )
    rows.append(
        {
            "kernels": kernels,
            "step, s": step.get("step_seconds.median"),
            "live peak, GB": step["memory.peak_bytes"] / 1e9,
        }
    )
pd.DataFrame(rows).round(3)

# %% [markdown]
# ## On the processor under this notebook
# One fused operator against the same maths as single operators. Times of the machine at hand, not of a GPU.

# %%
rows, width = 2048, 512
x, bias, residual = torch.randn(rows, width), torch.randn(width), torch.randn(rows, width)


def single() -> torch.Tensor:
    return torch.nn.functional.gelu(x + bias) + residual


def seconds(run, turns: int = 20) -> float:
    run()
    began = time.perf_counter()
    for _ in range(turns):
        run()
    return (time.perf_counter() - began) / turns


read_and_written = (3 * x.nbytes + bias.nbytes) / 1e9
spent = seconds(single)
f"{spent * 1e3:.2f} ms as three operators; fused, it would have to move {read_and_written * 1e3:.1f} MB"

# %%
found.to_run("meg1-baseline-39tf") + found.to_run("meg-dec2020-table")
