"""Tunes a checkpoint's head to a workload: measure, write, tune, put the head in, measure again.

The model writes its own continuations of the prompts with the engine, drafts on, which changes
nothing of their law. `training/` gets them as token ids and knows of no engine.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.config import EngineConfig, HeadTuningConfig
from outrider.entrypoints.acceptance import sample_acceptance
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.llm import LLM
from outrider.errors import CheckpointError, ConfigError, RequestError
from outrider.models.qwen4_exp.checkpoint_files import weights_file
from outrider.models.qwen4_exp.weights import has_mtp, load_model
from outrider.ops import native
from outrider.sampling_params import SamplingParams
from outrider.training.config import LossConfig, OptimizerConfig
from outrider.training.head_file import (
    check_new_folder,
    check_same_trunk,
    head_dtype,
    save_head,
    stitch_head,
)
from outrider.training.head_tuner import (
    Continuation,
    HeadTuner,
    TuneConfig,
    TuneReport,
    TuneStep,
    depth_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.entrypoints.acceptance import AcceptanceRow, AcceptanceSample, Interval
    from outrider.entrypoints.prompt_encoder import EncodedPrompt, Prompt
    from outrider.entrypoints.ratio_estimate import RatioEstimate
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

REPORT_FILE = "tune_head.json"
HELD_OUT_SUITE = "held out"


@dataclass(frozen=True)
class AcceptanceChange:
    """What tuning has brought at one temperature, prompt against prompt.

    Attributes:
        before: on the held-out prompts.
        after: on the same.
        gain: of the mean acceptance length.
        gain_ci95: its 95 % interval over prompts; None of a single prompt.
        gain_fresh: of the length over fresh windows; None where there are none.
        gain_fresh_ci95: its interval.
    """

    before: AcceptanceRow
    after: AcceptanceRow
    gain: float
    gain_ci95: Interval | None
    gain_fresh: float | None
    gain_fresh_ci95: Interval | None


@dataclass(frozen=True)
class HeadTuningReport:
    """What came out.

    Attributes:
        num_prompts: tuned on.
        num_held_out: prompts measured on.
        num_texts: written.
        num_unchanged_tensors: of the trunk, embedding and lm_head: compared bit for bit with those
            of the checkpoint that was given.
        tuning: steps, tokens and losses.
        changes: one for each temperature.
    """

    num_prompts: int
    num_held_out: int
    num_texts: int
    num_unchanged_tensors: int
    tuning: TuneReport
    changes: list[AcceptanceChange]

    def to_dict(self) -> dict[str, Any]:
        """What goes into JSON."""
        return asdict(self)


@dataclass
class HeadTuning:
    """One run.

    Attributes:
        checkpoint: what is tuned; it is not changed.
        prompts: of whatever form the Python API takes.
        sources: what each prompt was cut from. No source is on both sides of the split.
        output_dir: missing or empty; gets a copy of the checkpoint with the tuned head. Made
            absolute, its links followed.
        plan: how.
        engine_options: as for `LLM`, with a `speculative_config` that drafts with the head.
        on_progress: told the phase, the part of it that is done, and its latest figures.
    """

    checkpoint: Path
    prompts: Sequence[Prompt]
    sources: Sequence[str]
    output_dir: Path
    plan: HeadTuningConfig
    engine_options: dict[str, Any]
    on_progress: Callable[[str, float, str], object] = lambda *_: None

    def __post_init__(self) -> None:
        """Checks what can be wrong before anything is loaded."""
        config = EngineConfig.from_kwargs(**self.engine_options).resolve()
        if not config.uses_mtp:
            raise ConfigError('the head is to draft: speculative_config.method must be "mtp"')
        if self.plan.compile and (config.device, config.dtype) != ("cpu", "float32"):
            raise ConfigError(
                "compile: native kernels are for float32 on the CPU, got "
                f"{config.dtype} on {config.device}"
            )
        self.output_dir = Path(os.path.realpath(self.output_dir))
        check_new_folder(self.output_dir)
        if not has_mtp(self.checkpoint):
            raise CheckpointError(
                f"{weights_file(self.checkpoint)}: no mtp.* tensors, so there is no head to tune"
            )
        if self.plan.compile:
            native.build()

    @property
    def temperatures(self) -> list[float]:
        """Of the plan, as numbers."""
        return [float(one) for one in self.plan.temperatures]

    def run(self) -> HeadTuningReport:
        """Does all of it, and leaves the report beside the weights.

        Raises:
            OutriderError: a prompt, an option or the checkpoint cannot be used, or the output
                could not be written.
        """
        plan = self.plan
        tuned, held_out = split_by_source(self.sources, plan.held_out_share, plan.seed)
        llm = LLM(self.checkpoint, **self.engine_options)
        config = llm.llm_engine.config
        prompts = llm.encode_prompts(list(self.prompts))
        measured = [prompts[index] for index in held_out]
        before = self._measure(llm, measured, "before")
        texts = self._write(llm, [prompts[index] for index in tuned])
        # Its weights and caches make room for those that are trained. What torch imports while the
        # first model of a process is made keeps the frames of that moment, in a circle.
        del llm
        gc.collect()
        model = load_model(
            self.checkpoint, device=config.device, dtype=getattr(torch, config.dtype), want_mtp=True
        )
        settings = tune_config(plan, config.num_speculative_tokens)
        with native.in_use() if plan.compile else nullcontext():
            tuning = HeadTuner(model, texts, settings).tune(self._on_step)
        num_unchanged = self._save(model)
        del model
        after = self._measure(LLM(self.output_dir, **self.engine_options), measured, "after")
        report = HeadTuningReport(
            num_prompts=len(tuned),
            num_held_out=len(held_out),
            num_texts=len(texts),
            num_unchanged_tensors=num_unchanged,
            tuning=tuning,
            changes=[
                _change(temperature, config, *samples)
                for temperature, *samples in zip(self.temperatures, before, after, strict=True)
            ],
        )
        self._write_report(report)
        return report

    def _measure(self, llm: LLM, prompts: list[EncodedPrompt], when: str) -> list[AcceptanceSample]:
        """Decodes the held-out prompts at each temperature."""
        phase = f"measuring {when}"
        total = len(prompts) * len(self.temperatures)
        samples: list[AcceptanceSample] = []
        # The last text of a temperature is told with the figure of all.
        finished = count()
        for temperature in self.temperatures:
            samples.append(
                sample_acceptance(
                    llm,
                    prompts,
                    temperature=temperature,
                    rule=llm.llm_engine.config.rejection_sample_method,
                    max_tokens=self.plan.max_tokens,
                    seed=self.plan.seed,
                    on_finish=lambda _: self.on_progress(phase, next(finished) / total, ""),
                )
            )
            self.on_progress(
                phase,
                len(samples) / len(self.temperatures),
                f"temperature {temperature:g}: {samples[-1].length.value:.2f}",
            )
        return samples

    def _write(self, llm: LLM, prompts: list[EncodedPrompt]) -> list[Continuation]:
        """Lets the model continue the prompts at each temperature."""
        plan = self.plan
        jobs = [
            (prompt, temperature)
            for temperature in self.temperatures
            for _ in range(plan.num_samples if temperature else 1)
            for prompt in prompts
        ]
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=plan.max_tokens,
                seed=plan.seed + number,
                detokenize=False,
            )
            for number, (_, temperature) in enumerate(jobs)
        ]
        finished = count(1)
        run = DecodeRun(llm.llm_engine)
        metrics = run.metrics
        # A function that held the run would be a circle, and the engine would outlive its last use.
        run.on_finish = lambda _: self.on_progress(
            "writing", next(finished) / len(jobs), f"{metrics.num_emitted_tokens:,} tokens"
        )
        results = run.run([prompt for prompt, _ in jobs], params)
        texts = []
        for (prompt, _), result in zip(jobs, results, strict=True):
            (output,) = result.outputs
            if output.finish_reason == "error":
                raise RequestError(f"{prompt.name}: the model's probabilities are not finite")
            ids = [*prompt.token_ids, *output.token_ids]
            texts.append(Continuation(ids, len(prompt.token_ids)))
        return texts

    def _on_step(self, step: TuneStep) -> None:
        losses = " ".join(f"{loss:.3f}" for loss in step.depth_losses)
        self.on_progress(
            "tuning", step.fraction, f"loss by depth {losses}, {step.tokens_per_s:,.0f} tokens/s"
        )

    def _save(self, model: Qwen4ExpForCausalLM) -> int:
        """Writes the output folder; returns how many tensors are those of the checkpoint."""
        head_file = self._save_head(model)
        try:
            stitch_head(self.checkpoint, head_file, self.output_dir)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the tuned head is kept as {head_file}") from None
        shutil.rmtree(head_file.parent)
        return check_same_trunk(self.checkpoint, self.output_dir)

    def _save_head(self, model: Qwen4ExpForCausalLM) -> Path:
        """Writes the head by itself, beside the output folder where the usual place has no room."""
        dtype = head_dtype(self.checkpoint)
        for place in (Path(tempfile.gettempdir()), self.output_dir.absolute().parent):
            folder = None
            try:
                place.mkdir(parents=True, exist_ok=True)
                folder = tempfile.mkdtemp(prefix="outrider-", dir=place)
                save_head(model, Path(folder, "mtp.safetensors"), dtype)
            except (OSError, CheckpointError) as failure:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                error = failure
            else:
                return Path(folder, "mtp.safetensors")
        raise CheckpointError(f"the tuned head could not be written: {error}") from None

    def _write_report(self, report: HeadTuningReport) -> None:
        path = self.output_dir / REPORT_FILE
        try:
            path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{path}: could not be written: {error.strerror}") from None


def tune_config(plan: HeadTuningConfig, num_depths: int) -> TuneConfig:
    """What the training is told of a plan.

    Args:
        plan: how.
        num_depths: drafts per step.
    """
    return TuneConfig(
        loss=LossConfig(
            kind=plan.loss, lk_lambda=plan.lk_lambda, depth_weights=depth_weights(num_depths)
        ),
        optimizer=OptimizerConfig(learning_rate=plan.learning_rate, weight_decay=0.0),
        num_epochs=plan.num_epochs,
        max_minutes=plan.max_minutes,
        batch_size=plan.batch_size,
        seed=plan.seed,
    )


def split_by_source(
    sources: Sequence[str], held_out_share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indexes of the prompts that are tuned on, and of those that are held out, in order.

    Sources are held out whole, drawn at random, until their prompts are the share or more.

    Args:
        sources: of each prompt.
        held_out_share: above 0 and below 1.
        seed: of the draw.
    """
    drawn = sorted(set(sources))
    if len(drawn) < 2:
        raise RequestError(
            f"{len(sources)} prompts of {len(drawn)} source: give prompts of two sources or more, "
            "some to tune on and others to measure on"
        )
    random.Random(seed).shuffle(drawn)
    held_out: set[int] = set()
    for source in drawn[:-1]:
        if len(held_out) >= held_out_share * len(sources):
            break
        held_out.update(index for index, one in enumerate(sources) if one == source)
    return [index for index in range(len(sources)) if index not in held_out], sorted(held_out)


def _change(
    temperature: float, config: EngineConfig, before: AcceptanceSample, after: AcceptanceSample
) -> AcceptanceChange:
    """The figures of two samples over the same prompts, and their differences."""
    assert config.speculative is not None, "an engine that drafts knows how"
    method = config.speculative.draft_sample_method
    assert method is not None, "resolved with the rest of the options"
    rows = [
        sample.row(
            suite=HELD_OUT_SUITE,
            temperature=temperature,
            rule=config.rejection_sample_method,
            draft_sample_method=method,
        )
        for sample in (before, after)
    ]
    gain, limit = after.length.minus(before.length), before.k
    fresh: RatioEstimate | None = None
    if before.fresh_length is not None and after.fresh_length is not None:
        fresh = after.fresh_length.minus(before.fresh_length)
    return AcceptanceChange(
        before=rows[0],
        after=rows[1],
        gain=gain.value,
        gain_ci95=gain.ci95(-limit, limit),
        gain_fresh=None if fresh is None else fresh.value,
        gain_fresh_ci95=None if fresh is None else fresh.ci95(-limit, limit),
    )
