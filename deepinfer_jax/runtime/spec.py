"""What a compiled program depends on of the arrays that it takes."""

from typing import Any, NamedTuple

import jax


class Spec(NamedTuple):
    """Structure, shapes, dtypes and placement of a pytree of arrays; hashable."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def tree(self) -> Any:
        """The pytree, with its leaves' descriptions in their places."""
        return self.structure.unflatten(self.leaves)


def spec_of(tree: Any) -> Spec:
    """The description of a pytree of arrays, or of descriptions."""
    leaves, structure = jax.tree.flatten(tree)
    return Spec(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves))
