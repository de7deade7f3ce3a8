"""`repro evaluate`: perplexity on WikiText-103 and accuracy on LAMBADA by published protocols.

`samples` tokenizes the text by a protocol, `rank` scores on a rank, and `run` starts the ranks and writes the record.
"""
