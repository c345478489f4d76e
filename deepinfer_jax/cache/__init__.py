"""State of sequences between calls of the model.

- view: the questions that the forward pass asks of a cache.
- dense: one array per sequence, for `forward`; rings: positions of its last tokens.
- paged: pools of blocks and slots, for the engine. pools: their declaration, and operations on whole pools.
- paged_view, packed_view: reads and writes of one step on the paged cache; packed: several rows of a sequence.
"""
