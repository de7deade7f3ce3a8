"""Conversion of weights between the suite's GPT, Hugging Face, Megatron-LM and checkpoints of the suite.

Every format is a `source` of parameter elements on demand, so a rank reads only its part. No code named in a file is
imported or called.
"""
