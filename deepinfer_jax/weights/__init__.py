"""Parameters of a model: names, shapes and placement; reading them is `checkpoint`'s work.

- layout: the declaration of every parameter (released names, shape, storage, axes). params: the pytree of arrays.
- sharding: placement on a mesh.
"""
