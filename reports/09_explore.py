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
# # Explore layouts: memory, timeline and step time of a layout
#
# Each state of the controls is one simulation of the real training step, as by `repro simulate`. The notebook reads no
# store. Run all cells to use the controls; a page without a kernel shows the first state.

# %%
from functools import partial

import ipywidgets as widgets
from IPython.display import DisplayHandle, Image, Markdown, display

from repro.cli.commands.options import QUESTION, as_option
from repro.config import ConfigError
from repro.config.systems import load_system_file
from repro.config.words import describe_layout
from repro.report.figures import peak_memory, schedules, style
from repro.report.text.simulated_step import describe_fit
from repro.simulate.plan.candidates import LayoutQuery, complete_experiment, data_parallel_degree
from repro.simulate.plan.closed_form import FRAGMENTATION, TERMS
from repro.simulate.step import Simulation, simulate
from repro.util import units

# %% [markdown]
# ## Change something
# `repro models` and `repro systems` list more names. `FIRST` is the first state of the controls.

# %%
MODELS = [
    "gpt2-1.5b", "llama3-8b", "megatron-8.3b", "turing-nlg-17b", "gpt-neox-20b", "llama3-70b", "megatron-175b",
]  # fmt: skip
SYSTEMS = ["dgx1-v100-32gb", "dgx2", "dgx-a100-40gb", "selene", "dgx-h100", "dgx-h200", "dgx-b200", "mi300x"]
FIRST = {
    "model": "llama3-70b", "system": "dgx-h100", "gpus": 64, "tp": 8, "pp": 4, "cp": 1, "zero": 1,
    "micro_batch": 1, "micro_batches": 8, "recompute": True,
}  # fmt: skip

# %% [markdown]
# ## The simulation
# One step of the chosen layout: memory, time with its 90 % interval, and the timeline. The number of replicas, dp,
# follows from the other degrees and the number of GPUs.


# %%
def simulate_layout(
    model: str, system: str, gpus: int, micro_batches: int, tp: int, pp: int, cp: int, **layout: int | bool
) -> Simulation:
    on = load_system_file(system)
    layout |= {"tp": tp, "pp": pp, "cp": cp}
    layout["global_batch"] = micro_batches * layout["micro_batch"] * data_parallel_degree(gpus, tp, pp, cp)
    experiment = complete_experiment(model, LayoutQuery(system, gpus, layout), on)
    return simulate(experiment, on, time=True, record=True, interval=True)


# %% [markdown]
# ## The text and the figure


# %%
def describe(found: Simulation) -> Markdown:
    """Return the layout, whether it fits, and its speed."""
    layout, document = found.experiment.layout, found.as_dict()
    lines = [describe_layout(layout, batches=True), *describe_fit(found, load_system_file(found.system))]
    if (time := document["time"]) is None:
        return Markdown("\n\n".join([*lines, f"No step time: {document['no_time']}."]))
    interval, rate = time["interval"], document["flops"]["model"] / time["step_s"] / layout.world
    cells = {
        "step time": units.seconds(time["step_s"]),
        "90 % interval": " to ".join(units.seconds(interval[end]) for end in ("low_s", "high_s")) if interval else "-",
        "samples/s": units.number(time["samples_per_s"]),
        "model TFLOP/s per GPU": units.number(rate / units.TERA),
        "share of peak (MFU)": units.percent(time["mfu"]) if time["mfu"] else "unknown",
    }  # fmt: skip
    rows = (cells, ["---"] * len(cells), cells.values())
    return Markdown("\n\n".join([*lines, "\n".join(f"| {' | '.join(row)} |" for row in rows)]))


# %%
def draw(found: Simulation) -> Image:
    """Draw memory by category against the limit, and the timeline of a step that fits."""
    memory, required = found.fullest.memory, found.required_bytes
    sizes = memory.by_category | {FRAGMENTATION: required - memory.peak_bytes, "total": required}
    names = {**TERMS, FRAGMENTATION: FRAGMENTATION}
    fills = {name: peak_memory.CATEGORY_STYLES[key] for key, name in names.items() if sizes[key]}
    fills |= {} if found.fits else {"beyond the limit": style.RED}
    times = [found.time.timeline] if found.fits and found.time else []
    heights = [1.0, *(0.8 + 0.3 * len(step.stages) for step in times)]
    with style.figure_style():
        figure, grid = style.make_axes(1.2 + sum(heights), len(heights), squeeze=False, height_ratios=heights)
        bar, *others = grid[:, 0]
        peak_memory.draw_memory_bar(bar, 0, sizes, units.GB, found.limit_bytes)
        end = max(required, found.limit_bytes or 0) / units.GB
        bar.set(xlim=(0, 1.1 * end), ylim=(-0.6, 0.6), yticks=[], xlabel="GB on the fullest GPU at its peak")
        style.draw_fills_above(figure, fills, *bar.get_lines(), ncols=5)
        for axes, step in zip(others, times, strict=True):
            schedules.draw_step(axes, step, (620, 20))
    title = "Memory and timeline of the step"
    return Image(style.to_png(style.Drawing("step", title, "", figure=figure)), alt=title)


# %% [markdown]
# ## The controls
# An invalid layout shows the error of `repro simulate` in place of the figure.


# %%
def update(_: object) -> None:
    """Simulate the chosen layout, and show the text before the figure."""
    try:
        found = simulate_layout(**{key: control.value for key, control in controls.items()})
    except ConfigError as error:
        message = as_option(error, {parameter.name for parameter in QUESTION})
        text.update(Markdown(f"```\nerror: {message}\n```"))
        figure.update(Markdown(""))
    else:
        text.update(describe(found))
        figure.update(draw(found))


DEGREES = [1, 2, 3, 4, 6, 8, 12, 16]
slider = partial(widgets.SelectionSlider, continuous_update=False)
controls = {
    "model": widgets.Dropdown(options=MODELS, description="model"),
    "system": widgets.Dropdown(options=SYSTEMS, description="system"),
    "gpus": widgets.BoundedIntText(min=1, max=100_000, description="GPUs"),
    "tp": slider(options=DEGREES, description="tensor (tp)"),
    "pp": slider(options=DEGREES, description="pipeline (pp)"),
    "cp": slider(options=DEGREES, description="context (cp)"),
    "zero": widgets.Dropdown(options=[0, 1, 2, 3], description="ZeRO stage"),
    "micro_batch": slider(options=[1, 2, 4, 8, 16, 32], description="micro-batch"),
    "micro_batches": slider(options=[1, 2, 4, 8, 16, 32], description="micro-batches"),
    "recompute": widgets.Checkbox(description="recompute activations"),
}
for key, control in controls.items():
    control.value, control.style.description_width = FIRST[key], "9em"
    control.observe(update, "value")
display(widgets.GridBox([*controls.values()], layout={"grid_template_columns": "repeat(3, 22em)"}))
text, figure = DisplayHandle(), DisplayHandle()
for handle in (text, figure):
    handle.display(Markdown(""))
update(None)
