"""The command line: `deepinfer-jax generate`, `calibrate`, `check`, `plan`, `env`, `make-tiny`.

Text goes to stdout, everything else to stderr. Errors are one sentence and exit status 1; wrong usage is 2.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_jax.engine.requests.outputs import RequestOutput, answer_ids, answer_text

_MAX_NUM_SEQS = 256  # more prompts than this take turns

_ModelOption = Annotated[Path | None, typer.Option(help="Model folder. Default: the embedded tiny model.")]
_FileOption = Annotated[Path | None, typer.Option(help="UTF-8 text, one prompt per line; '-' is stdin.")]
_PrecisionOption = Annotated[str, typer.Option(help="reference, bf16, float32 or float32_exact.")]
_TrustOption = Annotated[bool, typer.Option(help="Run tokenizer code of the model folder.")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="DeepSeek-V4.1-Flash on any XLA device.",
)


def main() -> None:
    """Entry point of the `deepinfer-jax` command."""
    # It advises to install PyTorch, and warns of a long text in other words than our refusal.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    app()


@app.command()
def generate(
    model: _ModelOption = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    file: _FileOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1 is off.")] = -1,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="File of a JSON Schema that the text must satisfy.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole text must match.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="An image of every prompt; may be given several times. They take the places of the prompt's "
            "placeholders (<image>) in order; a prompt without placeholders begins with them."
        ),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    precision: _PrecisionOption = "reference",
    trust_remote_code: _TrustOption = False,
) -> None:
    """Generates text. Prompts come from --prompt, --file, or lines of stdin."""
    with _errors_as_sentences():
        prompts = _read_prompts(prompt, file)

        # Imported here: `--help` and wrong usage need no jax.
        from deepinfer_jax.engine.llm import LLM
        from deepinfer_jax.engine.requests.sampling_params import SamplingParams

        so_args = _so_args(json_schema, regex)
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=max_tokens,
                so_args=so_args,
                seq_seed=None if seed is None else seed + index,  # equal prompts may differ, reproducibly
            )
            for index in range(len(prompts))
        ]
        llm = LLM(
            _model_or_embedded(model),
            trust_remote_code=trust_remote_code,
            decode_sequence=False,
            max_num_seqs=min(len(prompts), _MAX_NUM_SEQS),
            precision=precision,
        )
        progress = sys.stderr.isatty() and len(prompts) > 1
        asked, images = _with_images(prompts, image or [], llm.llm_engine.images.placeholder)
        results: list[list[RequestOutput]] = llm.generate(asked, params, use_tqdm=progress, multi_modal_data=images)
        for given, outputs in zip(prompts, results, strict=True):
            text = answer_text(outputs, llm.get_tokenizer().decode)
            typer.echo(_as_json(given, text, outputs) if json_lines else given + text)
        if llm.last_errors:
            raise ValueError("; ".join(llm.last_errors.values()))


@app.command()
def calibrate(
    model: _ModelOption = None,
    file: _FileOption = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; acceptance depends on it.")] = 1.0,
    precision: _PrecisionOption = "reference",
    trust_remote_code: _TrustOption = False,
) -> None:
    """Fits the temperatures of the draft model's confidence head to what became of its drafts.

    Prints a table, and last the value of DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE.
    """
    with _errors_as_sentences():
        prompts = _read_prompts(None, file)
        from deepinfer_jax.engine.drafts.calibration import draft_pairs, fit_temperatures, report
        from deepinfer_jax.engine.llm import LLM
        from deepinfer_jax.engine.requests.sampling_params import SamplingParams

        llm = LLM(
            _model_or_embedded(model),
            trust_remote_code=trust_remote_code,
            decode_sequence=False,
            max_num_seqs=min(len(prompts), _MAX_NUM_SEQS),
            precision=precision,
        )
        config = llm.llm_engine.limits
        if not config.num_drafts:
            raise ValueError("this engine drafts nothing: DEEPINFER_USE_NEXTN_DECODE is 0, or it has no draft layers")
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        results: list[list[RequestOutput]] = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        fits = fit_temperatures(*draft_pairs(results, config.confidence_temperatures))
        if not fits[0].judged:
            raise ValueError("no draft was verified; give longer --max-tokens")
        typer.echo(report(fits))


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    trust_remote_code: _TrustOption = False,
) -> None:
    """Prints the token contract of a model folder, one line per rule. Reads JSON, the tokenizer and the headers of
    tensor files."""
    with _errors_as_sentences():
        from deepinfer_jax.cli.check import run_check

        status = run_check(model, trust_remote_code)
    raise typer.Exit(status)


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="Model folder; config.json is enough.")],
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 1,
    data: Annotated[int, typer.Option(help="Of them, along the data axis; the rest shares the experts.")] = 1,
    memory: Annotated[str | None, typer.Option(help="Of a device, e.g. 141GB. Default: of this machine's.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="gpu, tpu or cpu. Default: gpu with --memory, else this machine's.")
    ] = None,
    utilization: Annotated[float, typer.Option(help="Share of the memory to use.")] = 0.9,
    context: Annotated[int | None, typer.Option(help="Most tokens of a sequence. Default: what fits.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most running sequences, on all devices.")] = 256,
    tokens_per_block: Annotated[int, typer.Option(help="Tokens of a cache block.")] = 128,
    precision: _PrecisionOption = "reference",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    compile_programs: Annotated[
        bool, typer.Option("--compile", help="Take temporaries from the compiled programs instead of a formula.")
    ] = False,
) -> None:
    """Prints the bytes of each part on each device, and what fits. Reads config.json only."""
    with _errors_as_sentences():
        from deepinfer_jax.cli.plan_report import parse_bytes, plan_engine, plan_json, plan_text
        from deepinfer_jax.engine.args import EngineArgs

        if devices < 1 or data < 1 or devices % data:
            raise ValueError(f"--devices {devices} must be a multiple of --data {data}, both at least 1")
        args = EngineArgs(
            model=str(model),
            data_parallel_size=data,
            expert_parallel_size=devices // data,
            gpu_memory_utilization=utilization,
            max_num_seqs=max_num_seqs,
            max_model_len=context,
            tokens_per_block=tokens_per_block,
            precision=precision,  # type: ignore[arg-type]  # checked there
        )
        planned = plan_engine(args, parse_bytes(memory) if memory else None, platform, compile_programs)
        typer.echo(json.dumps(plan_json(planned)) if as_json else plan_text(planned))
        if planned.problem:
            raise ValueError(planned.problem)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """Prints every environment variable with its default, its value and its meaning; warns of unknown ones."""
    with _errors_as_sentences():
        from deepinfer_jax.cli.environment_report import environment_errors, environment_json, environment_text
        from deepinfer_jax.engine.environ import warn_inapplicable

        typer.echo(json.dumps(environment_json()) if as_json else environment_text())
        warn_inapplicable()
        if errors := environment_errors():
            raise ValueError("; ".join(errors))


@app.command()
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    config: Annotated[Path | None, typer.Option(help="config.json of the model to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Writes a checkpoint with random weights in the released format."""
    with _errors_as_sentences():
        from deepinfer_jax.checkpoint import tiny

        tiny.make_tiny(out, config, seed)
        typer.echo(f"{out}: random weights, seed {seed}", err=True)


