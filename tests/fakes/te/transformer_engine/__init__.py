"""Stands in for Transformer Engine 2.20.2: it answers as that does on the GPU of the torch beside it.

FAKE_TE_FAILS says which of its claims are wrong, as JSON: {"nvfp4": message}, or "abort" or "hang" for a message.
"""

__version__ = "2.20.2"
