"""The engine: requests in, tokens out.

- Doors: llm (lists), llm_engine (one step at a time), async_engine (asyncio, over engine_thread).
- core: the step loop, with launch (to the device). loading builds the parts from args and environ.
- requests: prompt checks, sampling parameters, results. images, grammars: work on threads beside the loop.
- drafts: speculative decoding. handover: sequences between engines. metrics: statistics. diagnosis: bad logits.
"""
