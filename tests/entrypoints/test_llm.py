"""The Python API: every form of a prompt, parameters, defaults, and errors before anything runs."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import LLM, RequestOutput, SamplingParams
from outrider.errors import CheckpointError, ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXTS = ["def f(x):", "import", "class A:\n    "]


def token_ids(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_one_result_for_each_prompt_in_order(llm: LLM) -> None:
    results = llm.generate(TEXTS, GREEDY)
    assert [result.prompt for result in results] == TEXTS
    assert [result.prompt_token_ids for result in results] == [
        llm.get_tokenizer().encode(text) for text in TEXTS
    ]
    assert all(result.finished for result in results)
    for result in results:
        (output,) = result.outputs
        assert (output.index, output.finish_reason, len(output.token_ids)) == (0, "length", 6)
        assert output.text == llm.get_tokenizer().decode(output.token_ids)
    alone = [llm.generate(text, GREEDY)[0] for text in TEXTS]
    assert token_ids(alone) == token_ids(results)


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXTS[0])
    forms: list[Any] = [
        TEXTS[0],
        {"prompt": TEXTS[0]},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": tuple(ids), "prompt": TEXTS[0]},
        ids,
        tuple(ids),
        list(np.array(ids)),
    ]
    (expected,) = token_ids(llm.generate(TEXTS[0], GREEDY))
    for form in forms:
        (result,) = llm.generate(form, GREEDY)
        assert token_ids([result]) == [expected], form
        assert result.prompt == (None if form in forms[2:3] + forms[4:] else TEXTS[0])
    assert token_ids(llm.generate(forms, GREEDY)) == [expected] * len(forms)
    assert llm.generate([], GREEDY) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=number) for number in (1, 3, 2)]
    assert [len(ids) for ids in token_ids(llm.generate(TEXTS, params))] == [1, 3, 2]
    # Without parameters they are the checkpoint's, which leaves vLLM's default of 16 tokens.
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(token_ids(llm.generate("import"))[0]) <= 16


def test_drafts_do_not_change_the_text(llm: LLM, model_dir: Path) -> None:
    plain = LLM(model_dir, dtype="float64")
    drafting = LLM(
        str(model_dir),
        dtype="float64",
        speculative_config='{"method": "mtp", "num_speculative_tokens": 5}',
    )
    assert plain.llm_engine.config.num_speculative_tokens == 0
    for params in (
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(max_tokens=12, seed=5, rejection_sample_method="coupled"),
    ):
        assert token_ids(plain.generate(TEXTS, params)) == token_ids(
            drafting.generate(TEXTS, params)
        )
    assert plain.llm_engine.metrics.num_drafts == 0
    assert drafting.llm_engine.metrics.num_drafts > 0


def test_another_number_of_drafts_over_the_same_weights(llm: LLM) -> None:
    for number in (0, 5):
        other = llm.with_num_speculative_tokens(number)
        assert other.llm_engine.config.num_speculative_tokens == number
        assert other.llm_engine.model is llm.llm_engine.model
        assert token_ids(other.generate(TEXTS, GREEDY)) == token_ids(llm.generate(TEXTS, GREEDY))
    assert llm.llm_engine.config.num_speculative_tokens == 3


def test_seeded_sampling_repeats(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=8)
    first = token_ids(llm.generate(TEXTS, params))
    assert token_ids(llm.generate(TEXTS, params)) == first
    assert token_ids(llm.generate(TEXTS, SamplingParams(seed=8, max_tokens=8))) != first


def test_the_engine_seed_is_for_requests_without_one(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=8)
    texts = [TEXTS[0]] * 2
    first, second, other = (
        token_ids(LLM(model_dir, seed=seed).generate(texts, params)) for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other
    # Requests differ from each other all the same.
    assert first[0] != first[1]
    unseeded = LLM(model_dir)
    assert token_ids(unseeded.generate(texts, params)) != token_ids(
        unseeded.generate(texts, params)
    )


def edit_generation_config(folder: Path, **values: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_generation_config_is_honoured(llm: LLM, own_model_dir: Path) -> None:
    (expected,) = token_ids(llm.generate("import", GREEDY))
    place = next(i for i in range(2, 6) if expected[i] not in expected[:i])
    edit_generation_config(
        own_model_dir,
        eos_token_id=[4000, expected[place]],
        temperature=0.0,
        top_k=11,
        max_new_tokens=5,
    )
    other = LLM(own_model_dir)
    assert other.get_default_sampling_params() == SamplingParams(
        temperature=0, top_k=11, max_tokens=5
    )
    assert token_ids(other.generate("import")) == [expected[: min(place + 1, 5)]]
    (stopped,) = other.generate("import", GREEDY)
    output = stopped.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == expected[: place + 1]
    assert output.text == llm.get_tokenizer().decode(expected[:place])
    ignoring = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (whole,) = other.generate("import", ignoring)
    assert (whole.outputs[0].finish_reason, token_ids([whole])) == ("length", [expected])


def test_stop_token_ids(llm: LLM) -> None:
    (expected,) = token_ids(llm.generate("import", GREEDY))
    place = next(i for i in range(2, 6) if expected[i] not in expected[:i])
    params = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[expected[place]])
    output = llm.generate("import", params)[0].outputs[0]
    assert output.token_ids == expected[: place + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", expected[place])
    assert output.text == llm.get_tokenizer().decode(expected[:place])


def test_progress_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(TEXTS, GREEDY, use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err


LONG = [5] * 256
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "the prompt is empty"),
    "empty text in a list": (["a", ""], "prompts[1]: the prompt is empty"),
    "no ids": ({"prompt_token_ids": []}, "the prompt is empty"),
    "too long": (["a", LONG], "prompts[1]: the prompt has 256 tokens, and the maximum context"),
    "id out of range": ([5, 4096], "token id 4096 is out of range: ids are 0 to 4095"),
    "negative id": ([[5], [-1]], "prompts[1]: token id -1 is out of range"),
    "huge id": ([10**30], "is out of range"),
    "endless id": ([10**5000], "token id a int too long to print is out of range"),
    "bool": ([True], "the prompt[0] must be a token id, got True"),
    "fraction": ([[1], [1.5]], "prompts[1]: the prompt[0] must be a token id, got 1.5"),
    "ids as text": ({"prompt_token_ids": "12"}, "prompt_token_ids must be a list of token ids"),
    "text as ids": ({"prompt": [1]}, "prompt must be a text, got [1]"),
    "unknown key": ({"promt": "a"}, "unknown key 'promt' of a prompt; the nearest is \"prompt\""),
    "nothing": ({}, "prompt or prompt_token_ids is missing"),
    "bytes": ([b"a"], "prompts[0]: a prompt must be a text, a list of token ids or an object"),
    "number": (7, "prompts must be a text or a list of prompts, got 7"),
    "none": (["a", None], "prompts[1]: a prompt must be a text"),
    "half a surrogate": (["a", "b\udc80"], "prompts[1]: the prompt is no valid Unicode text"),
}


@pytest.mark.parametrize(("prompts", "reason"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM, prompts: Any, reason: str) -> None:
    num_steps = llm.llm_engine.num_steps
    with pytest.raises(RequestError, match=re.escape(reason)) as raised:
        llm.generate(prompts, GREEDY)
    assert "\n" not in str(raised.value)
    assert llm.llm_engine.num_steps == num_steps
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ([GREEDY] * 2, "sampling_params has 2 entries for 3 prompts"),
        ([GREEDY, None, GREEDY], "sampling_params must be SamplingParams or a list of them"),
        ({"temperature": 0}, "sampling_params must be SamplingParams or a list of them"),
        (
            [GREEDY, GREEDY, SamplingParams(num_speculative_tokens=4)],
            "prompts[2]: num_speculative_tokens 4 is more than the engine's 3",
        ),
    ],
)
def test_bad_parameters(llm: LLM, params: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        llm.generate(TEXTS, params)
    assert not llm.llm_engine.has_unfinished_requests()


def test_bad_options_and_checkpoints(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='write "mtp", not "qwen4_exp_mtp"'):
        LLM(model_dir, speculative_config={"method": "qwen4_exp_mtp"})
    with pytest.raises(ConfigError, match=r'unknown option .*; the nearest is "max_model_len"'):
        LLM(model_dir, max_model_length=10)
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        LLM(tmp_path / "nowhere")
