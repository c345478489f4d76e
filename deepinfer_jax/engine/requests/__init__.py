"""One request from its arguments to its outputs.

- preparation: the check that every door uses; prompts, sampling_params, stop_texts: its parts.
- background: work that a request waits for. request: the engine's record of it.
- columns, adjustments: how it samples, to the device. results: a step's results to outputs. outputs: their classes.
"""
