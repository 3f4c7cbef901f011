"""`HeadTuning`: a copy of the checkpoint whose head drafts better, and whose trunk is the same."""

import gc
import json
import os
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from outrider.config import HeadTuningConfig
from outrider.entrypoints import head_tuning as head_tuning_module
from outrider.entrypoints.head_tuning import (
    REPORT_FILE,
    HeadTuning,
    HeadTuningReport,
    split_by_source,
    tune_config,
)
from outrider.entrypoints.llm import LLM
from outrider.errors import CheckpointError, ConfigError, OutriderError, RequestError
from outrider.models.qwen4_exp.checkpoint_names import is_mtp_tensor
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import load_model, save_checkpoint
from outrider.ops import native
from outrider.sampling_params import SamplingParams
from outrider.training import head_file, head_tuner
from outrider.training.head_tuner import HeadTuner
from tests.models.tiny_checkpoint import edit_tensors
from tests.ops.sequence_form import HAS_COMPILER
from tests.tiny_engine import VOCAB_SIZE, random_prompts, tiny_model

PLAN = HeadTuningConfig(
    temperatures=(0.0, 0.5),
    max_tokens=12,
    num_samples=2,
    held_out_share=0.25,
    num_epochs=16,
    batch_size=8,
    learning_rate=1e-2,
    seed=3,
)
QUICK_PLAN = replace(PLAN, num_epochs=1, max_tokens=4)
PROMPTS = [
    {"prompt_token_ids": ids} for ids in random_prompts([9, 12, 7, 10, 8, 11, 9, 13, 8, 10, 9, 7])
]


