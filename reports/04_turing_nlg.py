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
# # Turing-NLG 17B: model parallelism 16 -> 4
#
# With Megatron-LM alone the 17B model had to be split over 16 GPUs. ZeRO's first stage took the optimizer states
# away, and 4 were enough: four times the batch on a node, in a third of the time.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.report import evidence
from repro.report.evidence import simulated_step

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
found.claims(about="Turing-NLG")[
    ["claim", "published", "analytic", "simulated", "measured", "verdict", "reason"]
]

# %% [markdown]
# ## What the claim consists of

# %%
found.table("tnlg-mp16-to-4")

# %%
found.table("tnlg-throughput")

# %% [markdown]
# ## Memory by degree, from the store
# The traced steps of the suite `turing_nlg`: what each degree needs of a GPU, and which do not fit.

# %%
rows = []
for record in found.latest("turing_nlg/*", "simulated"):
    layout, metrics = record.experiment.layout, record.metrics
    if "memory.peak_bytes" in metrics and not record.name.startswith("twin-"):
        rows.append(
            {
                "model parallelism": layout.tp,
                "ZeRO": f"stage {layout.zero}",
                "micro-batch": layout.micro_batch,
                "live peak, GB": metrics["memory.peak_bytes"] / 1e9,
                "limit, GB": metrics["memory.limit_bytes"] / 1e9,
                "outcome": record.outcome,
            }
        )
degrees = pd.DataFrame(rows)
if len(degrees):
    degrees = degrees.sort_values(["model parallelism", "ZeRO", "micro-batch"])
    ax = sns.scatterplot(degrees, x="model parallelism", y="live peak, GB", hue="ZeRO", style="outcome", s=60)
    ax.axhline(degrees["limit, GB"].max(), color="grey", lw=1)
    ax.set_xscale("log", base=2)
    sns.despine()
    plt.show()
degrees if len(degrees) else found.to_run("tnlg-mp16-to-4")

# %% [markdown]
# ## Change something
# One step of the 17B model on 256 GPUs. Which is the smallest degree that fits under each stage?

# %%
SYSTEM, GPUS, STAGE, DEGREE, MICRO_BATCH = "dgx2", 256, 1, 4, 8

step = simulated_step(
    "turing-nlg-17b",
    SYSTEM,
    tp=DEGREE,
    dp=GPUS // DEGREE,
    zero=STAGE,
    micro_batch=MICRO_BATCH,
    recompute=True,
    precision="fp16",
)
shown = ("outcome", "memory.states_bytes", "memory.peak_bytes", "memory.limit_bytes", "step_seconds.median")
pd.Series({name: step.get(name, "not known") for name in shown}).to_frame("value")

# %% [markdown]
# ## What is not compared
# Perplexity and question answering need weights that were never released; those rows say so.

# %%
quality = found.claims("tnlg-*", about="Turing-NLG")
quality[quality["verdict"] == "not comparable"][["claim", "published", "reason"]]
