"""Memory of an engine, from shapes alone: nothing is allocated.

- plan: how many blocks fit, or why an engine does not. demand: bytes as functions of the lengths; device: bytes that
  there are.
- parts: bytes of each part on one device. units: bytes as text.
"""
