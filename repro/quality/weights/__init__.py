"""Weights of others as our GPT's parameters, and ours as theirs: Hugging Face, Megatron-LM, our own checkpoints.

`source` is what all of them are for a rank: elements of parameters on demand, so that it reads what it keeps.
`huggingface` (by `families`, in `rows`), `megatron` and `own` say which of their tensors is which parameter of ours,
`opened` which of them a folder is, `export` writes a folder that transformers loads; `tensors_file` and `pickled` are
the two kinds of files. Nothing that a file names is imported or called. `evaluate` and `cli` import it.
"""
