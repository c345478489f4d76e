"""What several test modules use; no test module imports another.

Everywhere: `paths` (golden data, configurations), `marks` (slow cases), `children` (scripts in processes of their own).

Engines: `engine_runs` (steps until nothing is left, with a bound), `sequences` (without an engine), `interrupts`.
On the toy model: `toy` (model, plain twin, engine), and with more: `toy_images`, `toy_grammar`, `drafting` (drafts and
their twin), `varlen_engine` (drafts verified by confidence), `dummy_kind` (another kind of state), `async_toy`,
`reuse_traffic` (texts that share beginnings), `driven` (a runner without scheduler and engine).
On the real one: `real_model` (golden A with room for long texts, and what `forward` says), `small_model` (four layers
with every mechanism), `agreeing` (golden models whose drafts are often accepted).

The forward pass: `golden` (the data, tolerances), `replay` (whole cases), `blocks` (sublayers on golden inputs),
`stepping` (paged caches step by step).

Brute force: `attention_oracle`, `sampling_twin`, `scheduler_twin` and its `scheduler_twin_device`, `walks` (random
texts that a grammar allows), `image_rules`.

Scripts for `children`, each with several virtual devices: `two_devices`, `two_devices_reuse`, `two_devices_moves`,
`two_devices_varlen`, `sharded_engine`, `sharded_forward`.
"""
