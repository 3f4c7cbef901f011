"""`outrider check`: the self-test a user runs on their own checkpoint and machine."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.bundled import BUNDLED_PROMPTS
from outrider.config import EngineConfig
from outrider.entrypoints.cli.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    Options,
    parse_k_list,
    speculative_options,
    takes_engine_options,
)
from outrider.entrypoints.cli.prompt_sources import PROMPTS_HELP, read_prompts_file
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.entrypoints.self_test import Difference, Report

EXIT_MISMATCH = 1
DEFAULT_NUM_PROMPTS = 100


@takes_engine_options()
def check(
    *,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help=PROMPTS_HELP, show_default="the bundled prompts"
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Only the first N prompts.",
            show_default=f"{DEFAULT_NUM_PROMPTS} of the bundled ones, all of a file",
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            metavar="LIST",
            help="Drafts per step: 3, or 1,2,4, or 1-8.",
            show_default=str(DEFAULT_NUM_SPECULATIVE_TOKENS),
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens decoded per prompt.")] = 48,
    is_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    engine_options: Options,
) -> int:
    """Compare decoding with drafts to decoding without, token for token.

    At temperature 0, and at temperature 1 under the rule coupled. Exits with 1 where a token
    differs, naming the first that does and the margin there. In float32 a difference counts as a
    near-tie, and not as a mismatch, if a choice at or before it was decided by less than 1e-4;
    more than 1 in 10,000 tokens are a failure all the same. In float64 every difference is one.
    """
    numbers, speculative = _read_drafting(k, engine_options)
    for name, value in (("--max-tokens", max_tokens), ("--num-prompts", num_prompts)):
        if value is not None and value < 1:
            raise RequestError(f"{name} must be an integer 1 or more, got {value}")
    inputs = read_prompts_file(BUNDLED_PROMPTS if prompts_file is None else prompts_file)
    if num_prompts is None and prompts_file is None:
        num_prompts = DEFAULT_NUM_PROMPTS

    from outrider.entrypoints.llm import LLM
    from outrider.entrypoints.self_test import SelfTest

    inputs = inputs[:num_prompts]
    llm = LLM(speculative_config=speculative, **engine_options)
    prompts = llm.encode_prompts(inputs)
    on_run = None if is_json or not sys.stderr.isatty() else _show_run
    report = SelfTest(llm.llm_engine, prompts, numbers, max_tokens, on_run).run()
    if is_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _show(report)
    return 0 if report.is_lossless else EXIT_MISMATCH


def _read_drafting(k: str | None, engine_options: Options) -> tuple[list[int], Options | None]:
    """The numbers of drafts, and how to draft, which is taken out of the options."""
    text = engine_options.pop("speculative_config", None)
    if k is None and text is None:
        k = str(DEFAULT_NUM_SPECULATIVE_TOKENS)
    if k is not None:
        numbers = parse_k_list(k)
        return numbers, speculative_options(max(numbers), text)
    speculative = speculative_options(None, text)
    config = EngineConfig.from_kwargs(speculative_config=speculative, **engine_options)
    return [config.num_speculative_tokens], speculative


def _show_run(rule: str, k: int) -> None:
    sys.stderr.write(f"decoding: rule {rule}, K = {k}\n")


def _show(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.num_prompts} prompts, K > 0 against K = 0, token for token")
    table.add_column("rule")
    for heading in ("K", "mismatches", "near-ties", "acceptance length", "acceptance rate"):
        table.add_column(heading, justify="right")
    for (rule, k), metrics in report.metrics.items():
        table.add_row(
            rule,
            str(k),
            *(str(_count(listed, rule, k)) for listed in (report.mismatches, report.near_ties)),
            f"{metrics.mean_acceptance_length:.2f}",
            f"{metrics.acceptance_rate:.1%}",
        )
    console = Console()
    console.print(table)
    for kind, listed in (("mismatch", report.mismatches), ("near-tie", report.near_ties)):
        for one in listed:
            console.print(
                f"{kind}: prompt {one.prompt}, token {one.position}, margin {one.margin:.1e}, "
                f"rule {one.rule}, K = {one.k}"
            )
    console.print(_verdict(report))


def _count(listed: "list[Difference]", rule: str, k: int) -> int:
    return sum((one.rule, one.k) == (rule, k) for one in listed)


def _verdict(report: "Report") -> str:
    compared = f"{report.num_tokens:,} tokens compared"
    if report.is_lossless:
        return f"lossless: {compared}, {len(report.near_ties)} near-ties"
    if report.mismatches:
        return f"NOT lossless: {compared}, {len(report.mismatches)} mismatches"
    return f"NOT lossless: {compared}, {len(report.near_ties)} near-ties are too many"
