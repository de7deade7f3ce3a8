"""Errors of predictions: against published throughput (`published`) and against local runs (`machine`).

`published` also estimates the error of the model itself. `unknowns` ranks the inputs that contribute most to the
uncertainty.
"""
