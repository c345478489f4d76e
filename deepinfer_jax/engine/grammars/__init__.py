"""Structured outputs in the engine: compiled on threads while the request waits, followed token by token.

- compiler: compiles grammars beside the loop. constraint: the grammar of one request while it runs.
- masks: the masks of a step, to the device.
"""
