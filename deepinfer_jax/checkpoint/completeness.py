"""Checks that a folder holds exactly the tensors of its configuration, before any is loaded (T21, L1, L2)."""

from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.weights.layout import TensorSpec, param_specs

_UNFOLDED = ("hc_attn_norm.weight", "hc_ffn_norm.weight", "hc_head_norm.weight")


def check_complete(folder: CheckpointFolder, config: ModelConfig) -> None:
    """Compares names (exactly), dtypes and shapes with `layout(config)`.

    Raises:
        ValueError: a missing tensor or scale, a tensor that the model does not have, a wrong dtype or shape; the
            message names file and tensor.
    """
    expected: set[str] = set()
    for spec in param_specs(config):
        for name in spec.names:
            weight, *scales = spec.stored(name)
            expected.update(tensor.name for tensor in (weight, *scales))
            _check(folder, config, weight)
            for scale in scales:
                _check_scale(folder, name, scale)
    for name in folder:
        if name not in expected:
            _refuse_surplus(folder, config, name)


def _check(folder: CheckpointFolder, config: ModelConfig, tensor: TensorSpec) -> None:
    if tensor.name not in folder:
        raise ValueError(
            f"{folder.directory}: tensor {tensor.name!r} ({tensor.dtype} {list(tensor.shape)}) is missing; no file of "
            "the checkpoint holds it, so the checkpoint is incomplete or config.json describes another model"
        )
    entry = folder.entry(tensor.name)
    where = f"{folder.path(tensor.name)}: tensor {tensor.name!r}"
    if entry.dtype != tensor.dtype:
        kind = "an FP8/FP4" if config.quantized else "a bf16"
        raise ValueError(
            f"{where} has dtype {entry.dtype}, expected {tensor.dtype}: config.json describes {kind} checkpoint "
            f"({'with' if config.quantized else 'without'} quantization_config)"
        )
    if entry.shape != tensor.shape:
        raise ValueError(
            f"{where} has shape {list(entry.shape)}, expected {list(tensor.shape)} from the sizes in config.json"
        )


def _check_scale(folder: CheckpointFolder, name: str, scale: TensorSpec) -> None:
    if scale.name not in folder:
        raise ValueError(
            f"{folder.path(name)}: tensor {name!r} is {folder.entry(name).dtype}, but its scale {scale.name!r} "
            f"({scale.dtype} {list(scale.shape)}) is in no file of the checkpoint"
        )
    entry = folder.entry(scale.name)
    if (entry.dtype, entry.shape) != (scale.dtype, scale.shape):
        raise ValueError(
            f"{folder.path(scale.name)}: tensor {scale.name!r} is {entry.dtype} {list(entry.shape)}, expected "
            f"{scale.dtype} {list(scale.shape)}: the scales of {name!r}"
        )


def _refuse_surplus(folder: CheckpointFolder, config: ModelConfig, name: str) -> None:
    where = f"{folder.path(name)}: tensor {name!r}"
    if name.endswith(_UNFOLDED):
        raise ValueError(
            f"{where} is an unfolded hyper-connection norm; fold it into the fn matrix (DB §13.1) and convert again"
        )
    if name.endswith(".scale") and not config.quantized:
        raise ValueError(f"{where} is a scale, but config.json has no quantization_config")
    raise ValueError(
        f"{where} is not part of the model that config.json describes; remove it, or use the config.json that came "
        "with this checkpoint"
    )
