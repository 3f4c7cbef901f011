"""`outrider generate`: decode prompts, streaming the text."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.config import EngineConfig
from outrider.entrypoints.cli.options import (
    DraftsPerStep,
    Options,
    take_speculative_options,
    takes_engine_options,
    takes_sampling_options,
)
from outrider.entrypoints.cli.output_json import outputs_as_json
from outrider.entrypoints.cli.prompt_sources import PROMPTS_HELP, read_prompts
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.entrypoints.decode_run import DecodeStats
    from outrider.outputs import RequestOutput

# Unlike the Python API's: what a person at a terminal expects to see.
DEFAULTS = {"temperature": 0.0, "max_tokens": 128}


@takes_engine_options()
@takes_sampling_options(**DEFAULTS)
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Texts to continue; - (or a pipe) is stdin.",
            show_default=False,
        ),
    ] = None,
    *,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help=PROMPTS_HELP)
    ] = None,
    num_speculative_tokens: DraftsPerStep = None,
    is_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON with texts, token ids and figures."),
    ] = False,
    engine_options: Options,
    sampling_options: Options,
) -> int:
    """Continue prompts, with drafts from the checkpoint's own MTP head.

    The text of a single prompt is streamed; of several, or of several completions, each is printed
    under a heading. What is left open comes from the checkpoint's generation_config.json, but for
    temperature and max-tokens.
    """
    # What can be wrong without a checkpoint is told before one is loaded.
    _check_sampling_options(sampling_options, is_json)
    EngineConfig.from_kwargs(**engine_options)
    inputs = read_prompts(prompts or [], prompts_file)
    speculative = take_speculative_options(num_speculative_tokens, engine_options)
    from outrider.entrypoints.decode_run import DecodeRun
    from outrider.entrypoints.llm import LLM

    llm = LLM(speculative_config=speculative, **engine_options)
    params = replace(llm.get_default_sampling_params(), **{**DEFAULTS, **sampling_options})
    # A prompt given alone needs no index in an error.
    encoded = llm.encode_prompts(inputs[0] if len(inputs) == 1 else inputs)
    is_streaming = len(encoded) == 1 and params.n == 1 and not is_json
    run = DecodeRun(llm.llm_engine, on_text=_write_text if is_streaming else None)
    outputs = run.run(encoded, [params] * len(encoded))
    if is_json:
        listed = outputs_as_json(outputs, params.logprobs or 0, llm.get_tokenizer())
        _write(json.dumps({"outputs": listed, "stats": run.stats()}))
    else:
        _write("" if is_streaming else _sections(outputs))
        sys.stderr.write(_summary(run.stats(), sum(_num_tokens(one) for one in outputs)))
    return _exit_code(outputs)


def _check_sampling_options(options: Options, is_json: bool) -> None:
    SamplingParams(**{**DEFAULTS, **options})
    for name in ("logprobs", "prompt_logprobs"):
        if name in options and not is_json:
            raise RequestError(f"--{name.replace('_', '-')} is printed with --json alone: add it")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _write_text(_: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _sections(outputs: "list[RequestOutput]") -> str:
    return "\n".join(
        f"==> {number}{f'.{one.index + 1}' if len(output.outputs) > 1 else ''} <==\n{one.text}"
        for number, output in enumerate(outputs, 1)
        for one in output.outputs
    )


def _num_tokens(output: "RequestOutput") -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def _summary(stats: "DecodeStats", num_tokens: int) -> str:
    drafting = (
        f", mean acceptance length {stats['mean_acceptance_length']:.2f}, "
        f"acceptance rate {stats['acceptance_rate']:.1%}"
        if stats["num_drafts"]
        else ", no drafts"
    )
    return f"{num_tokens} tokens, {stats['decode_tokens_per_s']:.1f} tokens/s{drafting}\n"


def _exit_code(outputs: "list[RequestOutput]") -> int:
    broken = [
        str(number)
        for number, output in enumerate(outputs, 1)
        if any(one.finish_reason == "error" for one in output.outputs)
    ]
    if broken:
        sys.stderr.write(
            f"error: the model's probabilities were not finite for prompt {', '.join(broken)}\n"
        )
    return 1 if broken else 0
