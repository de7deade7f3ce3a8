"""`repro evaluate`: perplexity on WikiText-103 and accuracy on LAMBADA by the protocols that were published.

`protocols` are these and where they are written down, `texts` makes samples of a text file, `tokens` its tokens;
`scorer` is the model on a rank, `rank` what a rank does, `run` starts the ranks and makes the record.
`cli` imports it.
"""
