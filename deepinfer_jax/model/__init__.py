"""The model as in the paper: pure functions of parameters and arrays, no engine.

- forward: the public entry. block: one layer, of attention, moe and hyper_connections; engram beside them.
- attention uses indexer, compressor, rope; moe uses expert_dispatch. embedding, norm: as named.
- dspark: the draft model. vision: the tower. bounded_replay: later layers on the end of a prompt only.
- engram_hash: row ids on the device. probe: named tensors. checks: inputs. generation: a small loop.
"""