@pytest.fixture(scope="session")
def blurred_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of few ids whose head would be right now and then, but hardly sees its token."""
    folder = tmp_path_factory.mktemp("checkpoint") / "blurred"
    model = tiny_model(torch.float32)
    assert model.mtp is not None
    with torch.no_grad():
        model.mtp.fc_embedding.weight.mul_(0.05)
    save_checkpoint(model, model.config, folder, torch.bfloat16)
    vocab = {chr(ord("A") + token_id): token_id for token_id in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def head_tuning(checkpoint: Path, output_dir: Path, **changes: Any) -> HeadTuning:
    values: dict[str, Any] = {
        "prompts": PROMPTS,
        "sources": [str(index // 2) for index in range(len(PROMPTS))],
        "plan": PLAN,
        "engine_options": {
            "max_model_len": 64,
            "speculative_config": {"num_speculative_tokens": 3},
        },
    }
    return HeadTuning(checkpoint=checkpoint, output_dir=output_dir, **{**values, **changes})


@pytest.fixture(scope="session")
def tuned(
    blurred_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, HeadTuningReport, list[tuple[str, float, str]]]:
    output_dir = tmp_path_factory.mktemp("tuned") / "out"
    told: list[tuple[str, float, str]] = []
    run = head_tuning(blurred_dir, output_dir, on_progress=lambda *one: told.append(one))
    return output_dir, run.run(), told


def test_held_out_prompts_are_drafted_better(
    tuned: tuple[Path, HeadTuningReport, list[tuple[str, float, str]]],
) -> None:
    output_dir, report, _ = tuned
    # A quarter is three; sources of two are held out whole.
    assert (report.num_prompts, report.num_held_out) == (8, 4)
    # Eight at temperature 0, and two for each at 0.5.
    assert report.num_texts == 24
    assert report.tuning.num_steps == 48
    greedy, sampled = report.changes
    for change, temperature in ((greedy, 0.0), (sampled, 0.5)):
        assert change.before.temperature == change.after.temperature == temperature
        assert (change.before.k, change.after.prompts) == (3, 4)
        assert change.gain == pytest.approx(
            change.after.mean_acceptance_length - change.before.mean_acceptance_length
        )
        assert change.gain_ci95 is not None
    assert greedy.gain > 0.3
    assert greedy.gain_fresh is not None
    written = json.loads((output_dir / REPORT_FILE).read_text())
    assert written == json.loads(json.dumps(report.to_dict()))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_native_kernels_train_and_do_nothing_else(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_enabled", [])
    of_phase: dict[str, set[bool]] = {}

    def note(phase: str, *_: object) -> None:
        of_phase.setdefault(phase, set()).add(native.kernels(torch.zeros(1)) is not None)

    plan = replace(PLAN, compile=True, num_epochs=1)
    head_tuning(blurred_dir, tmp_path / "out", plan=plan, on_progress=note).run()
    assert of_phase == {
        "measuring before": {False},
        "writing": {False},
        "tuning": {True},
        "measuring after": {False},
    }


def test_a_missing_compiler_is_told_before_anything_runs(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_enabled", [])
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    native.build.cache_clear()
    with pytest.raises(OutriderError, match=r"no C\+\+ compiler"):
        head_tuning(blurred_dir, tmp_path / "out", plan=replace(PLAN, compile=True))


def test_the_output_is_the_checkpoint_with_another_head(
    blurred_dir: Path, tuned: tuple[Path, HeadTuningReport, list[tuple[str, float, str]]]
) -> None:
    output_dir, report, _ = tuned
    before, after = (
        load_file(folder / "model.safetensors") for folder in (blurred_dir, output_dir)
    )
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed
    assert all(map(is_mtp_tensor, changed))
    assert all(after[name].dtype == before[name].dtype for name in before)
    assert report.num_unchanged_tensors == sum(not is_mtp_tensor(name) for name in before)
    names = {path.name for path in blurred_dir.iterdir()}
    assert {path.name for path in output_dir.iterdir()} == {*names, REPORT_FILE}
    # Greedy text is the trunk's, whoever drafts.
    params = SamplingParams(temperature=0, max_tokens=12)
    texts = [
        LLM(folder, max_model_len=64, speculative_config={"num_speculative_tokens": 3}).generate(
            PROMPTS, params
        )
        for folder in (blurred_dir, output_dir)
    ]
    ids = [[one.outputs[0].token_ids for one in listed] for listed in texts]
    assert ids[0] == ids[1]


def test_each_phase_is_told_to_its_end(
    tuned: tuple[Path, HeadTuningReport, list[tuple[str, float, str]]],
) -> None:
    _, _, told = tuned
    phases = list(dict.fromkeys(phase for phase, _, _ in told))
    assert phases == ["measuring before", "writing", "tuning", "measuring after"]
    for phase in phases:
        fractions = [fraction for name, fraction, _ in told if name == phase]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
    assert "loss by depth" in next(figures for phase, _, figures in told if phase == "tuning")


def test_the_same_seed_gives_the_same_bytes(blurred_dir: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, num_epochs=1, max_tokens=4, temperatures="1")
    weights = []
    for name in ("a", "b"):
        head_tuning(blurred_dir, tmp_path / name, plan=plan).run()
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_only_generated_text_of_the_tuned_prompts_is_trained_on(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Spy(HeadTuner):
        def __init__(self, model: Any, continuations: Any, config: Any) -> None:
            seen.append((continuations, config))
            super().__init__(model, continuations, config)

    monkeypatch.setattr("outrider.entrypoints.head_tuning.HeadTuner", Spy)
    plan = replace(PLAN, num_epochs=1, max_tokens=5)
    run = head_tuning(blurred_dir, tmp_path / "out", plan=plan)
    run.run()
    ((texts, config),) = seen
    tuned, held_out = split_by_source(run.sources, plan.held_out_share, plan.seed)
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    given = [text.token_ids[: text.num_prompt_tokens] for text in texts]
    assert given == 3 * [prompts[index] for index in tuned]
    assert not any(prompts[index] in given for index in held_out)
    llm = LLM(blurred_dir, max_model_len=64)
    greedy = llm.generate(
        [prompts[index] for index in tuned], SamplingParams(temperature=0, max_tokens=5)
    )
    assert [text.token_ids[text.num_prompt_tokens :] for text in texts[: len(tuned)]] == [
        one.outputs[0].token_ids for one in greedy
    ]
    sampled = [tuple(text.token_ids) for text in texts[len(tuned) :]]
    assert len(set(sampled)) > len(tuned), "two samples of a prompt are two texts"
    assert config == tune_config(plan, 3)


def test_the_engine_is_gone_before_the_head_is_tuned(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Any]] = []
    alive_at_load: list[list[object]] = []

    class Spy(LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            held.extend([weakref.ref(self.llm_engine), weakref.ref(self.llm_engine.model)])

    def load(*arguments: Any, **options: Any) -> Any:
        alive_at_load.append([one() for one in held])
        return load_model(*arguments, **options)

    monkeypatch.setattr(head_tuning_module, "LLM", Spy)
    monkeypatch.setattr(head_tuning_module, "load_model", load)
    run = head_tuning(blurred_dir, tmp_path / "out", plan=QUICK_PLAN)
    gc.disable()
    try:
        run.run()
    finally:
        gc.enable()
    assert alive_at_load == [[None, None]]


def test_texts_are_written_without_a_circle_around_the_engine(
    blurred_dir: Path, tmp_path: Path
) -> None:
    run = head_tuning(blurred_dir, tmp_path / "out", plan=QUICK_PLAN)
    LLM(blurred_dir, **run.engine_options)  # The first of a process stays in a circle of torch.
    gc.disable()
    try:
        llm = LLM(blurred_dir, **run.engine_options)
        assert run._write(llm, llm.encode_prompts(PROMPTS[:1]))
        engine = weakref.ref(llm.llm_engine)
        del llm
        assert engine() is None
    finally:
        gc.enable()


def test_the_working_folder_may_be_the_output(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    head_tuning(blurred_dir, Path(), plan=QUICK_PLAN).run()
    names = {path.name for path in blurred_dir.iterdir()}
    # As a shell in it sees it: the folder is the same one.
    assert set(os.listdir()) == {*names, REPORT_FILE}
    assert os.listdir(tmp_path / "temporary") == []


def test_a_head_that_cannot_be_put_in_place_is_kept(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(head_file, "_write_weights", no_space)
    with pytest.raises(
        CheckpointError, match=r"out: .*No space left on device; the tuned"
    ) as error:
        head_tuning(blurred_dir, tmp_path / "out", plan=QUICK_PLAN).run()
    kept = Path(str(error.value).partition("the tuned head is kept as ")[2])
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    head_file.stitch_head(blurred_dir, kept, tmp_path / "out")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (blurred_dir, tmp_path / "out")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_head_goes_elsewhere_where_the_usual_place_is_full(
    blurred_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "temporary"
    full.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    save = head_tuning_module.save_head

    def full_disk(model: Qwen4ExpForCausalLM, path: Path, dtype: torch.dtype) -> None:
        if full in path.parents:
            raise CheckpointError(f"{path}: No space left on device")
        save(model, path, dtype)

    monkeypatch.setattr(head_tuning_module, "save_head", full_disk)
    out = tmp_path / "below" / "out"
    head_tuning(blurred_dir, out, plan=QUICK_PLAN).run()
    assert (out / REPORT_FILE).exists()
    # Nothing stays but what was asked for.
    assert os.listdir(out.parent) == ["out"]
    assert os.listdir(full) == []


def test_a_plan_reaches_the_training() -> None:
    plan = HeadTuningConfig(
        loss="kl", lk_lambda=0.2, num_epochs=7, max_minutes=2.0, batch_size=5, learning_rate=1e-4
    )
    config = tune_config(replace(plan, seed=9), 2)
    assert (config.loss.kind, config.loss.lk_lambda) == ("kl", 0.2)
    assert config.loss.depth_weights == head_tuner.depth_weights(2) == (1.0, 0.6)
    assert (config.num_epochs, config.max_minutes, config.batch_size) == (7, 2.0, 5)
    assert (config.optimizer.learning_rate, config.seed) == (1e-4, 9)


def test_no_source_is_on_both_sides() -> None:
    sources = ["a", "b", "a", "c", "c", "c", "d", "e"]
    for seed in range(20):
        tuned, held_out = split_by_source(sources, 0.25, seed)
        assert sorted([*tuned, *held_out]) == list(range(8))
        assert len(held_out) >= 2
        assert tuned
        assert not {sources[i] for i in tuned} & {sources[i] for i in held_out}
    assert len({tuple(split_by_source(sources, 0.25, seed)[1]) for seed in range(20)}) > 1
    assert split_by_source(["a", "b"], 0.99, 0) in (([0], [1]), ([1], [0]))
    with pytest.raises(RequestError, match="3 prompts of 1 source: give prompts of two"):
        split_by_source(["a"] * 3, 0.5, 0)


def test_what_cannot_work_is_told_before_anything_is_loaded(
    own_model_dir: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(CheckpointError, match="taken: exists and is not empty"):
        head_tuning(own_model_dir, taken)
    with pytest.raises(CheckpointError, match="own: exists and is not empty"):
        head_tuning(own_model_dir, own_model_dir)
    with pytest.raises(CheckpointError, match="taken/file/new: cannot be written: Not a directory"):
        head_tuning(own_model_dir, taken / "file" / "new")
    ngram = {"speculative_config": {"method": "ngram"}}
    with pytest.raises(ConfigError, match=r'speculative_config\.method must be "mtp"'):
        head_tuning(own_model_dir, tmp_path / "new", engine_options=ngram)
    edit_tensors(
        own_model_dir,
        lambda tensors: [tensors.pop(name) for name in [*tensors] if is_mtp_tensor(name)],
    )
    with pytest.raises(CheckpointError, match=r"no mtp\.\* tensors, so there is no head to tune"):
        head_tuning(own_model_dir, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_prompt_that_does_not_fit_writes_nothing(blurred_dir: Path, tmp_path: Path) -> None:
    long = [*PROMPTS[:3], {"prompt_token_ids": [1] * 70}]
    with pytest.raises(OutriderError, match=r"prompts\[3\]"):
        head_tuning(blurred_dir, tmp_path / "out", prompts=long, sources=["a", "b", "c", "d"]).run()
    assert not (tmp_path / "out").exists()
