"""`outrider bench`: measurements on the user's own checkpoint and prompts."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from outrider.bundled import BUNDLED_SUITES
from outrider.config import (
    LEAST_DRAFTED_TOKENS,
    REJECTION_SAMPLE_METHODS,
    DraftSampleMethod,
    EngineConfig,
    RejectionSamplerConfig,
)
from outrider.entrypoints.cli.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    OFFLINE_MAX_NUM_SEQS,
    Options,
    parse_k_list,
    speculative_options,
    takes_engine_options,
)
from outrider.entrypoints.cli.prompt_sources import (
    PROMPTS_HELP,
    PromptInput,
    read_prompts_file,
)
from outrider.entrypoints.cli.run import make_group
from outrider.errors import ConfigError, RequestError, shown
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.entrypoints.acceptance import AcceptanceSample
    from outrider.entrypoints.acceptance_sweep import AcceptanceSweep, SweepResult, Way

_K = Annotated[
    str | None,
    typer.Option(
        "-k",
        metavar="LIST",
        help="Drafts per step: 3, or 1,2,4, or 1-5.",
        show_default=str(DEFAULT_NUM_SPECULATIVE_TOKENS),
    ),
]
_Temperature = Annotated[str, typer.Option(metavar="LIST", help="Temperatures; 0 is greedy.")]
_Suite = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Bundled sets of held-out prompts.",
        show_default=",".join(BUNDLED_SUITES),
    ),
]
_PromptsFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help=f"In place of --suite. {PROMPTS_HELP}"),
]
_NumPrompts = Annotated[
    int | None, typer.Option(metavar="N", help="Prompts of each suite, spread over it; else all.")
]
_Rule = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Rules at temperature > 0.",
        show_default=",".join(REJECTION_SAMPLE_METHODS),
    ),
]
_DraftSampleMethod = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="How drafts are drawn: probabilistic samples them, greedy takes the likeliest.",
        show_default=",".join(get_args(DraftSampleMethod)),
    ),
]
_MaxTokens = Annotated[int, typer.Option(metavar="N", help="Tokens per prompt.")]
_Seed = Annotated[
    int, typer.Option(metavar="N", help="Of the first prompt; each further one has one more.")
]
_Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a picture as well.")]
_IsJson = Annotated[
    bool, typer.Option("--json", help="Print the line of JSON alone, without the table.")
]

bench = make_group("bench", "Measure a checkpoint.")


@bench.command()
@takes_engine_options(max_num_seqs=OFFLINE_MAX_NUM_SEQS, enable_prefix_caching=False)
def acceptance(
    *,
    k: _K = None,
    temperature: _Temperature = "0,0.7,1",
    suite: _Suite = None,
    prompts_file: _PromptsFile = None,
    num_prompts: _NumPrompts = None,
    rule: _Rule = None,
    draft_sample_method: _DraftSampleMethod = None,
    max_tokens: _MaxTokens = 128,
    seed: _Seed = 0,
    plot: _Plot = None,
    is_json: _IsJson = False,
    engine_options: Options,
) -> int:
    """Measure how many drafts are accepted: mean acceptance length, and rates by position.

    With 95 % intervals over prompts, for every K, temperature, rule and way of drafting. The last
    line of the output is JSON. At temperature 0 all rules and drafts are one, and so are block and
    standard with one-hot drafts: they are decoded once and have equal rows.

    A window is what a request emits in a step with drafts. A token is repeated if the 8-gram of
    generated tokens that ends at it has ended within the 64 before; windows without such a token
    are fresh, and their length stands beside that of all.

    No prompt finds what another one left, unless --enable-prefix-caching is given.
    """
    temperatures = _parse_temperatures(temperature)
    inputs = _read_suites(suite, prompts_file, num_prompts)
    _check_numbers(max_tokens, seed)
    drafting = _Drafting.read(k, rule, draft_sample_method, engine_options)
    if plot is not None:
        from outrider.entrypoints.acceptance_plot import check_plot_path

        check_plot_path(plot)
    from outrider.entrypoints.acceptance_sweep import AcceptanceSweep
    from outrider.entrypoints.llm import LLM

    engine_options.setdefault("max_num_seqs", OFFLINE_MAX_NUM_SEQS)
    # Every row of the table runs all of its prompts, whatever came before it.
    engine_options.setdefault("enable_prefix_caching", False)
    llm = LLM(speculative_config=drafting.speculative, **engine_options)
    sweep = AcceptanceSweep(
        llm,
        suites={name: llm.encode_prompts(listed) for name, listed in inputs.items()},
        ks=drafting.ks,
        temperatures=temperatures,
        draft_sample_methods=drafting.draft_sample_methods,
        rules=drafting.rules,
        max_tokens=max_tokens,
        seed=seed,
    )
    with _progress(sweep, is_json):
        result = sweep.run()
    _report(sweep, result, plot, is_json)
    return 0


@dataclass(frozen=True)
class _Drafting:
    """What is compared: numbers of drafts, ways to draw them, and rules to judge them by."""

    ks: list[int]
    draft_sample_methods: list[str]
    rules: list[str]
    speculative: Options

    @classmethod
    def read(
        cls, k: str | None, rule: str | None, method: str | None, engine_options: Options
    ) -> "_Drafting":
        """From flags that are lists, and --speculative-config, which is taken out of the options.

        Where a flag is missing and the options of the engine name one choice, it is that one.
        """
        ks = None if k is None else parse_k_list(k)
        text = engine_options.pop("speculative_config", None)
        options = speculative_options(None if ks is None else max(ks), text)
        if options is None:
            options = {"num_speculative_tokens": DEFAULT_NUM_SPECULATIVE_TOKENS}
        config = EngineConfig.from_kwargs(speculative_config=options, **engine_options)
        speculative = config.speculative
        assert speculative is not None, "there are options"
        rules, methods = [*REJECTION_SAMPLE_METHODS], [*get_args(DraftSampleMethod)]
        if rule is not None:
            rules = _parse_names("--rule", rule, rules)
        elif (speculative.rejection_sample_method, config.rejection_sampler) != (
            None,
            RejectionSamplerConfig(),
        ):
            rules = [config.rejection_sample_method]
        if method is not None:
            methods = _parse_names("--draft-sample-method", method, methods)
        elif "draft_sample_method" in options or speculative.method == "ngram":
            methods = [str(speculative.draft_sample_method)]
        for one in methods:
            # What the method of drafting does not know is told before a checkpoint is loaded.
            replace(speculative, draft_sample_method=one)
        first = {**options, "draft_sample_method": methods[0]}
        return cls(ks or [speculative.num_speculative_tokens], methods, rules, first)


def _check_numbers(max_tokens: int, seed: int) -> None:
    if max_tokens < LEAST_DRAFTED_TOKENS:
        raise RequestError(
            f"--max-tokens must be {LEAST_DRAFTED_TOKENS} or more for a draft to fit, "
            f"got {max_tokens}"
        )
    if seed < 0:
        raise RequestError(f"--seed must be 0 or more, got {seed}")


def _parse_names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} must be some of {', '.join(known)}, got {shown(name)}")
    return [*dict.fromkeys(names)]


def _parse_temperatures(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--temperature must be numbers such as 0,0.7,1, got {shown(text)}"
        ) from None
    return [*dict.fromkeys(SamplingParams(temperature=one).temperature for one in numbers)]


def _read_suites(
    suite: str | None, prompts_file: Path | None, num_prompts: int | None
) -> dict[str, list[PromptInput]]:
    if num_prompts is not None and num_prompts < 1:
        raise RequestError(f"--num-prompts must be an integer 1 or more, got {num_prompts}")
    if prompts_file is None:
        known = [*BUNDLED_SUITES]
        names = known if suite is None else _parse_names("--suite", suite, known)
        files = {name: BUNDLED_SUITES[name] for name in names}
    elif suite is None:
        files = {prompts_file.stem: prompts_file}
    else:
        raise RequestError("give prompts as --suite or as --prompts, not both")
    suites = {name: read_prompts_file(path) for name, path in files.items()}
    if num_prompts is None:
        return suites
    from outrider.training.prompts import spread_evenly

    return {name: spread_evenly(prompts, num_prompts) for name, prompts in suites.items()}


@contextmanager
def _progress(sweep: "AcceptanceSweep", is_json: bool) -> Iterator[None]:
    """Shows on stderr how far a sweep has come: a bar on a terminal, else a line for each way."""
    if not sys.stderr.isatty():
        if not is_json:
            sweep.on_sample = _show_sample
        yield
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("Texts", total=sweep.num_texts)
        sweep.on_finish = lambda _: bar.advance(task)
        yield


def _show_sample(way: "Way", sample: "AcceptanceSample") -> None:
    how = "" if way.is_greedy else f", {way.draft_sample_method} drafts, {way.rule}"
    sys.stderr.write(
        f"{way.suite}, K = {way.k}, temperature {way.temperature:g}{how}: "
        f"{sample.length.value:.2f}\n"
    )


def _report(
    sweep: "AcceptanceSweep", result: "SweepResult", plot: Path | None, is_json: bool
) -> None:
    """The table, the line of JSON and the picture."""
    from outrider import __version__

    config = sweep.llm.llm_engine.config
    if not is_json:
        from outrider.entrypoints.cli.acceptance_table import show_acceptance

        show_acceptance(
            result, f"95 % intervals over prompts; {sweep.max_tokens} tokens each, {config.dtype}"
        )
    report: dict[str, Any] = {
        "rows": [asdict(row) for row in result.rows],
        "intervals": [asdict(one) for one in result.intervals],
        "gains": [asdict(gain) for gain in result.gains],
        "settings": {
            "model": config.model or "bundled",
            "max_tokens": sweep.max_tokens,
            "seed": sweep.seed,
            "dtype": config.dtype,
            "device": config.device,
            "version": __version__,
        },
    }
    typer.echo(json.dumps(report))
    # Last: what was measured is told, whatever becomes of the picture.
    if plot is not None:
        from outrider.entrypoints.acceptance_plot import plot_acceptance

        plot_acceptance(result.rows, plot)
