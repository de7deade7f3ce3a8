"""Claims evaluated on a current system: the questions, and the answers from simulated records.

The answers are predictions without a verdict, because no published value exists for them.
"""
