"""Configuration of experiments: dataclasses, the readers of their TOML files, and the packaged models and systems.

Every error in a file becomes one `ConfigError`. The package imports neither torch nor any other package of `repro`
except `repro.util`.
"""

from repro.config.enums import OperatorSet
from repro.config.errors import ConfigError, require
from repro.config.experiment import PROTOCOL, Experiment, Limits, TwinOf, from_dict
from repro.config.layout import Layout
from repro.config.model import Model
from repro.config.network import EmulatedNetwork
from repro.config.training import Training

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
    "require",
]
