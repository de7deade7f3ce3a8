"""Errors of predictions: against published throughput (`published`) and against local runs (`machine`).

`unknowns` ranks the inputs that contribute most to the uncertainty. `conformal` estimates the error of the model
itself.
"""
