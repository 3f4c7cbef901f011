"""Tuning the head alone: on the rows that count, with the trunk as it runs, and with a result."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError, RequestError
from outrider.models.qwen4_exp.decoder_layer import SequenceOptions
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.training import mtp_loss
from outrider.training.config import LossConfig, OptimizerConfig
from outrider.training.head_tuner import (
    Continuation,
    HeadTuner,
    TuneConfig,
    TuneStep,
    depth_weights,
    num_trained_rows,
    training_window,
)
from outrider.training.objective import depth_loss
from tests.tiny_engine import (
    Job,
    decode,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

A, B, C, D, E = range(1, 6)
KINDS = ("ce", "kl", "lk")


def config(kind: str = "ce", other_terms: float = 0.0, **changes: object) -> TuneConfig:
    """All terms but the depths' own are off."""
    loss = LossConfig(
        kind=kind,  # type: ignore[arg-type]
        depth_weights=depth_weights(3),
        router_balance_weight=other_terms,
        index_weight=other_terms,
    )
    return dataclasses.replace(TuneConfig(loss), **changes)  # type: ignore[arg-type]


def written(model: Qwen4ExpForCausalLM, prompts: list[list[int]], n: int) -> list[Continuation]:
    """What the model itself says after the prompts, at temperature 0."""
    results = decode(make_engine(model), [Job(prompt, greedy(n)) for prompt in prompts])
    return [
        Continuation([*prompt, *result.token_ids], len(prompt))
        for prompt, result in zip(prompts, results, strict=True)
    ]


def acceptance_length(model: Qwen4ExpForCausalLM, prompts: list[list[int]]) -> float:
    engine = make_engine(model, 3)
    decode(engine, [Job(prompt, greedy(16)) for prompt in prompts])
    return engine.metrics.mean_acceptance_length


def random_texts(lengths: list[tuple[int, int]]) -> list[Continuation]:
    texts = random_prompts([total for _, total in lengths])
    return [Continuation(ids, n) for ids, (n, _) in zip(texts, lengths, strict=True)]


def head_of(model: Qwen4ExpForCausalLM) -> dict[str, torch.Tensor]:
    assert model.mtp is not None
    return {name: tensor.clone() for name, tensor in model.mtp.state_dict().items()}


