"""Configuration of a model, as frozen dataclasses.

- model_config: `config.json`, parsed. schedule_rules: rules of its layer schedule, checked.
- layer_plan: the work of each layer that follows. precision: dtypes of each precision.
"""
