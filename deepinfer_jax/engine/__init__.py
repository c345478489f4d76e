"""The engine: requests in, tokens out.

- Doors: llm (lists), llm_engine (one step at a time), async_engine (asyncio, over engine_thread).
- core: the step loop: launch (a plan to the device), commit (results back), gc_pause.
- Start: args and environ (its sampler_options) are resolved (resolution) to a config; loading builds the parts.
  validation: checks of single values.
- requests: one request, from arguments to outputs. images, grammars: of requests, made ready beside the loop.
- drafts: speculative decoding. handover: sequences between engines. metrics: statistics. diagnosis: bad logits.
"""
