"""Images of requests: opened on threads while the request waits, encoded before its prefill steps.

- workers: the threads, with a bound on what lies ready. features: rows of encoded images on the device.
"""
