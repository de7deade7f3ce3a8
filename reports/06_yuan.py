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
# # Yuan 1.0: tensor 8 x pipeline 38 x data 7 on 2128 GPUs
#
# 245.7B parameters, 45 % of peak. Yuan's authors chose the layout by rules: few stages, many micro-batches, a large
# hidden size. The map shows what stands around their choice, and why most of it cannot run.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.claims.formulas import bubble_fraction
from repro.config import models, systems
from repro.model import counts
from repro.report import evidence

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
found.claims(about="Yuan")[["claim", "published", "analytic", "simulated", "measured", "verdict"]]

# %%
found.table("yuan-config")

# %% [markdown]
# ## A step, and its share of the peak

# %%
found.table("yuan-step-time")

# %% [markdown]
# ## The map of layouts, from the store

# %%
rows = []
for record in found.latest("yuan/map-*", "simulated"):
    layout, metrics = record.experiment.layout, record.metrics
    rows.append(
        {
            "system": record.experiment.system,
            "tensor": layout.tp,
            "pipeline": layout.pp,
            "live peak, GB": metrics.get("memory.peak_bytes", float("nan")) / 1e9,
        }
    )
layouts = pd.DataFrame(rows)
if len(layouts):
    wide = layouts.groupby(["tensor", "pipeline"])["live peak, GB"].min().unstack()
    ax = sns.heatmap(
        wide, annot=True, fmt=".0f", cmap="viridis_r", cbar_kws={"label": "live peak per GPU (GB)"}
    )
    ax.set_title("What one GPU holds")
    plt.show()
"the map is in the store" if len(layouts) else found.to_run(
    "yuan-design-rules"
) or "repro run suites/yuan.toml --evidence simulated"

# %% [markdown]
# ## Change something
# The bubble and the share of peak that is left at best, for other numbers of stages and micro-batches. The batch is
# what one replica runs in a step.

# %%
STAGES, MICRO_BATCHES = (19, 38, 76), (128, 256, 512)

bubble = pd.DataFrame(
    {"stages": p, "micro-batches": m, "idle over computing, %": 100 * bubble_fraction(p, m)}
    for p in STAGES
    for m in MICRO_BATCHES
)
bubble.pivot(index="stages", columns="micro-batches", values="idle over computing, %").round(1)

# %% [markdown]
# How long would a step take at some share of peak? The work is counted from the model's sizes.

# %%
GPUS, GLOBAL_BATCH, SHARE_OF_PEAK = 2128, 2688, 0.45

model, device = models.load_model("yuan-1.0-245b"), systems.load_system_file("yuan").device
work = counts.hardware_flops(model, model.seq, GLOBAL_BATCH, recompute=True)
f"{work / 1e18:.1f} EFLOP a step; {work / (GPUS * SHARE_OF_PEAK * device.peak_flops['fp16'].value):.1f} s"

# %%
found.to_run("yuan-*")
