"""Accuracy of predictions: machine calibration, scaled-down copies of experiments (twins), and errors of predictions.

The package combines runs of `launch` with simulations, and `report` shows its results.
"""
