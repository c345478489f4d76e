"""Hashable description of a pytree of arrays: the key under which compiled programs are shared."""

from typing import Any, NamedTuple

import jax


class AbstractTree(NamedTuple):
    """Structure, shapes, dtypes and placement of a pytree of arrays; hashable."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def tree(self) -> Any:
        """The pytree, with its leaves' descriptions in their places."""
        return self.structure.unflatten(self.leaves)


def abstract_tree(tree: Any) -> AbstractTree:
    """The description of a pytree of arrays, or of descriptions."""
    leaves, structure = jax.tree.flatten(tree)
    return AbstractTree(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves))
