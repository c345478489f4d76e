"""Where parameters lie on a mesh: logical axes of `layout.py` to mesh axes (design.md §9).

A rule set is one object; replace it to change the strategy. Routed experts lie over `expert`; vocabulary, head and
Engram rows over both axes; everything else is replicated.
"""

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.weights.layout import ParamSpec

DATA, EXPERT = "data", "expert"


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical axis; axes that a mesh does not have are ignored.

    Attributes are named like the logical axes in `layout.py`.
    """

    vocab: tuple[str, ...] = (DATA, EXPERT)
    expert: tuple[str, ...] = (EXPERT,)
    engram_rows: tuple[str, ...] = (DATA, EXPERT)
    hidden: tuple[str, ...] = ()
    streams_hidden: tuple[str, ...] = ()
    q_lora: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    head_dim: tuple[str, ...] = ()
    o_lora: tuple[str, ...] = ()
    index_heads: tuple[str, ...] = ()
    index_dim: tuple[str, ...] = ()
    expert_ffn: tuple[str, ...] = ()


DEFAULT_RULES = ShardingRules()

# Experts and table rows are addressed by ids below their true number, so these axes may be padded with zeros to a
# multiple of the devices; any other axis must divide.
_PADDED = ("expert", "engram_rows")


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same mesh with automatic axes, whatever axis types it was made with (jax.md «Measured later»).

    Raises:
        ValueError: an axis is neither "data" nor "expert".
    """
    unknown = [name for name in mesh.axis_names if name not in (DATA, EXPERT)]
    if unknown:
        raise ValueError(f"the mesh has axes {unknown}; expected {DATA!r} and {EXPERT!r}")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def axis_size(mesh: Mesh, names: tuple[str, ...]) -> int:
    """Number of devices along some mesh axes; absent axes count 1."""
    return math.prod(mesh.shape.get(name, 1) for name in names)


def placed_shape(spec: ParamSpec, mesh: Mesh | None, rules: ShardingRules = DEFAULT_RULES) -> tuple[int, ...]:
    """Shape of a parameter in elements as it is placed: `spec.full_shape` with padded experts and table rows."""
    if mesh is None:
        return spec.full_shape
    return tuple(
        math.ceil(size / devices) * devices if axis in _PADDED else size
        for size, axis, devices in zip(spec.full_shape, spec.axes, _devices(spec, mesh, rules), strict=True)
    )


def param_sharding(spec: ParamSpec, mesh: Mesh, rules: ShardingRules = DEFAULT_RULES) -> NamedSharding:
    """The sharding of a parameter, valid for its codes and for its scales.

    Raises:
        ValueError: an axis does not divide; the message names tensor, rule and remedy.
    """
    sizes = [placed_shape(spec, mesh, rules), spec.stored_shape]
    if spec.scale_shape is not None:
        sizes.append(spec.scale_shape)
    for dim, (axis, devices) in enumerate(zip(spec.axes, _devices(spec, mesh, rules), strict=True)):
        # Stored shapes of stacked tensors lack the leading expert axis.
        for shape in sizes if not spec.stacked else [sizes[0], *((0, *shape) for shape in sizes[1:])]:
            if axis not in _PADDED and shape[dim] % devices:
                raise ValueError(
                    f"{spec.names[0]}: axis {dim} ({axis}) has {shape[dim]} entries as stored, which {devices} "
                    f"devices cannot share (rule {axis} -> {getattr(rules, str(axis))}); use another mesh, or "
                    f"ShardingRules({axis}=())"
                )
    names = [_mesh_axes(axis, mesh, rules) for axis in spec.axes]
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in names)))


def _mesh_axes(axis: str | None, mesh: Mesh, rules: ShardingRules) -> tuple[str, ...]:
    wanted = () if axis is None else getattr(rules, axis)
    return tuple(name for name in wanted if name in mesh.axis_names)


def _devices(spec: ParamSpec, mesh: Mesh, rules: ShardingRules) -> list[int]:
    return [axis_size(mesh, _mesh_axes(axis, mesh, rules)) for axis in spec.axes]


def row_axis(rows: int, mesh: Mesh) -> str | None:
    """The mesh axis that some rows are spread over: `data` where it divides them."""
    return DATA if DATA in mesh.axis_names and rows % mesh.shape[DATA] == 0 else None


def over_data(mesh: Mesh | None) -> NamedSharding | None:
    """The leading axis over `data`, the rest on every device of its part; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(DATA))


def shard_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Spreads the leading (batch) axis over `data` where it divides; without a mesh, the identity."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axis(x.shape[0], mesh))))
