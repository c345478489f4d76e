"""The model as in the paper: pure functions of parameters and arrays, no engine.

- forward: the public entry. backbone: new tokens through all layers. block: one layer; carry and context: values that
  layers hand on and share.
- attention uses indexer, compressor, rope; moe uses expert_dispatch; hyper_connections, embedding, norm: as named.
- engram, engram_hash: n-gram memory. dspark: the draft model. vision: the tower.
- bounded_replay: later layers on the end of a prompt only. generation: a small loop over forward.
- probe: named tensors. checks: inputs of the research API.
"""
