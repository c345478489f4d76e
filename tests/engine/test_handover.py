"""A prompt computed by one engine is continued by another, token for token, in memory and through a file."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from deepinfer_jax import (
    EngineArgs,
    EngineType,
    LLMEngine,
    SamplingParams,
    SequenceState,
    load_config,
)
from deepinfer_jax.checkpoint.tiny import make_tiny
from deepinfer_jax.engine.handover.sequence_state import StateIdentity
from deepinfer_jax.tokenization import ImagePrompt, MultimodalProcessor, get_hf_tokenizer
from tests.support.engine_runs import drain, is_idle
from tests.support.paths import GOLDEN_A
from tests.support.real_model import MAX_POSITIONS
from tests.support.small_model import write_small_model

SIZES = {
    "precision": "float32_exact",
    "max_num_seqs": 4,
    "max_model_len": 160,
    "tokens_per_block": 16,
    "stop_preempted_request": False,
}
TEXT = np.random.default_rng(9).integers(3, 192, 160).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seq_seed=5, max_tokens=8, ignore_eos=True)
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("poisoned")]
both = pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(SAMPLED, id="sampled")]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("models") / "small", MAX_POSITIONS)


def small_image_prompt() -> ImagePrompt:
    """Golden A's, with two images of noise of different sizes."""
    config, tokenizer = load_config(GOLDEN_A), get_hf_tokenizer(GOLDEN_A)
    processor = MultimodalProcessor(
        config.vision, tokenizer, image_token_id=config.image_token_id, vocab_size=config.text.vocab_size
    )
    pixels = [np.random.default_rng(0).integers(256, size=size, dtype=np.uint8) for size in ((50, 60, 3), (40, 37, 3))]
    ids = [5, config.image_token_id, 6, 7, config.image_token_id]
    return processor.overwrite_prompt(ids, {"image_bytes": pixels})


