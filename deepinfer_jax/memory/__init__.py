"""Memory of an engine, from shapes alone: nothing is allocated.

- parts: bytes of each part on one device.
- plan: how many blocks fit, or why an engine does not.
"""
