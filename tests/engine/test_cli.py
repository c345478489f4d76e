"""The command line: text on stdout, everything else on stderr, errors as one sentence with a status."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from deepinfer_jax import embedded
from deepinfer_jax.cli.main import app
from deepinfer_jax.cli.plan_report import parse_bytes
from deepinfer_jax.engine.environ import TABLE, rearm, user_cache_dir
from tests.support.paths import GOLDEN_B, RELEASED_CONFIG
from tests.support.toy import greedy_twin, make_table, toy_parts
from tests.support.toy_images import expanded, image_parts, toy_image

pytestmark = pytest.mark.real

TOY_MODEL = ["generate", "--model", "toy", "--temperature", "0", "--max-tokens", "4"]


def invoke(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr


def answer(prompt: str) -> str:
    return "".join(chr(48 + token) for token in greedy_twin(make_table(), [ord(c) - 48 for c in prompt], 4))


@pytest.mark.usefixtures("toy_model")
def test_prompts_from_options_a_file_and_stdin_give_the_same_text(tmp_path: Path) -> None:
    expected = f"AB{answer('AB')}\nCDE{answer('CDE')}\n"
    file = tmp_path / "prompts.txt"
    file.write_text("AB\n\nCDE\n")
    assert invoke(*TOY_MODEL, "--prompt", "AB", "--prompt", "CDE") == (0, expected, "")
    assert invoke(*TOY_MODEL, "--file", str(file)) == (0, expected, "")
    assert invoke(*TOY_MODEL, stdin="AB\nCDE\n") == (0, expected, "")


@pytest.mark.usefixtures("toy_model")
def test_only_a_line_end_ends_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.toy.ToyTokenizer.encode", lambda _, text: [5 + len(text)])
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffA\fB\u2028C\r\nD\n".encode())
    _, out, _ = invoke(*TOY_MODEL, "--json", "--file", str(file))
    assert [json.loads(line)["prompt"] for line in out.split("\n") if line] == ["A\fB\u2028C", "D"]


@pytest.mark.usefixtures("toy_model")
def test_json_is_one_object_per_prompt() -> None:
    status, out, _ = invoke(*TOY_MODEL, "--json", "--prompt", "AB", "--prompt", "CDE")
    first, second = map(json.loads, out.splitlines())
    assert (status, first["prompt"], first["text"], second["text"]) == (0, "AB", answer("AB"), answer("CDE"))
    assert first["token_ids"] == [ord(c) - 48 for c in answer("AB")]
    assert (first["finish_reason"], len(first["token_logprobs"])) == ("length", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_calibrate_prints_temperatures_that_the_engine_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(chr(60 + i) * 3 for i in range(20)))
    command = ["calibrate", "--model", "toy", "--file", str(file), "--max-tokens", "30", "--temperature", "0"]
    status, out, err = invoke(*command)
    assert (status, out) == (1, "") and "drafts nothing" in err
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "2")
    rearm()
    status, out, _ = invoke(*command)
    assert status == 0
    lines = out.splitlines()
    judged = [int(line.split()[1]) for line in lines[1:3]]
    shares = [float(line.split()[2]) for line in lines[1:3]]
    # Every block's first draft is judged, its second one if the first was accepted.
    assert judged[0] > 150 and judged[1] == pytest.approx(judged[0] * shares[0], abs=21)
    assert all(0.5 < share < 1 for share in shares)
    monkeypatch.setenv("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", lines[-1])
    rearm()
    again = invoke(*command)[1].splitlines()
    # The logits behind the scores are the same, whatever the temperature.
    assert [line.split()[3] for line in again[1:3]] == lines[-1].split(",")
    monkeypatch.undo()
    rearm()


def test_images_take_the_placeholders_of_every_prompt_or_stand_in_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", image_parts)
    Image.fromarray(toy_image()).save(tmp_path / "a.png")
    Image.fromarray(toy_image((8, 4))).save(tmp_path / "b.png")
    files = ["--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "b.png")]
    status, out, err = invoke(*TOY_MODEL, *files, "--prompt", "A<image>B<image>", "--prompt", "AB")
    wide = expanded((8, 4))
    wanted = [greedy_twin(make_table(), ids, 4) for ids in ([17, *expanded(), 18, *wide], [*expanded(), *wide, 17, 18])]
    texts = ["".join(chr(48 + token) for token in ids) for ids in wanted]
    assert (status, out, err) == (0, f"A<image>B<image>{texts[0]}\nAB{texts[1]}\n", "")
    status, out, err = invoke(*TOY_MODEL, *files, "--prompt", "A<image>")
    assert (status, out) == (1, "") and "1 runs of image tokens" in err and "2 images came with it" in err
    status, out, err = invoke(*TOY_MODEL, "--image", str(tmp_path / "none.png"), "--prompt", "A")
    assert (status, out) == (1, "") and "none.png" in err and err.count("\n") == 1
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", toy_parts)
    status, out, err = invoke(*TOY_MODEL, *files, "--prompt", "A")
    assert (status, out) == (1, "") and "no vision tower" in err


@pytest.mark.usefixtures("toy_model")
def test_a_seed_repeats_and_equal_prompts_differ() -> None:
    command = ["generate", "--model", "toy", "--prompt", "AB", "--prompt", "AB", "--max-tokens", "9", "--seed", "5"]
    status, out, _ = invoke(*command)
    assert (status, out) == (0, invoke(*command)[1])
    assert out.splitlines()[0] != out.splitlines()[1]


@pytest.mark.usefixtures("toy_model")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "A!"], "'!' is not in this alphabet"),
        (["--prompt", ""], "prompt must not be empty"),
        (["--prompt", "A", "--temperature", "nan"], "temperature must be a finite number"),
        (["--prompt", "A", "--max-tokens", "-3"], "max_tokens must be"),
        (["--prompt", "A", "--precision", "fp64"], "precision must be one of"),
        (["--prompt", "A" * 41], "41 tokens, the limit is 40"),
        (["--prompt", "A", "--file", "x"], "not both"),
        (["--file", "/no/such/file"], "/no/such/file"),
        ([], "holds no prompt"),
    ],
)
def test_bad_input_is_one_sentence_and_status_1(arguments: list[str], sentence: str) -> None:
    status, out, err = invoke("generate", "--model", "toy", *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ") and sentence in err


def test_a_missing_model_and_an_unknown_option_are_told_apart(tmp_path: Path) -> None:
    status, out, err = invoke("generate", "--model", str(tmp_path / "none"), "--prompt", "A")
    assert (status, out) == (1, "")
    assert "none" in err and "Traceback" not in err
    assert invoke("generate", "--modle", "x")[0] == 2


def test_make_tiny_and_check_work_on_a_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "tiny")
    status, out, err = invoke("make-tiny", folder, "--seed", "3")
    assert (status, out) == (0, "")
    assert "random weights, seed 3" in err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))
    assert invoke("check", folder)[0] == 0
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    assert invoke("check", folder)[0] == 1


@pytest.fixture
def released(tmp_path: Path) -> str:
    """A folder that holds the released config.json and nothing else."""
    shutil.copy(RELEASED_CONFIG, tmp_path / "config.json")
    return str(tmp_path)


def test_plan_tells_bytes_per_device_from_a_config_alone(released: str) -> None:
    status, out, err = invoke("plan", released, "--devices", "8", "--memory", "141GB", "--context", "131072")
    assert (status, err) == (0, "")
    assert "checkpoint: 510,286,023,000 bytes of tensors" in out
    assert "devices: 8 (data 1 x expert 8), 141 GB each, of which 127 GB may be used" in out
    assert "890 bytes per token, 113,920 per block of 128 tokens" in out
    sizes = {
        name: int(size.replace(",", "")) for name, size in re.findall(r"^(\S.*?) {2,}([\d,]+)  .* \w*B$", out, re.M)
    }
    assert sizes["routed experts"] == 288_777_830_400 // 8
    assert sizes.pop("total") == sum(sizes.values())


def test_plan_as_json_is_the_same_plan(released: str) -> None:
    command = ["plan", released, "--devices", "8", "--data", "2", "--memory", "80 GiB", "--max-num-seqs", "9"]
    status, out, _ = invoke(*command, "--context", "4096", "--json")
    plan = json.loads(out)
    assert (status, plan["memory"], plan["budget"]) == (1, 80 << 30, int(0.9 * (80 << 30)))
    assert (plan["data_parallel_size"], plan["expert_parallel_size"], plan["num_slots"]) == (2, 4, 5)
    assert plan["bytes_per_token"] == 890 and plan["total"] == sum(plan["parts"].values())
    assert plan["problem"].startswith("the weights take 108 GB on each of 8 device(s), but each has 77.3 GB")


def test_plan_for_this_machine_needs_no_sizes() -> None:
    status, out, _ = invoke("plan", str(GOLDEN_B), "--json")
    plan = json.loads(out)
    assert (status, plan["problem"]) == (0, "")
    assert plan["parts"]["text weights"] > 2 * plan["checkpoint_bytes"] / 10  # decoded to float32 on a CPU
    assert list(plan["concurrency"].values())[-1] == 256


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory", "141G"], "'141G' is not a size"),
        (["--memory", "0GB"], "'0GB' is not a size"),
        (["--devices", "6", "--data", "4"], "--devices 6 must be a multiple of --data 4"),
        (["--devices", "3", "--memory", "141GB"], "embed.weight: axis 0 (vocab) has 129280 entries"),
        (["--devices", "8", "--memory", "141GB", "--compile"], "--compile measures the programs of one cpu device"),
        (["--precision", "fp64"], "precision must be one of"),
        (["--platform", "npu"], "platform must be one of gpu, tpu, cpu, got 'npu'"),
        (["--context", "0"], "max_model_len must be an integer of at least 1"),
        (["--tokens-per-block", "3"], "tokens_per_block must be a multiple of 2"),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence(arguments: list[str], sentence: str, released: str) -> None:
    status, out, err = invoke("plan", released, *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ") and sentence in err


def test_a_plan_that_does_not_fit_is_printed_with_the_reason(released: str) -> None:
    status, out, err = invoke("plan", released, "--memory", "141GB")
    assert status == 1 and "routed experts" in out
    assert err.startswith(
        "error: the weights take 510 GB on each of 1 device(s), but each has 127 GB (0.9 of 141 GB); "
    )
    assert err.endswith("devices can (data 1 x expert 5)\n")
    assert invoke("plan", str(Path(released) / "none"))[2].startswith("error: ")


@pytest.mark.parametrize(
    ("text", "size"),
    [("141GB", 141 * 10**9), ("80GiB", 80 << 30), (" 1.5 tb ", 15 * 10**11), ("1000", 1000), ("2kib", 2048), ("7B", 7)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_env_prints_every_variable_and_marks_those_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "7")
    monkeypatch.delenv("DEEPINFER_GLOO_TIMEOUT", raising=False)
    status, out, err = invoke("env")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1 + len(TABLE)
    lines = {line[3:].split()[0]: line for line in out.splitlines()[1:]}
    assert list(lines) == [row.name for row in TABLE]
    marked = lines["DEEPINFER_LOGGING_INTERVAL_STEP"].split()[:5]
    assert marked == ["*", "DEEPINFER_LOGGING_INTERVAL_STEP", "integer", "100", "7"]
    assert lines["DEEPINFER_GLOO_TIMEOUT"].startswith("   ") and "not on XLA" in lines["DEEPINFER_GLOO_TIMEOUT"]

    rows = {row["name"]: row for row in json.loads(invoke("env", "--json")[1])}
    assert rows["DEEPINFER_LOGGING_INTERVAL_STEP"]["value"] == "7"
    assert rows["DEEPINFER_GLOO_TIMEOUT"]["value"] is None and rows["DEEPINFER_GLOO_TIMEOUT"]["default"] == 14400.0


def test_env_prints_the_table_even_with_a_value_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "often")
    monkeypatch.setenv("DEEPINFER_GLOO_TIMEOUT", "never")  # not read, so not judged
    status, out, err = invoke("env")
    assert (status, err) == (1, "error: DEEPINFER_LOGGING_INTERVAL_STEP is 'often'; expected an integer\n")
    assert len(out.splitlines()) == 1 + len(TABLE)


def test_env_warns_of_a_name_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIENT", "1")
    assert invoke("env")[0] == 0
    assert "no such variable; did you mean DEEPINFER_BATCH_INVARIANT?" in caplog.text


@pytest.mark.slow
def test_plan_compiles_the_programs_of_a_small_model(tmp_path: Path) -> None:
    """Within a factor of three: the formula knows neither fusion nor how buffers are shared."""
    assert invoke("make-tiny", str(tmp_path / "tiny"))[0] == 0
    command = ["plan", str(tmp_path / "tiny"), "--max-num-seqs", "32", "--json"]
    formula, compiled = (json.loads(invoke(*command, *more)[1]) for more in ([], ["--compile"]))
    ratio = compiled["parts"].pop("temporaries") / formula["parts"].pop("temporaries")
    assert 1 / 3 < ratio < 3
    assert compiled["parts"] == formula["parts"]


def test_the_embedded_model_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    made = []
    make_tiny = embedded.make_tiny

    def counted(folder: Path) -> None:
        made.append(folder)
        make_tiny(folder)

    monkeypatch.setattr(embedded, "make_tiny", counted)
    folder = embedded.embedded_model()
    assert embedded.embedded_model() == folder
    assert len(made) == 1
    assert list(user_cache_dir().iterdir()) == [folder]  # no half-made neighbour

    def breaks(folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "make_tiny", breaks)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(OSError, match="disk full"):
        embedded.embedded_model()
    assert list(user_cache_dir().iterdir()) == []


@pytest.mark.slow
def test_the_installed_command_generates_with_the_embedded_model() -> None:
    command = [str(Path(sys.executable).parent / "deepinfer-jax"), "generate", "--json", "--max-tokens", "5"]
    done = subprocess.run(
        [*command, "--seed", "1", "--prompt", "Once upon a time"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "weights are random" in done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["token_ids"]) <= 5 and answer["finish_reason"] in ("length", "stop")
    assert isinstance(answer["text"], str) and answer["text"]


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [str(Path(sys.executable).parent / "deepinfer-jax"), "check", str(GOLDEN_B)]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300)
    assert "Broken" not in done.stderr and "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_written_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    status, out, err = invoke("generate", "--prompt", "A")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "set XDG_CACHE_HOME" in err


def test_check_runs_tokenizer_code_only_when_told(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN_B, tmp_path / "model", ignore=shutil.ignore_patterns("*.npz"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["mine.Mine", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    trace = tmp_path / "ran"
    (folder / "mine.py").write_text(
        "import pathlib, transformers\n"
        f"pathlib.Path({str(trace)!r}).touch()\n"
        "class Mine(transformers.PreTrainedTokenizerFast): pass\n"
    )
    status, out, _ = invoke("check", str(folder))
    assert status == 1 and "trust_remote_code=True" in out
    assert not trace.exists()
    assert invoke("check", str(folder), "--trust-remote-code")[0] == 0
    assert trace.exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"native"', '"other"', "tokenizer_compatibility is 'other'"),
        ("DeepseekV41ForCausalLM", "LlamaForCausalLM", "architectures is ['LlamaForCausalLM']"),
        ('"fp4"', '"int4"', "expert_dtype is 'int4'"),
        ("{", "", "config.json"),
    ],
)
def test_a_model_folder_that_cannot_run_is_one_sentence(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    folder = shutil.copytree(embedded.embedded_model(), tmp_path / "model")
    config = folder / "config.json"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    status, out, err = invoke("generate", "--model", str(folder), "--prompt", "A")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert sentence in err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(embedded.embedded_model(), tmp_path / "model")
    (folder / name).unlink()
    status, out, err = invoke("generate", "--model", str(folder), "--prompt", "A")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert name in err


def test_a_tokenizer_without_an_end_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN_B, tmp_path / "model", ignore=shutil.ignore_patterns("*.npz", "*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    status, out, err = invoke("generate", "--model", str(folder), "--prompt", "A")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "names no eos_token" in err and "eos_token_id 1" in err
