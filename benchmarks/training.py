"""Tokens per second of a training step, forward and backward, against transformers' own model.

Both models have the same weights and see the same windows, in one process. A round times each of
them once, in an order that turns from round to round, so that a machine that slows down slows all
alike; a first round warms up and counts for nothing. The optimiser is not timed.

    transformers   next-token loss of the trunk; attention is dense, since its indexer runs a Python
                   loop over tokens
    trunk          the same loss of the same trunk, here
    trunk + K      what `outrider train` computes: next-token loss, K depths of the MTP head on its
                   own feedback, router balance and the indexers' distillation

A ratio is the median of each round's ratio to the same round of transformers. Beside wall clock it
is taken over the processor time of the process, which other work on the machine disturbs less.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from rich.table import Table
from torch import Tensor, nn
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM as ReferenceForCausalLM,
)

from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.ops import native
from outrider.training import mtp_loss
from outrider.training.config import LossConfig
from outrider.training.memory import keep_freed_memory
from outrider.training.objective import Losses, joint_loss, predict
from outrider.training.workers import Workers

# Of a gradient of the two trunks, relative. Without a token whose router is undecided it is 1e-5;
# one that goes to another expert makes it 1e-2.
MAX_DEVIATION = 0.1

# Its grouped product of experts, the faster of its forms, takes rows of a multiple of 16 bytes.
_GROUPED_MULTIPLE = 4

app = make_app("benchmarks.training")


@dataclass
class Contender:
    """One way to compute a loss.

    Attributes:
        name: in the table.
        model: whose gradients are computed.
        backward: sets the gradients of a batch of windows and returns the loss.
        wall_s: of each round.
        cpu_s: of each round, user and system.
    """

    name: str
    model: nn.Module
    backward: Callable[[Tensor], Tensor]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def step(self, window: Tensor) -> float:
        """Forward and backward; returns the loss."""
        self.model.zero_grad(set_to_none=True)
        return self.backward(window).item()

    def timed_step(self, window: Tensor) -> None:
        """The same, adding one round."""
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        self.step(window)
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def to_dict(self, reference: "Contender", num_tokens: int) -> dict[str, Any]:
        """What goes into the JSON."""
        speeds = [num_tokens / seconds for seconds in self.wall_s]
        return {
            "name": self.name,
            "tokens_per_s": {"median": median(speeds), "min": min(speeds), "max": max(speeds)},
            "tokens_per_cpu_s": median(num_tokens / seconds for seconds in self.cpu_s),
            "ratio": _median_ratio(reference.wall_s, self.wall_s),
            "cpu_ratio": _median_ratio(reference.cpu_s, self.cpu_s),
        }


@app.command()
def training(
    *,
    model_dir: Annotated[
        Path, typer.Option("--model", metavar="DIR", help="Its config.json; weights are made anew.")
    ] = BUNDLED_MODEL_DIR,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Windows a step.")] = 2,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Rows of a window.")] = 512,
    depths: Annotated[int, typer.Option(metavar="K", min=1, help="Depths of the head.")] = 3,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of torch; its own choice if absent.")
    ] = None,
    num_workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="As the key `num_workers`.")
    ] = 1,
    compile_kernels: Annotated[
        bool, typer.Option("--compile/--no-compile", help="As the key `compile` of a run.")
    ] = True,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed rounds.")] = 5,
) -> int:
    """Measure the training step against transformers, in one process.

    The last line of the output is JSON, with where the numbers come from.
    """
    if batch_size % num_workers:
        raise ConfigError(f"--workers: {num_workers} cannot share {batch_size} windows evenly")
    if threads is not None:
        torch.set_num_threads(threads)
    if compile_kernels:
        native.enable()
    keep_freed_memory()
    config = Qwen4ExpConfig.from_pretrained(model_dir)
    if length > config.max_position_embeddings:
        raise ConfigError(f"--length: {length} is above {config.max_position_embeddings}")
    contenders = make_contenders(config, depths, Workers(num_workers))
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, length + mtp_loss.NUM_LOOKAHEAD_IDS)
    window = torch.randint(config.vocab_size, shape, generator=generator)
    deviation = check_same_step(*contenders[:2], window)
    results = _run_rounds(contenders, window, rounds)
    setting = f"{batch_size} windows of {length}, {torch.get_num_threads()} threads"
    _show(results, f"{setting}, {num_workers} workers")
    report = {
        "benchmark": "training",
        "batch_size": batch_size,
        "length": length,
        "depths": depths,
        "compile": compile_kernels,
        "num_workers": num_workers,
        "rounds": rounds,
        "num_parameters": sum(p.numel() for p in contenders[1].model.parameters()),
        "gradient_deviation": deviation,
        "results": results,
        "provenance": {
            **provenance("cpu", "float32"),
            "transformers": transformers.__version__,
        },
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0


def _run_rounds(contenders: list[Contender], window: Tensor, rounds: int) -> list[dict[str, Any]]:
    """A warm-up, then so many timed rounds; the first contender is what the rest is measured by."""
    for number in range(rounds + 1):
        turn = number % len(contenders)
        for one in contenders[turn:] + contenders[:turn]:
            if number:
                one.timed_step(window)
            else:
                one.step(window)
        sys.stderr.write(f"round {number} of {rounds}\n")
    num_tokens = mtp_loss.input_ids(window).numel()
    return [one.to_dict(contenders[0], num_tokens) for one in contenders]


def make_contenders(config: Qwen4ExpConfig, depths: int, workers: Workers) -> list[Contender]:
    """Transformers' trunk, ours, and ours with the head, all with the same fresh weights."""
    ours = Qwen4ExpForCausalLM(config, max(config.mtp_num_hidden_layers, 1))
    ours.init_weights(torch.Generator().manual_seed(0))
    reference = _reference_model(ours)
    losses = LossConfig(depth_weights=(1.0,) * depths)
    trunk_losses = LossConfig(router_balance_weight=0.0, index_weight=0.0)

    parameters = list(ours.parameters())

    def of_reference(window: Tensor) -> Tensor:
        logits = reference(mtp_loss.input_ids(window), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), mtp_loss.next_ids(window).flatten())
        loss.backward()
        return loss.detach()

    def trunk_losses_of(window: Tensor) -> Losses:
        predictions = predict(ours, window, 0, dense_attention=True)
        return joint_loss(predictions, window, trunk_losses, config.num_experts_per_tok)

    def all_losses_of(window: Tensor) -> Losses:
        predictions = predict(ours, window, depths, dense_attention=True, want_index_losses=True)
        return joint_loss(predictions, window, losses, config.num_experts_per_tok)

    def of_trunk(window: Tensor) -> Tensor:
        return workers.backward(parameters, trunk_losses_of, window).total

    def of_all(window: Tensor) -> Tensor:
        return workers.backward(parameters, all_losses_of, window).total

    return [
        Contender("transformers", reference, of_reference),
        Contender("trunk", ours, of_trunk),
        Contender(f"trunk + {depths}", ours, of_all),
    ]


