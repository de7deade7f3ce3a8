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
# # Megatron-LM: weak scaling in 2019 and in 2021
#
# In 2019 tensor parallelism took 8.3B parameters to 512 V100 at 76 % of linear scaling. In 2021 pipelines took 1T
# to 3072 A100. A pipeline pays with a bubble, (p-1)/m of its computing time, and interleaving divides it.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.claims.formulas import bubble_fraction
from repro.report import evidence
from repro.report.evidence import simulated_step

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
found.claims(about="Megatron")[["claim", "published", "analytic", "simulated", "measured", "verdict"]]

# %% [markdown]
# ## Weak scaling to a trillion parameters

# %%
rates = found.tidy("meg2-table1-weak-scaling")
rates = rates[rates["unit"] == "TFLOP/s"]
if len(rates):
    ax = sns.scatterplot(rates, x="value", y="amount", hue="kind", style="kind", s=60)
    ax.set(xlabel="", ylabel="TFLOP/s per GPU", ylim=(0, None))
    ax.tick_params(axis="x", rotation=60)
    sns.despine()
    plt.show()
found.table("meg2-table1-weak-scaling")

# %% [markdown]
# ## The bubble, counted
# What the formula says; below it what was counted on schedules and measured. `repro schedule --pp 4 --micro-batches 8` draws
# what the runner executes. Change the stages or the micro-batches.

# %%
STAGES, MICRO_BATCHES = 4, (4, 8, 16, 32)

rows = [
    {"micro-batches": m, "chunks": v, "formula": bubble_fraction(STAGES, m, v)}
    for m in MICRO_BATCHES
    for v in (1, 2)
]
bubbles = pd.DataFrame(rows)
ax = sns.lineplot(bubbles, x="micro-batches", y="formula", hue="chunks", marker="o", palette="colorblind")
ax.set(ylabel="idle time over computing time", title=f"{STAGES} stages")
sns.despine()
plt.show()
found.table("meg2-bubble")

# %% [markdown]
# ## Change something
# Tensor parallelism within a node of 8 or across two of them: the step that leaves the node pays for it.

# %%
MODEL, SYSTEM, BATCH = "megatron-1.2b", "selene", 8

rows = []
for tp in (1, 8, 16):
    step = simulated_step(MODEL, SYSTEM, tp=tp, micro_batch=BATCH, recompute=True, precision="fp16")
    seconds = step.get("step_seconds.median")
    rows.append({"tp": tp, "step, s": seconds, "sent a rank, GB": step["comm.sent_bytes"] / 1e9})
scaling = pd.DataFrame(rows)
scaling["share of linear"] = scaling["step, s"].iloc[0] / scaling["step, s"] / scaling["tp"]
scaling.round(3)

# %%
found.to_run("meg2-table1-*") + found.to_run("meg2-bubble")
