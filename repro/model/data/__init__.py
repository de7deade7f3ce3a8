"""Token streams: packaged text, files of a user and synthetic tokens.

The order of samples depends on the seed alone, not on the layout. The ranks of `launch` train on these streams.
"""

from repro.model.data.stream import TokenStream, open_stream

__all__ = ["TokenStream", "open_stream"]
