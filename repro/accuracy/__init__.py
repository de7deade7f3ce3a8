"""Accuracy of predictions: calibration of machines, scaled-down twins, and predictions against published values.

The package combines runs of `launch` with simulations, and `report` shows its results.
"""
