"""Computed prompts on their way from one engine to another.

- sequence_state: the state, exported, imported, in a file. images: the prompt's images in that file.
"""
