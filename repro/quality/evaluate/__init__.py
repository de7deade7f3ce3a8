"""`repro evaluate`: perplexity on WikiText-103 and accuracy on LAMBADA by published protocols.

`protocols` defines the protocols, `scorer` is the model on a rank, and `run` starts the ranks and writes the record.
"""
