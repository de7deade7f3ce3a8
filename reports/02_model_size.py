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
# # The largest model: 13B without model parallelism, 170B with it
#
# A model fits if its states do and everything else still has room: activations, buffers, what the caching allocator
# leaves unused. The paper computes the first (Table 2) and measures the whole (Figures 4, 6). So do we.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.claims.formulas import max_params
from repro.measure.local_system import load_system
from repro.report import evidence
from repro.report.evidence import simulated_step

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
limits = found.claims()
limits = limits[limits["claim"].isin({r.claim.id for r in found.judged if r.claim.family == "limit"})]
limits[["claim", "published", "analytic", "simulated", "measured", "verdict"]]

# %% [markdown]
# ## What the states alone allow
# Psi = memory / (bytes a parameter): the upper limit of every stage.

# %%
SYSTEM = "dgx2"

memory = load_system(SYSTEM).device.memory_bytes.value
gpus = [1, 4, 16, 64, 256, 1024]
bound = pd.DataFrame(
    {
        "GPUs": count,
        "stage": ("DP", "P_os", "P_os+g", "P_os+g+p")[stage],
        "parameters": max_params(memory, count, stage),
    }
    for count in gpus
    for stage in range(4)
)
ax = sns.lineplot(bound, x="GPUs", y="parameters", hue="stage", marker="o")
ax.set(xscale="log", yscale="log", title=f"Largest model whose states fit {memory / 1e9:.1f} GB")
sns.despine()
plt.show()

# %% [markdown]
# ## What was published, and what fits when the whole step is traced
# Table 2 and the largest models of the configurations C1 to C5. A simulated `largest` comes from steps of neighbouring
# sizes, of which the next one must run out of memory.

# %%
found.table("zero-table2-*")

# %%
found.table("zero-table7-fig6-*")

# %% [markdown]
# ## Change something
# Raise the micro-batch or turn recomputation off until it no longer fits, then see which part grew.

# %%
MODEL, GPUS, STAGE, MICRO_BATCH, RECOMPUTE = "gpt2-1.5b", 16, 2, 8, True

step = simulated_step(
    MODEL, SYSTEM, dp=GPUS, zero=STAGE, micro_batch=MICRO_BATCH, recompute=RECOMPUTE, precision="fp16"
)
parts = ("parameters", "gradients", "optimizer", "activations", "communication")
print(MODEL, "on", GPUS, "GPUs:", step["outcome"])
pd.Series({part: step[f"memory.{part}_bytes"] / 1e9 for part in parts}, name="GB").round(2).to_frame()

# %% [markdown]
# `repro fit --system dgx2 --gpus 64 --zero 1 --micro-batch 8 --recompute` searches the limit itself.

# %%
found.to_run("zero-table7-fig6-*") + found.to_run("zero-table2-*")
