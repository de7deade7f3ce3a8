"""Token streams for training: packaged text, files of a user and synthetic tokens.

The order of samples depends on the seed, not on the layout.
"""

from repro.model.data.stream import TokenStream, open_stream

__all__ = ["TokenStream", "open_stream"]