def engine(folder: Path, engine_type: EngineType, **options: Any) -> LLMEngine:
    return LLMEngine(EngineArgs(model=folder, engine_type=engine_type, **SIZES | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[LLMEngine, LLMEngine, LLMEngine]]:
    """NORMAL, PROMPT, COMPLETION."""
    made = tuple(engine(folder, kind) for kind in (EngineType.NORMAL, EngineType.PROMPT, EngineType.COMPLETION))
    yield made  # type: ignore[misc]
    for one in made:
        one.close()


def unsplit(normal: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        normal.add_request("user", str(i), params, prompt)
    results = drain(normal)
    return [[output.token_id for output in results[str(i)]] for i in range(len(prompts))]


def split(
    prompt_engine: LLMEngine,
    completion_engine: LLMEngine,
    prompts: list[list[int]],
    params: SamplingParams,
    carry: Callable[[SequenceState], SequenceState] = lambda state: state,
) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        prompt_engine.add_request("user", str(i), params, prompt)
    first = drain(prompt_engine)
    assert sorted(first) == sorted(prompt_engine.computed_requests())
    for name in prompt_engine.computed_requests():
        assert [output.finished for output in first[name]] == [False]
        completion_engine.import_sequence(carry(prompt_engine.export_sequence(name)))
    assert is_idle(prompt_engine.stats())
    rest = drain(completion_engine)
    assert is_idle(completion_engine.stats())
    for name in first:
        assert [output.num_output_tokens for output in first[name] + rest[name]] == list(
            range(1, params.max_tokens + 1)
        )
    return [[output.token_id for output in first[str(i)] + rest[str(i)]] for i in range(len(prompts))]


@pytest.mark.slow
@both
def test_split_gives_the_tokens_of_one_engine_at_every_prompt_length(
    engines: tuple[LLMEngine, LLMEngine, LLMEngine], params: SamplingParams
) -> None:
    prompts = [TEXT[:length] for length in range(1, 41)]
    normal, prompt_engine, completion_engine = engines
    expected = unsplit(normal, prompts, params)
    found = []
    for start in range(0, 40, 4):  # a PROMPT engine holds what it computed: four slots
        found += split(prompt_engine, completion_engine, prompts[start : start + 4], params)
    assert found == expected


@both
def test_split_through_a_file_gives_the_tokens_of_one_engine(
    engines: tuple[LLMEngine, LLMEngine, LLMEngine], tmp_path: Path, params: SamplingParams
) -> None:
    def through_a_file(state: SequenceState) -> SequenceState:
        path = tmp_path / "sequence.safetensors"
        state.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        return SequenceState.load(path)

    normal, prompt_engine, completion_engine = engines
    prompts = [TEXT[:length] for length in (1, 16, 17, 143)]
    expected = unsplit(normal, prompts, params)
    assert split(prompt_engine, completion_engine, prompts, params, through_a_file) == expected


@pytest.mark.slow
def test_more_sequences_than_slots_and_blocks_are_imported_and_preempted(folder: Path) -> None:
    """They wait for a place in order of arrival; one that loses its place is computed again."""
    prompt_engine = engine(folder, EngineType.PROMPT, max_num_seqs=10)
    completion_engine = engine(folder, EngineType.COMPLETION, num_kv_blocks=10)
    normal = engine(folder, EngineType.NORMAL)
    params = SamplingParams(temperature=0.9, seq_seed=7, max_tokens=60, ignore_eos=True)
    prompts = [TEXT[i : i + 25 + i] for i in range(10)]
    assert split(prompt_engine, completion_engine, prompts, params) == unsplit(normal, prompts, params)
    assert completion_engine.stats()["num_preemptions"] > 0
    for one in (prompt_engine, completion_engine, normal):
        one.close()


def test_what_ends_with_its_first_token_is_not_handed_over(engines: tuple[LLMEngine, LLMEngine, LLMEngine]) -> None:
    _, prompt_engine, _ = engines
    prompt_engine.add_request("user", "short", SamplingParams(max_tokens=1), TEXT[:5])
    (output,) = drain(prompt_engine)["short"]
    assert (output.finished, output.finish_reason) == (True, "length")
    assert prompt_engine.computed_requests() == []
    with pytest.raises(ValueError, match="short is not a computed prompt"):
        prompt_engine.export_sequence("short")
    assert is_idle(prompt_engine.stats())


def test_a_computed_prompt_can_be_aborted(engines: tuple[LLMEngine, LLMEngine, LLMEngine]) -> None:
    _, prompt_engine, _ = engines
    prompt_engine.add_request("user", "gone", GREEDY, TEXT[:20])
    drain(prompt_engine)
    assert prompt_engine.abort_request("gone") == (1, 21)
    (output,) = drain(prompt_engine)["gone"]
    assert output.finish_reason == "abort"
    assert is_idle(prompt_engine.stats()) and prompt_engine.computed_requests() == []


def test_engines_say_what_they_do_not_do(engines: tuple[LLMEngine, LLMEngine, LLMEngine]) -> None:
    normal, prompt_engine, completion_engine = engines
    prompt_engine.add_request("user", "a", GREEDY, TEXT[:20])
    drain(prompt_engine)
    with pytest.raises(ValueError, match=r"NORMAL engine hands nothing over; .*PROMPT"):
        normal.export_sequence("a")
    with pytest.raises(ValueError, match=r"COMPLETION engine .* import_sequence"):
        completion_engine.add_request("user", "b", GREEDY, TEXT[:20])
    state = prompt_engine.export_sequence("a")
    for wrong in (normal, prompt_engine):
        with pytest.raises(ValueError, match="COMPLETION"):
            wrong.import_sequence(state)
    completion_engine.import_sequence(state)
    with pytest.raises(ValueError, match="request a is unfinished"):
        completion_engine.import_sequence(state)
    drain(completion_engine)


def test_images_of_a_prompt_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    prompt = small_image_prompt()
    state = SequenceState(
        identity=StateIdentity("config", "weights", "float32", 16, ("a kind",)),
        request_id="a",
        user_id="u",
        params={"max_tokens": 5},
        seed=1 << 63,
        prompt_token_ids=prompt.token_ids,
        output_token_ids=np.asarray([7], np.int32),
        num_tokens=len(prompt.token_ids),
        blocks=np.zeros((2, 3), np.uint8),
        slot=np.zeros(4, np.uint8),
        image_prompt=prompt,
    )
    state.save(tmp_path / "a.safetensors")
    loaded = SequenceState.load(tmp_path / "a.safetensors")
    found = loaded.image_prompt
    assert found is not None and (loaded.seed, loaded.nbytes) == (state.seed, state.nbytes)
    assert loaded.nbytes == 6 + 4 + sum(own.image.pixels.size for own in prompt.images)
    assert found.token_ids.tolist() == prompt.token_ids.tolist()
    assert found.mm_token_type.tolist() == prompt.mm_token_type.tolist()
    assert found.segments[::2] == prompt.segments[::2]
    for own, wanted in zip(found.images, prompt.images, strict=True):
        assert (own.width, own.height, own.start, own.stop) == (wanted.width, wanted.height, wanted.start, wanted.stop)
        assert (own.image.layout, own.image.digest) == (wanted.image.layout, wanted.image.digest)
        assert np.array_equal(own.image.pixels, wanted.image.pixels)
    dataclasses.replace(state, image_prompt=None).save(tmp_path / "text.safetensors")
    assert SequenceState.load(tmp_path / "text.safetensors").image_prompt is None


class TestRefusals:
    """Each says why, and loads nothing."""

    @pytest.fixture
    def file(self, engines: tuple[LLMEngine, LLMEngine, LLMEngine], tmp_path: Path) -> Path:
        engines[1].add_request("user", "a", GREEDY, TEXT[:40])
        drain(engines[1])
        path = tmp_path / "a.safetensors"
        engines[1].export_sequence("a").save(path)
        return path

    def test_a_file_cut_anywhere_is_refused(self, file: Path) -> None:
        contents = file.read_bytes()
        for length in [0, 1, 7, 8, 9, 100, len(contents) // 2, len(contents) - 1]:
            file.write_bytes(contents[:length])
            with pytest.raises(ValueError, match=r"a\.safetensors: not a complete file"):
                SequenceState.load(file)

    def test_a_file_with_any_byte_changed_is_refused(self, file: Path) -> None:
        contents = file.read_bytes()
        header = 8 + int.from_bytes(contents[:8], "little")
        with safe_open(file, "numpy") as reader:
            described = reader.metadata()["deepinfer_jax_sequence"]
        seed = contents.index(json.dumps(described).encode()[1:30]) + described.index('"seed"')
        for place in [header, (header + len(contents)) // 2, len(contents) - 1, seed + 12]:
            changed = bytearray(contents)
            changed[place] ^= 1
            file.write_bytes(bytes(changed))
            with pytest.raises(ValueError, match=r"a\.safetensors: (the file is damaged|not a complete file)"):
                SequenceState.load(file)

    def test_another_kind_of_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            SequenceState.load(tmp_path / "missing")
        (tmp_path / "text").write_text("This is no such file. " * 20)
        with pytest.raises(ValueError, match="text: not a complete file"):
            SequenceState.load(tmp_path / "text")
        save_file({"x": np.zeros(3)}, tmp_path / "weights.safetensors")
        with pytest.raises(ValueError, match=r"weights\.safetensors: a safetensors file, but not of a sequence"):
            SequenceState.load(tmp_path / "weights.safetensors")

    def test_another_version_of_the_format_is_refused(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deepinfer_jax.engine.handover.sequence_state.FORMAT_VERSION", 3)
        with pytest.raises(ValueError, match="written in version 2 of the format, this engine reads 3"):
            SequenceState.load(file)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"precision": "float32"}, "precision float32_exact, this engine computes in float32"),
            ({"tokens_per_block": 32}, "blocks of 16 tokens, this engine has 32"),
        ],
    )
    def test_a_state_of_another_engine_is_refused(
        self, file: Path, folder: Path, options: dict[str, Any], reason: str
    ) -> None:
        self._refused(engine(folder, EngineType.COMPLETION, **options), file, reason)

    @pytest.mark.slow
    def test_a_state_in_another_cache_format_is_refused(self, folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        packed = engine(folder, EngineType.PROMPT, precision="float32")
        packed.add_request("user", "a", GREEDY, TEXT[:40])
        drain(packed)
        packed.export_sequence("a").save(path)
        packed.close()
        unpacked = engine(folder, EngineType.COMPLETION, precision="float32", kv_cache_format="unpacked")
        self._refused(unpacked, path, "another layout of the cache: it holds entries.0.codes")

    @pytest.mark.slow
    def test_a_state_of_other_weights_or_another_configuration_is_refused(
        self, file: Path, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        make_tiny(tmp_path / "weights", folder / "config.json", seed=1)
        self._refused(engine(tmp_path / "weights", EngineType.COMPLETION), file, "other weights")
        config["text_config"]["routed_scaling_factor"] = 2.0
        changed = write_small_model(tmp_path / "config", MAX_POSITIONS)
        (changed / "config.json").write_text(json.dumps(config))
        self._refused(engine(changed, EngineType.COMPLETION), file, "another model configuration")

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"prompt_token_ids": np.zeros(160, np.int32), "num_tokens": 160}, "the state is not whole"),
            ({"num_tokens": 39}, "num_tokens 40, but it has .* and 39"),
            ({"blocks": np.zeros((2, 5), np.uint8)}, r"'blocks': \(3, \d+\).* but it has .*'blocks': \(2, 5\)"),
            ({"slot": np.zeros(3, np.uint8)}, r"but it has .*'slot': \(3,\)"),
            ({"output_token_ids": np.zeros(0, np.int32), "num_tokens": 39}, "40 prompt and 0 output tokens"),
            ({"params": {"max_tokens": 1}}, "nothing is left to generate: .* max_tokens is 1"),
            ({"image_prompt": small_image_prompt()}, "the state is not whole: its images belong to another prompt"),
        ],
        ids=["prompt", "num_tokens", "blocks", "slot", "output", "max_tokens", "images"],
    )
    def test_a_state_that_cannot_go_on_is_refused_and_those_that_run_go_on(
        self, engines: tuple[LLMEngine, LLMEngine, LLMEngine], file: Path, changed: dict[str, Any], reason: str
    ) -> None:
        state, completion_engine = SequenceState.load(file), engines[2]
        completion_engine.import_sequence(dataclasses.replace(state, request_id="runs"))
        completion_engine.step()
        with pytest.raises(ValueError, match=f"request a: .*{reason}"):
            completion_engine.import_sequence(dataclasses.replace(state, **changed))
        assert drain(completion_engine)["runs"][-1].finish_reason == "length"

    @pytest.mark.slow
    def test_a_prompt_that_fills_the_importing_engine_is_refused(self, folder: Path, file: Path) -> None:
        for max_model_len in (39, 40):
            shorter = engine(folder, EngineType.COMPLETION, max_model_len=max_model_len)
            self._refused(shorter, file, f"nothing is left to generate: .* max_model_len {max_model_len}")

    def _refused(self, other: LLMEngine, file: Path, reason: str) -> None:
        before = other.stats()
        with pytest.raises(ValueError, match=reason):
            other.import_sequence(SequenceState.load(file))
        assert other.stats() == before and not other.has_unfinished_requests()
        other.close()