def check_same_step(reference: Contender, ours: Contender, window: Tensor) -> float:
    """The largest relative difference of a gradient; the two trunks must do the same work.

    Raises:
        ConfigError: they do not, so that their times cannot be compared.
    """
    losses = reference.step(window), ours.step(window)
    expected = {name: p.grad for name, p in reference.model.named_parameters()}
    deviations = [abs(losses[0] - losses[1]) / abs(losses[0])]
    for name, parameter in ours.model.named_parameters():
        other = expected.get(name)
        if other is not None and parameter.grad is not None:
            scale = other.norm().clamp(min=1e-12)
            deviations.append(float((parameter.grad - other).norm() / scale))
    if not max(deviations) < MAX_DEVIATION:
        raise ConfigError(
            f"the two trunks differ by {max(deviations):.1e}, so their times cannot be compared"
        )
    return max(deviations)


class _EverythingSelected(nn.Module):
    """Stands in for transformers' indexer: no loop over tokens, attention stays dense."""

    def forward(self, _hidden: Tensor, _positions: object, mask: Tensor, _cache: object) -> Tensor:
        return torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)


def _reference_model(ours: Qwen4ExpForCausalLM) -> ReferenceForCausalLM:
    transformers.logging.set_verbosity_error()
    values = ours.config.to_hf_dict()
    del values["architectures"], values["model_type"]
    reference = ReferenceForCausalLM(Qwen4ExpTextConfig(**values))
    weights = {k: v for k, v in ours.state_dict().items() if not k.startswith("mtp.")}
    reference.load_state_dict(weights)
    widths = (ours.config.hidden_size, ours.config.moe_intermediate_size)
    if any(width % _GROUPED_MULTIPLE for width in widths):
        reference.set_experts_implementation("eager")
    for layer in reference.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.indexer = _EverythingSelected()
    return reference.train()


def _median_ratio(reference_s: list[float], own_s: list[float]) -> float:
    return median(theirs / own for theirs, own in zip(reference_s, own_s, strict=True))


def _show(results: list[dict[str, Any]], setting: str) -> None:
    table = Table(title=setting)
    for heading in ("", "tokens/s", "range", "ratio", "tokens/s of CPU time", "ratio of CPU time"):
        table.add_column(heading, justify="right")
    for one in results:
        speed = one["tokens_per_s"]
        table.add_row(
            one["name"],
            f"{speed['median']:.0f}",
            f"{speed['min']:.0f}-{speed['max']:.0f}",
            f"{one['ratio']:.2f}",
            f"{one['tokens_per_cpu_s']:.0f}",
            f"{one['cpu_ratio']:.2f}",
        )
    report_console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.training"))
