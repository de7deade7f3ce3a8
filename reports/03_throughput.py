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
# # Speed: 3.75x on a slow network, 10x beyond one node
#
# The released claims are ratios: ZeRO needs less model parallelism, so it sends less between nodes. Nothing here
# is fitted to a ratio. The time model schedules the step's operators and messages on a system file; one published
# point of a device calibrates its kernels, and that point gets no verdict.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.accuracy.validate.published import RATE, RATIO, points
from repro.report import evidence
from repro.report.evidence import simulated_step

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store()
columns = ["claim", "published", "simulated", "measured", "verdict", "basis"]
found.claims(about="DeepSpeed release")[columns]

# %%
found.table("ds-3p75x-lowbw")

# %% [markdown]
# ## Every published rate and ratio beside its prediction
# A point on the line is a perfect prediction. `repro validate` prints the same with the errors by family.

# %%
seen = pd.DataFrame(
    {"kind": p.kind, "family": p.family, "published": p.published, "predicted": p.predicted, "error": p.error}
    for p in points(found.judged, found.records)
    if not p.left_out
)
if len(seen):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for ax, kind in zip(axes, (RATE, RATIO), strict=True):
        part = seen[seen["kind"] == kind]
        sns.scatterplot(part, x="published", y="predicted", hue="family", ax=ax, legend=kind == RATE)
        ends = part[["published", "predicted"]].agg(["min", "max"]).to_numpy()
        ax.axline((ends.min(), ends.min()), slope=1, color="grey", lw=1)
        ax.set(xscale="log", yscale="log", title=f"{kind}s, each in its own unit")
    sns.despine()
    plt.show()
seen.groupby(["kind", "family"])["error"].agg(["count", "median"]).round(3) if len(seen) else found.to_run(
    "ds-*"
)

# %% [markdown]
# ## Which side of 1?
# A ratio can be off and still be right about who is faster.

# %%
found.table("ds-64gpu-table") if len(seen) else found.table("ds-3to5x-20to80b")

# %% [markdown]
# ## Change something
# The same model and GPUs with model parallelism traded for data parallelism under ZeRO. Try another system, such as
# `lowbw-v100`, `dgx2` or `dgx-h100`, or a TOML file of your own.

# %%
MODEL, SYSTEM, GPUS, BATCH = "deepspeed-1.5b", "lowbw-v100", 16, 64

rows = []
for tp, zero in ((4, 0), (1, 2)):
    dp = GPUS // tp
    step = simulated_step(
        MODEL,
        SYSTEM,
        tp=tp,
        dp=dp,
        zero=zero,
        micro_batch=BATCH // dp,
        global_batch=BATCH,
        recompute=True,
        precision="fp16",
    )
    rows.append(
        {
            "tp": tp,
            "dp": dp,
            "zero": zero,
            "fits": step["outcome"],
            "step, s": step.get("step_seconds.median"),
            "sent a rank, GB": step["comm.sent_bytes"] / 1e9,
        }
    )
pd.DataFrame(rows).round(3)
