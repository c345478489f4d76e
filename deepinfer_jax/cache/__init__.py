"""State of sequences between calls of the model.

- dense: one array per sequence, for `forward`. paged: pools of blocks and slots, for the engine.
- paged_view, packed_view: reads and writes of one step on the paged cache; packed: several rows of a sequence.
- pools: the declaration of paged state, and operations on whole pools.
"""
