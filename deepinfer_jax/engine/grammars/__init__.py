"""Structured outputs in the engine: compiled on threads while the request waits, followed token by token.

- constraint: the grammar of one request while it runs.
"""
