"""One request from its arguments to its outputs.

- prompts, sampling_params, stop_texts: what a caller gives, checked. request: the engine's record of it.
- adjustments: changes of its logits, to the device. results: a step's results to outputs. outputs: their classes.
"""
