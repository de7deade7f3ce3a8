"""Model families in transformers' format: conversion of configurations and tensors in both directions.

A module holds one family, and `FAMILIES` lists all of them.
"""

from __future__ import annotations

from repro.quality.weights.families import bloom, falcon, gpt2, llama, neox
from repro.quality.weights.families.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: tuple[Family, ...] = (
    gpt2.FAMILY,
    llama.FAMILY,
    llama.QWEN2,
    neox.FAMILY,
    bloom.FAMILY,
    falcon.FAMILY,
)
"""In the order in which they are asked whether they have what is exported."""
