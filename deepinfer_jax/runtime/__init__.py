"""Step programs on the device, and what launches them. Start with runner.

- steps: the two step programs as functions; step_sampling: their last part. paged_model: the model in them.
- step_program: which function runs a bucket, and its shapes. step_input: the packed host input. step_result: results
  on their way back.
- slot_table, slot_sampling, slot_drafts: state of running sequences beside the cache. allocation, packed_rows: decode
  steps that verify only some drafts.
- runner: launches steps. device_state: holds the state and runs the state ops of state_ops. duties: which of both.
- compiled_programs, abstract_tree: ahead-of-time compilation. vision_encoder: images to features.
- aot: a command that compiles for a GPU on a machine without one.
"""
