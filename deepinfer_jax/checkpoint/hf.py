"""`load_params`: loads a released checkpoint onto devices, one tensor in host memory at a time (L7)."""

import dataclasses
import logging
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.checkpoint.completeness import check_complete
from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.checkpoint.leaves import HostArray, Leaf, build_leaf, leaf_form
from deepinfer_jax.config.model_config import ModelConfig, check_precision
from deepinfer_jax.tokenization import CompressedVocabulary
from deepinfer_jax.weights.layout import ParamSpec, layout, param_specs
from deepinfer_jax.weights.params import Params
from deepinfer_jax.weights.sharding import auto_mesh, param_sharding, placed_shape

_log = logging.getLogger(__name__)


def load_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    precision: str = "reference",
    mesh: Mesh | None = None,
    tokenizer: str | Path | None = None,
) -> Params:
    """Loads all parameters of a model folder.

    Args:
        directory: holds `model.safetensors.index.json` and its shards, or `model.safetensors`.
        config: of the same folder. Without `quantization_config` it is a bf16 checkpoint (model.md §2.1).
        precision: "reference" and "bf16" keep the storage formats (on CPU all but routed experts and Engram tables
            are decoded to float32 once, exactly); "float32" and "float32_exact" hold float32 only.
        mesh: of axes `data` and `expert`; places every parameter by `sharding.param_sharding`, and each device is
            sent its slice only. Experts and table rows are filled up with zeros to a multiple of the devices.
            Without a mesh everything goes to the default device.
        tokenizer: folder of the `tokenizer.json` that the Engram token map is made from; default `directory`.

    Returns:
        Parameters with the exact values of the checkpoint. Without a `tokenizer.json` the token map of a model with
        Engram layers is None, which is logged.

    Raises:
        FileNotFoundError: no checkpoint here, or missing shards.
        ValueError: unknown precision; a mesh over which a parameter cannot be divided; a malformed file; missing,
            surplus or wrong tensors (file and tensor are named); a tokenizer whose compressed vocabulary is not that
            of the configuration.
    """
    check_precision(precision)
    platform = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform
    if mesh is not None:
        mesh = auto_mesh(mesh)
        for spec in param_specs(config):
            param_sharding(spec, mesh)  # refuses an indivisible axis now rather than after hours of loading
    folder = CheckpointFolder(directory)
    check_complete(folder, config)
    token_map = _token_map(Path(tokenizer or directory), config)
    if mesh is not None and token_map is not None:
        token_map = jax.device_put(token_map, NamedSharding(mesh, PartitionSpec()))

    def load(spec: ParamSpec) -> Leaf:
        def place(array: HostArray) -> jax.Array:
            placed: jax.Array
            if mesh is None:
                placed = jax.device_put(array.read())
            else:
                padding = placed_shape(spec, mesh)[0] - spec.full_shape[0]  # scale blocks may have fewer rows
                shape = (array.shape[0] + padding, *array.shape[1:])
                read = partial(array.read_padded, rows=shape[0])
                placed = jax.make_array_from_callback(shape, param_sharding(spec, mesh), read)
            jax.block_until_ready(placed)  # else the host copies of many tensors wait in memory
            return placed

        return build_leaf(spec, leaf_form(spec, precision, platform), folder, place)

    params: Params = jax.tree.map(load, layout(config))
    return dataclasses.replace(params, token_map=token_map, precision=precision, mesh=mesh)


def _token_map(directory: Path, config: ModelConfig) -> jax.Array | None:
    """Compressed id of every token id for the Engram hash (model.md §7.1)."""
    if not config.text.engram_layer_ids:
        return None
    path = directory / "tokenizer.json"
    if not path.is_file():
        _log.warning(
            "%s does not exist: these parameters have no Engram token map and cannot run. "
            "Pass tokenizer=FOLDER to load_params.",
            path,
        )
        return None
    vocabulary = CompressedVocabulary(path)
    if len(vocabulary) != config.text.engram_compressed_vocab_size:
        raise ValueError(
            f"{path} compresses to {len(vocabulary)} ids, but config.json has engram_compressed_vocab_size "
            f"{config.text.engram_compressed_vocab_size}: it is not the tokenizer that this model was trained with, "
            "and its Engram rows would be wrong (T22)"
        )
    return jnp.array(vocabulary.lookup_table)
