"""Calibration (`repro calibrate`): measurement of a machine, written as a system file for predictions.

The measurements cover operators, copies, collectives and the host overhead of a step. They do not include the training
steps that the system file later predicts.
"""