def _as_json(prompt: str, text: str, outputs: list[RequestOutput]) -> str:
    answer = {
        "prompt": prompt,
        "text": text,
        "token_ids": answer_ids(outputs, strip_eos=False),
        "token_logprobs": [output.token_logprobs for output in outputs if not output.message],
        "finish_reason": outputs[-1].finish_reason,
    }
    return json.dumps(answer, ensure_ascii=False)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file:
        raise ValueError("give either --prompt or --file, not both")
    if prompts:
        return prompts
    if file is None and sys.stdin.isatty():
        typer.echo("Prompts, one per line, then Ctrl-D:", err=True)
    try:
        raw = sys.stdin.buffer.read() if file is None or str(file) == "-" else file.read_bytes()
        text = raw.decode("utf-8-sig")  # whatever the locale says; without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file or 'stdin'} is not UTF-8 text: {error}") from None
    # Not splitlines: a form feed or U+2028 inside a prompt ends no line.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{file or 'stdin'} holds no prompt; give --prompt TEXT, or lines of text")
    return lines


def _with_images(
    prompts: list[str], images: list[Path], placeholder: str | None
) -> tuple[list[str], list[dict[str, Any] | None]]:
    """The prompts with a place for each image, and `multi_modal_data`. placeholder: None without a vision tower."""
    if not images:
        return prompts, [None] * len(prompts)
    if placeholder is None:
        raise ValueError("--image: the model has no vision tower, so a prompt takes no images")
    placed = [prompt if placeholder in prompt else placeholder * len(images) + prompt for prompt in prompts]
    return placed, [{"image_bytes": list(images)}] * len(prompts)


def _so_args(json_schema: Path | None, regex: str | None) -> dict[str, str] | None:
    """What --json-schema or --regex ask for, as `SamplingParams.so_args`."""
    if json_schema is not None and regex is not None:
        raise ValueError("give either --json-schema or --regex, not both")
    if regex is not None:
        return {"schema_type": "regex", "schema": regex}
    if json_schema is None:
        return None
    try:
        return {"schema_type": "json", "schema": json_schema.read_bytes().decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        raise ValueError(f"{json_schema} is not UTF-8 text: {error}") from None


def _model_or_embedded(model: Path | None) -> Path:
    if model is not None:
        return model
    from deepinfer_jax.embedded import embedded_model

    folder = embedded_model()
    typer.echo(f"Embedded model {folder}: its weights are random, so its text means nothing.", err=True)
    return folder


@contextlib.contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Turns the errors that a user can act on into one line and exit status 1; others keep their traceback."""
    try:
        yield
        sys.stdout.flush()  # here, so that what cannot be written is an error like others
    except BrokenPipeError:
        # The reader has what it wanted, e.g. `| head`: nothing to say, and nothing may be flushed into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    main()
