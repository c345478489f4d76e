"""Speculative decoding in the engine; the drafts themselves are made on the device.

- scheduled_verification: sizes decode steps by confidence. step_times: measured times of the decode programs.
- calibration: temperatures of the confidence head.
"""
