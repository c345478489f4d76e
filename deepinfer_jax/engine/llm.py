"""`LLM`: a list of prompts in, a list of results out (DB §1.1)."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from deepinfer_jax.engine.args import EngineArgs, EngineType
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput, answer_text
from deepinfer_jax.engine.requests.preparation import INVALID_PROMPT, Prepared, Refusal, prepare, with_opened_images
from deepinfer_jax.engine.requests.prompts import encode_text
from deepinfer_jax.engine.requests.request import copy_params
from deepinfer_jax.engine.requests.sampling_params import SamplingParams

_USER_ID = "0"


class LLM:
    """Offline generation (DB §1.1: names, defaults and order are DeepInfer's).

    llm = LLM("path", decode_sequence=True)
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    Arguments:
        model ... gpu_memory_utilization: see `EngineArgs`.
        decode_sequence: True: `generate` returns strings; False: lists of `RequestOutput`.
        kwargs: further fields of `EngineArgs`; an unknown name is a TypeError that names the nearest.

    Attributes:
        llm_engine: the `LLMEngine` below.
        last_errors: of the latest `generate`: position in the prompt list -> why that result is not an answer.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        trust_remote_code: bool = False,
        expert_parallel_size: int = 1,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        decode_sequence: bool = True,
        **kwargs: Any,
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        args = {
            "model": os.fspath(model),
            "tokenizer": None if tokenizer is None else os.fspath(tokenizer),
            "trust_remote_code": trust_remote_code,
            "expert_parallel_size": expert_parallel_size,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "disable_log_stats": True,
            "stop_preempted_request": False,
            "offline_inference": True,
        }
        engine_args = EngineArgs.from_kwargs(args | kwargs)
        if engine_args.engine_type is not EngineType.NORMAL:
            raise ValueError(
                f"LLM runs whole requests; a {engine_args.engine_type.name} engine is an LLMEngine of its own"
            )
        self.llm_engine = LLMEngine(engine_args)
        self.decode_sequence = decode_sequence
        self.last_errors: dict[int, str] = {}
        self._request_counter = 0

    def get_tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self.llm_engine.tokenizer

    def close(self) -> None:
        """Frees the engine. May be called again."""
        self.llm_engine.close()

    def generate(
        self,
        prompts: str | Iterable[str] | None = None,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        prompt_token_ids: Iterable[Any] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: Any = None,
        *,
        on_invalid: Literal["raise", "report"] = "raise",
        strip_eos: bool = True,
    ) -> list[Any]:
        """Generates for every prompt; result i belongs to prompt i, always.

        Arguments:
            prompts: one text or several; each is encoded by the tokenizer, with its special tokens.
            sampling_params: one object for all prompts, or one per prompt. Each request works on a copy, and
                draws a seed of its own if the object has none. A field that was set to a bad value is an error.
                With n > 1 a prompt has n completions: the first has the seed of `seq_seed`, if there is one, the others
                have seeds that are derived from it.
            prompt_token_ids: one list of ids per prompt; wins over `prompts`.
            use_tqdm: shows a progress bar.
            multi_modal_data: one entry per prompt, None for text, else `image_bytes`, a list of encoded images, paths,
                data URLs, Pillow images or arrays, and maybe `image_sizes`, a list of their (width, height). Each
                image has a placeholder in its prompt, such as `<image>`. All are opened before anything runs; their
                pixels, at most about 5 MB each in the released model, stay in memory until the call returns.
            on_invalid: "raise": all prompts are checked before anything runs, and the first that cannot run is a
                ValueError. "report": the others run; its result is one output with finish reason and message, in
                string mode an empty string.
            strip_eos: string mode leaves out the text of the end-of-sequence token.

        Returns texts, or with `decode_sequence=False` for each prompt the list of its outputs, one per token; where a
        prompt's n is above 1, the list of n of these. A text ends before the stop text that ended it. What went wrong
        for a prompt is in `last_errors`.

        Raises ValueError if both prompt arguments are missing or differ in length, or if the list of sampling
        parameters or images has another length; TypeError for what is no list; before anything runs.
        """
        if on_invalid not in ("raise", "report"):
            raise ValueError(f'on_invalid must be "raise" or "report", got {on_invalid!r}')
        if isinstance(prompts, str):
            prompts = [prompts]
            multi_modal_data = None if multi_modal_data is None else [multi_modal_data]
        sources = _sources(prompts, prompt_token_ids)
        images = _images_per_prompt(multi_modal_data, len(sources))
        params = _params_per_prompt(sampling_params, len(sources), self.get_tokenizer().eos_token_id)
        if self.llm_engine.has_unfinished_requests():
            raise ValueError(
                "the engine has unfinished requests of add_request(); step() or abort them before generate()"
            )

        is_text = prompt_token_ids is None
        prepared = [
            self._prepare(source, is_text, own, data) for source, own, data in zip(sources, params, images, strict=True)
        ]
        _problems(prepared, on_invalid)  # first what is seen without opening an image
        prepared = self._open_images(prepared)
        problems = _problems(prepared, on_invalid)
        flat = iter(self._run([completion for one in prepared for completion in _completions(one)], use_tqdm))
        results = [[next(flat) for _ in range(one.params.n)] for one in prepared]

        messages = {i: [own[-1].message for own in outputs if own[-1].message] for i, outputs in enumerate(results)}
        self.last_errors = {i: found[0] for i, found in messages.items() if found} | problems
        if self.decode_sequence:
            decode = self.get_tokenizer().decode
            answers: list[list[Any]] = [
                [answer_text(own, decode, strip_eos=strip_eos) for own in outputs] for outputs in results
            ]
        else:
            answers = list(results)
        return [own if one.params.n > 1 else own[0] for one, own in zip(prepared, answers, strict=True)]

    def _prepare(self, source: Any, is_text: bool, params: SamplingParams, images: Any) -> Prepared | Refusal:
        try:
            ids = self._encode(source) if is_text else source
        except ValueError as error:
            return Refusal(str(error), INVALID_PROMPT, params)
        return prepare(ids, params, images, self.llm_engine.rules, several=True)

    def _open_images(self, prepared: list[Prepared | Refusal]) -> list[Prepared | Refusal]:
        """With the images of prompts that were not refused in place; completions of one prompt share them."""
        wanted = {
            i: (one, one.unopened)
            for i, one in enumerate(prepared)
            if isinstance(one, Prepared) and one.unopened is not None
        }
        opened = self.llm_engine.images.open_all((one.token_ids, unopened) for one, unopened in wanted.values())
        changed = {
            i: with_opened_images(one, prompt, self.llm_engine.rules)
            for (i, (one, _)), prompt in zip(wanted.items(), opened, strict=True)
        }
        return [changed.get(i, one) for i, one in enumerate(prepared)]

    def _encode(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt must be a string, got {type(prompt).__name__}; pass ids as prompt_token_ids")
        return encode_text(self.get_tokenizer(), prompt)

    def _run(self, prepared: list[Prepared | Refusal], use_tqdm: bool) -> list[list[RequestOutput]]:
        """Runs the prompts that were not refused; the others get their one output."""
        first_id = self._request_counter
        self._request_counter += len(prepared)
        results: list[list[RequestOutput]] = [[] for _ in prepared]
        engine = self.llm_engine
        try:
            for position, one in enumerate(prepared):
                request_id = str(first_id + position)
                if isinstance(one, Refusal):
                    results[position] = [_refused(request_id, one, engine)]
                else:
                    engine.add_prepared(_USER_ID, request_id, one)
            with tqdm(total=len(prepared), desc="Processed prompts", disable=not use_tqdm) as bar:
                bar.update(sum(isinstance(one, Refusal) for one in prepared))
                while True:
                    unfinished = engine.has_unfinished_requests()
                    for output in engine.step() if unfinished else engine.flush_inflight_reqs():
                        results[int(output.request_id) - first_id].append(output)
                        bar.update(output.finished)
                    if not unfinished:
                        return results
        except BaseException:
            # Nothing of this call is left behind for the next one.
            engine.abort_request([str(first_id + position) for position in range(len(prepared))])
            engine.step()
            raise


def _problems(prepared: list[Prepared | Refusal], on_invalid: str) -> dict[int, str]:
    """What is wrong, by position in the prompt list; with "raise" the first of it is raised."""
    problems = {i: f"prompt {i}: {one.sentence}" for i, one in enumerate(prepared) if isinstance(one, Refusal)}
    if problems and on_invalid == "raise":
        raise ValueError(next(iter(problems.values())))
    return problems


def _completions(one: Prepared | Refusal) -> list[Prepared | Refusal]:
    """The requests that a prompt is, one for each completion."""
    if one.params.n == 1:
        return [one]
    return [
        dataclasses.replace(one, params=dataclasses.replace(one.params, n=1, seq_seed=_seed_of(one.params, number)))
        for number in range(one.params.n)
    ]


def _seed_of(params: SamplingParams, number: int) -> int | None:
    """The seed of a completion: that of the parameters for the first, unrelated ones for the others."""
    if params.seq_seed is None or number == 0:
        return params.seq_seed
    words = params.seq_seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def _sources(prompts: Iterable[str] | None, prompt_token_ids: Iterable[Any] | None) -> list[Any]:
    """What is run: the token ids if there are any, else the texts."""
    if prompts is None and prompt_token_ids is None:
        raise ValueError("Either prompts or prompt_token_ids must be provided.")
    texts = None if prompts is None else _listed("prompts", prompts)
    if prompt_token_ids is None:
        return texts or []
    ids = _listed("prompt_token_ids", prompt_token_ids)
    if ids and all(isinstance(entry, int | np.integer) or getattr(entry, "shape", None) == () for entry in ids):
        raise ValueError("prompt_token_ids must hold one list of ids per prompt; wrap a single one: [[...]]")
    if texts is not None and len(texts) != len(ids):
        raise ValueError(f"prompts and prompt_token_ids must have the same length, got {len(texts)} and {len(ids)}")
    return ids


def _images_per_prompt(multi_modal_data: Any, count: int) -> list[Any]:
    if multi_modal_data is None:
        return [None] * count
    if isinstance(multi_modal_data, Mapping):
        raise TypeError("multi_modal_data must be a list with one entry per prompt, got a dict; wrap it: [{...}]")
    given = _listed("multi_modal_data", multi_modal_data)
    if len(given) != count:
        raise ValueError(f"multi_modal_data holds {len(given)} entries for {count} prompts; give one per prompt")
    return given


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} must be a list with one entry per prompt, got {type(values).__name__}") from None


def _params_per_prompt(
    sampling_params: SamplingParams | Iterable[SamplingParams] | None, count: int, eos_id: int
) -> list[SamplingParams]:
    """Checked copies: what a prompt is refused for must not depend on the prompts before it."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [copy_params(sampling_params, eos_id)] * count
    given = _listed("sampling_params", sampling_params)
    if len(given) != count:
        raise ValueError(
            f"sampling_params holds {len(given)} entries for {count} prompts; give one per prompt, or one "
            "object for all"
        )
    for position, one in enumerate(given):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params[{position}] must be SamplingParams, got {one!r}")
    return [copy_params(one, eos_id) for one in given]


def _refused(request_id: str, refusal: Refusal, engine: LLMEngine) -> RequestOutput:
    ids = refusal.token_ids
    return RequestOutput(
        request_id=request_id,
        prompt_len=len(ids),
        token_id=int(ids[-1]) if len(ids) else -1,
        finish_reason=refusal.finish_reason,
        finished=True,
        max_num_batched_tokens=engine.limits.max_num_batched_tokens,
        message=refusal.sentence,
    )
