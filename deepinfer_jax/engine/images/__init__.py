"""Images of requests: opened on threads while the request waits, encoded before its prefill steps.

- request_images: the images of one request. opener: opens them beside the loop, on the threads of workers.
- features: rows of encoded images on the device.
"""