def test_rows_whose_target_was_generated_count() -> None:
    # The example of the docstring beside a longer text.
    batch = [Continuation([A, B, C, D], 2), Continuation([A, B, C, D, E, A], 5)]
    window, mask = training_window(batch)
    assert window.tolist() == [[A, B, C, D, 0, 0, 0], [A, B, C, D, E, A, 0]]
    assert mask.tolist() == [
        [True, True, False, False, False],
        [False, False, False, True, False],
    ]
    targets = mtp_loss.draft_targets(window)
    assert targets[mask].tolist() == [C, D, A]
    assert [num_trained_rows(text) for text in batch] == mask.sum(dim=1).tolist()
    # No row of the head predicts x_1, generated or not.
    assert num_trained_rows(Continuation([A, B, C], 1)) == 1
    assert training_window([Continuation([A, B, C], 1)])[1].tolist() == [[True, False]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_batch_is_that_of_its_texts(kind: str) -> None:
    # Past the budget of 8 positions, so that the trunk's attention is sparse; one text is shorter
    # than the other, and rows of the prompts are cut.
    model = tiny_model()
    texts = random_texts([(16, 22), (13, 17)])
    tuner = HeadTuner(model, texts, config(kind))
    total, depths = tuner._losses([0, 1])
    assert model.mtp is not None
    loss, sums, counts = config(kind).loss, [0.0] * 3, [0] * 3
    for text in texts:
        # One text by itself, one row at a time, nothing cut: the sum over rows is that of the mean.
        window, mask = training_window([text])
        with torch.no_grad():
            streams = model.model.forward_sequence(mtp_loss.input_ids(window)).streams
            dense = model.model.forward_sequence(
                mtp_loss.input_ids(window), SequenceOptions(dense_attention=True)
            ).streams
            assert not torch.allclose(streams, dense), "the text is within the budget"
            embeds = model.model.embed_tokens(mtp_loss.next_ids(window))
            outputs = model.mtp.unroll(streams, embeds, 3)
            trunk = model.logits(streams)
            for depth, output in enumerate(outputs):
                for row in mask[0].nonzero().flatten().tolist():
                    alone = torch.zeros_like(mask)
                    alone[0, row] = True
                    logits = model.mtp_logits(output.streams)
                    sums[depth] += depth_loss(trunk, logits, window, depth, loss, alone).item()
                    counts[depth] += 1
    assert counts == [6 + 4] * 3
    expected = [one / count for one, count in zip(sums, counts, strict=True)]
    torch.testing.assert_close([loss.item() for loss in depths], expected)
    weights = [0.51, 0.306, 0.184]
    weighted = sum(w * one for w, one in zip(weights, expected, strict=True))
    assert total.item() == pytest.approx(weighted, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_more_of_a_tuned_head(kind: str) -> None:
    model = tiny_model(torch.float32)
    prompts = random_prompts([9, 12, 7, 10])
    before = acceptance_length(model, prompts)
    trunk = {n: p.clone() for n, p in model.state_dict().items() if not n.startswith("mtp.")}
    texts = written(model, prompts, 16)
    settings = config(
        kind, num_epochs=24, batch_size=4, optimizer=OptimizerConfig(learning_rate=2e-2)
    )
    report = HeadTuner(model, texts, settings).tune()
    assert acceptance_length(model, prompts) > before + 0.5
    assert report.last_losses[0] < report.first_losses[0]
    assert (report.num_steps, report.num_tokens) == (24, 24 * 4 * 16)
    for name, tensor in trunk.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_trunk_gets_no_gradient_and_every_part_of_the_head_one() -> None:
    model = tiny_model()
    settings = config()
    loss = dataclasses.replace(settings.loss, index_weight=1.0, router_balance_weight=0.01)
    tuner = HeadTuner(model, random_texts([(5, 30)]), dataclasses.replace(settings, loss=loss))
    tuner._losses([0])[0].backward()
    for name, parameter in model.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
        assert has_gradient == name.startswith("mtp."), name


def test_the_same_seed_gives_the_same_head_to_the_bit() -> None:
    heads = []
    for seed in (0, 0, 1):
        model = tiny_model(torch.float32)
        texts = random_texts([(4, 14)] * 3 + [(6, 18)] * 3)
        HeadTuner(model, texts, config(seed=seed, batch_size=2, num_epochs=2)).tune()
        heads.append(head_of(model))
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not all(torch.equal(heads[0][name], heads[2][name]) for name in heads[0])


def test_kept_streams_are_those_of_the_trunk() -> None:
    texts = random_texts([(4, 14), (6, 18), (5, 16), (9, 19), (8, 17)])
    heads, num_runs = [], []
    for max_bytes in (0, 1 << 20):
        model = tiny_model()
        calls: list[int] = []
        run = model.model.forward_sequence

        def counted(
            ids: torch.Tensor, run: Callable[..., Any] = run, calls: list[int] = calls
        ) -> Any:
            calls.append(len(ids))
            return run(ids)

        object.__setattr__(model.model, "forward_sequence", counted)
        HeadTuner(
            model,
            texts,
            config("kl", 1.0, batch_size=2, num_epochs=3, max_stream_bytes=max_bytes),
        ).tune()
        heads.append(head_of(model))
        num_runs.append(sum(calls))
    assert num_runs == [15, 5]
    torch.testing.assert_close(heads[0], heads[1])


def test_each_step_tells_how_far_it_is() -> None:
    steps: list[TuneStep] = []
    texts = random_texts([(4, 14), (6, 16), (5, 15), (9, 19)])
    HeadTuner(tiny_model(), texts, config(batch_size=2, num_epochs=2)).tune(steps.append)
    assert [step.fraction for step in steps] == [0.25, 0.5, 0.75, 1.0]
    assert all(len(step.depth_losses) == 3 and step.tokens_per_s > 0 for step in steps)


def test_a_short_tuning_comes_to_its_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def watched(optimizer: torch.optim.AdamW, closure: None = None) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    texts = random_texts([(4, 14)] * 4)
    tuning = config(optimizer=OptimizerConfig(learning_rate=1e-3), batch_size=1, num_epochs=3)
    HeadTuner(tiny_model(), texts, tuning).tune()
    # A warm-up of one step in twelve, of the twenty that a long run has.
    assert rates[:7] == [1e-3] * 7
    assert rates[-1] < rates[7] < 1e-3


def test_time_that_is_used_up_ends_it() -> None:
    texts = random_texts([(4, 14)])
    report = HeadTuner(tiny_model(), texts, config(num_epochs=1000, max_minutes=1e-9)).tune()
    assert report.num_steps == 1


def test_texts_without_a_generated_token_are_left_out() -> None:
    texts = random_texts([(5, 5), (4, 8)])
    assert HeadTuner(tiny_model(), texts, config(num_epochs=1)).tune().num_tokens == 4
    with pytest.raises(RequestError, match="wrote nothing"):
        HeadTuner(tiny_model(), texts[:1], config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_epochs": 0}, "num_epochs: 0 is not at least 1"),
        ({"batch_size": 0}, "batch_size: 0 is not at least 1"),
        ({"max_minutes": 0.0}, "max_minutes: 0.0 is not a number above 0"),
        ({"optimizer": OptimizerConfig(learning_rate=-1.0)}, "learning_rate: -1.0 is not"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)
