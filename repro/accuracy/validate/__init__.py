"""Errors of predictions against published values (`published`) and against runs on this machine (`machine`).

`unknowns` ranks the uncertain inputs by their contribution, and `implied_inputs` computes the values of an input that
published values imply.
"""
