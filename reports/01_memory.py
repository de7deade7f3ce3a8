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
# # Where the memory goes: 16 bytes a parameter, and how ZeRO divides them
#
# Mixed-precision Adam holds, for every parameter, 2 bytes of weight, 2 of gradient and K = 12 of optimizer state.
# Data parallelism keeps all 16 on every GPU. ZeRO divides them by the number of GPUs, Nd, one stage after the
# other. The paper's Figure 1 prints what that makes of 7.5B parameters on 64 GPUs.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.claims.formulas import model_state_bytes
from repro.config import models
from repro.report import evidence
from repro.report.evidence import simulated_step

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
found.claims("zero-mem-formula-*")[["claim", "published", "analytic", "simulated", "measured", "verdict"]]

# %% [markdown]
# ## The claim
# What was printed, what the formula gives, what the step itself holds when it is traced with 7.5B parameters.

# %%
found.table("zero-fig1-7p5b")

# %%
ax = sns.barplot(found.tidy("zero-fig1-7p5b"), x="value", y="amount", hue="kind")
ax.set(xlabel="", ylabel="model states per GPU (GB)", title="7.5B parameters on 64 GPUs")
sns.despine()
plt.show()

# %% [markdown]
# ## The evidence of your store
# Small models that really trained, each against the same formula at its own size. What is above 1 is padding: a
# shard must be a whole number of elements.

# %%
rows = []
for record in found.latest("smoke/states-*", "measured"):
    layout, metrics = record.experiment.layout, record.metrics
    if record.outcome == "ok":
        formula = model_state_bytes(metrics["parameters"], layout.dp, layout.zero)
        rows.append(
            {
                "experiment": record.name,
                "ranks": layout.dp,
                "stage": layout.zero,
                "held, bytes": metrics["memory.states_bytes"],
                "over the formula": metrics["memory.states_bytes"] / formula,
            }
        )
pd.DataFrame(rows) if rows else "nothing measured yet: repro run suites/smoke.toml --only 'states-*'"

# %% [markdown]
# ## Change something
# The step of another model, on as many GPUs as you like, traced here. States are what the formula knows; the peak has
# activations, buffers and messages too, which it does not.

# %%
MODEL, SYSTEM, GPUS, MICRO_BATCH = "gpt2-1.5b", "dgx2", 16, 4

psi = models.load_model(MODEL).published_params
rows = []
for stage in (0, 3):
    step = simulated_step(
        MODEL, SYSTEM, dp=GPUS, zero=stage, micro_batch=MICRO_BATCH, recompute=True, precision="fp16"
    )
    rows.append(
        {
            "stage": stage,
            "formula, GB": model_state_bytes(psi, GPUS, stage) / 1e9,
            "states, GB": step["memory.states_bytes"] / 1e9,
            "peak, GB": step["memory.peak_bytes"] / 1e9,
            "fits": step["outcome"],
        }
    )
pd.DataFrame(rows).round(2)

# %% [markdown]
# ## What would add evidence

# %%
found.to_run("zero-fig1-7p5b") + found.to_run("zero-mem-formula-*")
