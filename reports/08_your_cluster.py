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
# # Your cluster: your own results beside the published ones
#
# Point `RESULTS` at your store: what `repro run` and `repro submit` write. Point `BEFORE` at an older one, from another
# commit, driver or image, and the last part says what changed. Without either this reads the store that is there.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from repro.config.words import describe_layout
from repro.report import evidence
from repro.report.compare import compare_results
from repro.report.views import Machines

RESULTS: Path | None = None
BEFORE: Path | None = None

sns.set_theme(style="ticks", palette="colorblind")
pd.set_option("display.max_colwidth", 60)
found = evidence.read_store(RESULTS)
measured = found.latest(evidence="measured")
print(f"{found.results}: {len(found.records)} records, {len(measured)} measured experiments")
for remark in found.torn:
    print(remark)

# %% [markdown]
# ## Where they come from

# %%
shown = ["number", "host", "cpu", "gpus", "torch", "commit", "records", "last"]
pd.DataFrame(Machines(measured).entries, columns=shown)

# %% [markdown]
# ## What was measured

# %%
rows = [
    {
        "experiment": record.label,
        "layout": describe_layout(record.experiment.layout),
        "outcome": record.outcome,
        "tokens/s": record.metrics.get("tokens_per_s"),
        "TFLOP/s": record.metrics.get("model_flops_per_s", float("nan")) / 1e12,
        "peak, GB": record.metrics.get("memory.peak_bytes", float("nan")) / 1e9,
    }
    for record in measured
]
pd.DataFrame(rows).round(
    3
) if rows else "nothing yet: repro run suites/smoke.toml, or repro submit SUITE --profile YOURS.toml"

# %% [markdown]
# ## Predicted and measured
# The same experiments in both kinds of evidence. `repro calibrate` makes a system file of your machine, and
# `repro run SUITE --evidence simulated` predicts with it.

# %%
both = found.experiments()
if len(both) and "step_seconds.median" in both:
    both = both[both["outcome"] == "ok"]
    wide = both.pivot_table(index="name", columns="evidence", values="step_seconds.median", aggfunc="last")
    wide = wide.dropna() if {"measured", "simulated"} <= set(wide.columns) else wide.iloc[:0]
    if len(wide):
        ax = sns.scatterplot(wide, x="measured", y="simulated")
        ax.axline((wide["measured"].min(),) * 2, slope=1, color="grey", lw=1)
        ax.set(xscale="log", yscale="log", xlabel="measured step (s)", ylabel="predicted step (s)")
        sns.despine()
        plt.show()
    print(f"{len(wide)} experiments are both predicted and measured")

# %% [markdown]
# ## The verdicts that rest on your measurements

# %%
claims = found.claims()
claims[claims["basis"].str.startswith("measured")][["claim", "published", "measured", "verdict", "basis"]]

# %% [markdown]
# ## Against an older store
# `repro compare BEFORE AFTER` says the same on the command line and ends with 1 if something is worse.

# %%
if BEFORE is not None:
    changes = compare_results(evidence.read_store(BEFORE).records, found.records, tolerance=0.05)
    result = pd.DataFrame(vars(change) for change in changes)
else:
    result = "set BEFORE to compare"
result
