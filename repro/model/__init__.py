"""The transformer and its parts: layers, initial weights, counts of parameters and FLOP, token streams."""
