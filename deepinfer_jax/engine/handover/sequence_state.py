"""A computed prompt on its way from one engine to another, in memory or in a file (DB §1.8).

The file is a safetensors file: the bytes of the blocks and of the slot, the tokens, the pixels of images, and a header
that says where they come from. Nothing of a file is used before all of it has been checked.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.engine.config import EngineConfig
from deepinfer_jax.engine.handover.images import described_images, image_prompt, joined_pixels
from deepinfer_jax.engine.requests.columns import slot_places
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.scheduler import Sequence, blocks_for
from deepinfer_jax.tokenization import ImagePrompt
from deepinfer_jax.weights.params import Params

FORMAT_VERSION = 2
"""Raised whenever the meaning of the bytes or of the header changes."""

_HEADER, _CHECKSUM = "deepinfer_jax_sequence", "sha256"
_DIGEST_ROWS = 16


@dataclass(frozen=True)
class StateIdentity:
    """What two engines must have in common for one to go on where the other stopped.

    Attributes:
        config: digest of the model's configuration.
        weights: digest of a part of its weights.
        precision: of the arithmetic.
        tokens_per_block: tokens of a block.
        layout: name, place, shape and type of every kind of state, in the order of their bytes.
    """

    config: str
    weights: str
    precision: str
    tokens_per_block: int
    layout: tuple[str, ...]

    def require(self, other: "StateIdentity", where: str) -> None:
        """Raises ValueError if state of `other`, found at `where`, means nothing here."""
        meanings = {
            "config": "another model configuration",
            "weights": "other weights",
            "precision": f"precision {other.precision}, this engine computes in {self.precision}",
            "tokens_per_block": f"blocks of {other.tokens_per_block} tokens, this engine has {self.tokens_per_block}",
            "layout": f"another layout of the cache: {_first_difference(self.layout, other.layout)}",
        }
        different = [meaning for name, meaning in meanings.items() if getattr(self, name) != getattr(other, name)]
        if different:
            raise ValueError(f"{where}: the sequence was computed with {'; with '.join(different)}")


@dataclass(frozen=True, eq=False)
class SequenceState:
    """A request whose prompt is computed: all that another engine needs to go on token for token.

    Random numbers are counted by position (design.md §8), so the seed is all that sampling needs.

    Attributes:
        identity: of the engine that computed it.
        request_id, user_id: the caller's names.
        params: the fields of its SamplingParams.
        seed: 64-bit key of its random numbers.
        prompt_token_ids: int32 [prompt_len].
        output_token_ids: int32 [n], what it has given already: the first token.
        num_tokens: tokens whose state the bytes hold: all but the last.
        blocks: uint8 [blocks, bytes of a block].
        slot: uint8 [bytes of a slot].
        image_prompt: the prompt with its images, which a preemption would want again; None for text.
    """

    identity: StateIdentity
    request_id: str
    user_id: str
    params: dict[str, Any]
    seed: int
    prompt_token_ids: npt.NDArray[np.int32]
    output_token_ids: npt.NDArray[np.int32]
    num_tokens: int
    blocks: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.uint8]
    image_prompt: ImagePrompt | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of blocks, slot and pixels."""
        images = () if self.image_prompt is None else self.image_prompt.images
        return self.blocks.nbytes + self.slot.nbytes + sum(own.image.pixels.nbytes for own in images)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file; it appears under its name only when it is complete."""
        path = Path(path)
        header = json.dumps({"version": FORMAT_VERSION, **self._described()}, sort_keys=True)
        tensors = {name: np.ascontiguousarray(getattr(self, name)) for name in _TENSORS}
        tensors[_PIXELS] = joined_pixels(self.image_prompt)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, {_HEADER: header, _CHECKSUM: _checksum(header, tensors)})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SequenceState":
        """Reads a file.

        Raises:
            ValueError: it is cut short, damaged, no such file, or of another version of the format; with its name.
            OSError: it cannot be read.
        """
        path = Path(path)
        with open(path, "rb"):
            pass  # a file that cannot be read is an OSError; what follows says what is wrong inside
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except SafetensorError as error:
            raise ValueError(f"{path}: not a complete file of a sequence ({error})") from None
        if _HEADER not in metadata:
            raise ValueError(f"{path}: a safetensors file, but not of a sequence: its metadata has no {_HEADER}")
        if metadata.get(_CHECKSUM) != _checksum(metadata[_HEADER], tensors):
            raise ValueError(f"{path}: the file is damaged: its contents do not match its checksum")
        described = json.loads(metadata[_HEADER])
        if (version := described.pop("version")) != FORMAT_VERSION:
            raise ValueError(f"{path}: written in version {version} of the format, this engine reads {FORMAT_VERSION}")
        identity = described.pop("identity")
        identity["layout"] = tuple(identity["layout"])
        prompt = image_prompt(tensors["prompt_token_ids"], described.pop("images"), tensors.pop(_PIXELS))
        return cls(identity=StateIdentity(**identity), image_prompt=prompt, **described, **tensors)

    def _described(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in (*_TENSORS, "image_prompt")]
        return {name: getattr(self, name) for name in names} | {
            "identity": dataclasses.asdict(self.identity),
            "images": described_images(self.image_prompt),
        }


def computed_state(
    runner: Runner, sequence: Sequence[Request], identity: StateIdentity, tokens_per_block: int
) -> SequenceState:
    """What the device and the host hold of a sequence whose results have all been read."""
    held = sequence.block_table[: blocks_for(sequence.num_tokens, tokens_per_block)]
    blocks = runner.read_blocks(sequence.dp_rank, held)
    slot = runner.read_slots(**slot_places([sequence]), lengths=np.asarray([sequence.num_tokens], np.int32))
    return SequenceState(
        identity=identity,
        request_id=sequence.request_id,
        user_id=sequence.user_id,
        params=dict(vars(sequence.request.params)),
        seed=sequence.request.seed,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=np.asarray(sequence.output_token_ids, np.int32),
        num_tokens=sequence.num_tokens,
        blocks=blocks.result(),
        slot=slot.result()[0],
        image_prompt=sequence.request.image_prompt,
    )


def check_state(state: SequenceState, runner: Runner, config: EngineConfig, max_tokens: int) -> None:
    """Raises ValueError for a state that is not whole, or from which this engine has nowhere to go."""
    prompt_len, output_len = len(state.prompt_token_ids), len(state.output_token_ids)
    wanted = {
        "output_token_ids": (max(output_len, 1),),
        "blocks": (blocks_for(prompt_len + output_len - 1, config.tokens_per_block), runner.block_bytes),
        "slot": (runner.slot_bytes,),
    }
    found = {name: getattr(state, name).shape for name in wanted}
    if found != wanted or state.num_tokens != prompt_len + output_len - 1:
        raise ValueError(
            f"request {state.request_id}: the state is not whole: {prompt_len} prompt and {output_len} output tokens "
            f"take {wanted} and num_tokens {prompt_len + output_len - 1}, but it has {found} and {state.num_tokens}"
        )
    if state.image_prompt is not None and not np.array_equal(state.image_prompt.token_ids, state.prompt_token_ids):
        raise ValueError(f"request {state.request_id}: the state is not whole: its images belong to another prompt")
    if output_len >= min(max_tokens, config.max_model_len + 1 - prompt_len):
        raise ValueError(
            f"request {state.request_id}: nothing is left to generate: it has {prompt_len} prompt and {output_len} "
            f"output tokens, max_tokens is {max_tokens}, and this engine's max_model_len {config.max_model_len}"
        )


_TENSORS, _PIXELS = ("blocks", "slot", "prompt_token_ids", "output_token_ids"), "pixels"


def state_identity(config: ModelConfig, params: Params, tokens_per_block: int, declared: Any) -> StateIdentity:
    """The identity of an engine with these parameters; declared: a pytree of `StateSpec`."""
    return StateIdentity(
        config=hashlib.sha256(repr(config).encode()).hexdigest(),
        weights=_weights_digest(params),
        precision=params.precision,
        tokens_per_block=tokens_per_block,
        layout=state_layout(declared),
    )


def state_layout(declared: Any) -> tuple[str, ...]:
    """One description for each kind of state, in the order of the bytes."""
    return tuple(
        f"{spec.name}: {spec.dtype.name} {list(spec.shape)} per "
        + ("block" if spec.per == "block" else f"token, {spec.reach} tokens")
        for spec in jax.tree.leaves(declared)
    )


def _weights_digest(params: Params) -> str:
    """SHA-256 of some rows of embedding and head, of all norms of the backbone, and of the first row of each layer's
    routed experts.

    Reading all weights would take minutes; another training run changes these too. Values, not bytes: how these leaves
    are stored depends on the platform. The values of others do as well, so dense projections are left out.
    """
    layers = [
        (layer.attn_norm, layer.ffn_norm, layer.attn.q_norm, layer.attn.kv_norm, _first_rows(layer.ffn.experts))
        for layer in params.layers
    ]
    sampled = params.embed[:_DIGEST_ROWS], params.head[:_DIGEST_ROWS], params.norm, layers
    digest = hashlib.sha256()
    for leaf in jax.device_get(jax.tree.leaves(sampled)):
        digest.update(np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()


def _first_rows(leaves: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[(0,) * (leaf.ndim - 1)], leaves)


def _checksum(header: str, tensors: dict[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _first_difference(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    for our, their in zip(ours, theirs, strict=False):
        if our != their:
            return f"it holds {their}, this engine {our}"
    return f"it holds {len(theirs)} kinds of state, this engine {len(ours)}"
