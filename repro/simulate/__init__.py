"""Simulation of the real training step at any scale: memory, communication, time, and the layouts that fit.

`trace` records the native engine's step on shapes. `step` simulates one experiment, and `plan` searches layouts.
"""
