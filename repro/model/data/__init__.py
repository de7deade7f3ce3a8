"""Token streams: real text, pre-tokenised files and synthetic tokens, in an order no layout can change.

`launch`, whose ranks train on them, imports it.
"""

from repro.model.data.stream import TokenStream, open_stream

__all__ = ["TokenStream", "open_stream"]
