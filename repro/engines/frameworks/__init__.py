"""Configuration files of Megatron-LM, DeepSpeed, torchtitan and nanotron, written for or read as an experiment.

Each `*.toml` file maps the options of a framework to keys of this suite, and `table` converts in both directions.
`rules` converts options that depend on several keys, and `files` reads and writes the formats.
"""
