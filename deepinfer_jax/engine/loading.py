"""A model folder to the parts of an engine."""

from dataclasses import dataclass
from typing import Any

import jax

from deepinfer_jax.checkpoint.hf import load_params
from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.config import load_config
from deepinfer_jax.engine.args import EngineArgs, EngineLimits
from deepinfer_jax.engine.environ import enable_compilation_cache
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.text_model import TextModel
from deepinfer_jax.tokenization import get_hf_tokenizer


@dataclass(frozen=True)
class EngineParts:
    """What an engine works with.

    Attributes:
        tokenizer: text to ids and back, and `eos_token_id`.
        vocab_size: ids a prompt may hold.
        image_token_id: the id that stands for an image in a chat; a plain id without one.
        limits: sizes.
        runner: the compiled programs.
    """

    tokenizer: Any
    vocab_size: int
    image_token_id: int
    limits: EngineLimits
    runner: Runner


def load_parts(args: EngineArgs) -> EngineParts:
    """Reads configuration, tokenizer and parameters, in this order: what fails, fails before weights are read."""
    enable_compilation_cache()
    config = load_config(args.model)
    tokenizer = get_hf_tokenizer(
        args.tokenizer or args.model,
        args.trust_remote_code,
        revision=args.revision,
        tokenizer_revision=args.tokenizer_revision,
    )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{args.tokenizer or args.model}: tokenizer_config.json names no eos_token, so no answer could end; "
            f"config.json has eos_token_id {config.eos_token_id}"
        )
    limits = args.limits(config.text.max_position_embeddings)
    if args.load_format == "dummy":
        params = init_params(config, jax.random.key(args.seed), precision=args.precision)
    else:
        params = load_params(args.model, config, precision=args.precision)
    kernels = KernelChoice.for_devices(jax.local_devices()[:1])
    return EngineParts(
        tokenizer=tokenizer,
        vocab_size=config.text.vocab_size,
        image_token_id=config.image_token_id,
        limits=limits,
        runner=Runner(TextModel(config, args.precision, limits.max_model_len, kernels), params),
    )
