"""Model, Layout, Training, System and Experiment: frozen dataclasses; files are checked where they come in.

`enums` has the words with a fixed set of values, `errors` the one exception for bad input.  No torch, and nothing of
the harness but these; everything may import it.
"""

from repro.config.errors import ConfigError
from repro.config.experiment import PROTOCOL, Experiment, Limits, from_dict
from repro.config.layout import Layout
from repro.config.model import Model
from repro.config.network import EmulatedNetwork
from repro.config.operator_set import OperatorSet
from repro.config.training import Training
from repro.config.twin import TwinOf

__all__ = [
    "PROTOCOL",
    "ConfigError",
    "EmulatedNetwork",
    "Experiment",
    "Layout",
    "Limits",
    "Model",
    "OperatorSet",
    "Training",
    "TwinOf",
    "from_dict",
]
