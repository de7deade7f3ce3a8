"""Simulation of the real training step at any scale: memory, communication, time, and the layouts that fit.

The native engine's step is traced on shapes. `step` simulates one experiment, and `plan` searches layouts.
"""
