"""Import, export and evaluation of model weights.

`weights` converts weights between formats, and `evaluate` scores them by published protocols on ranks.
"""
