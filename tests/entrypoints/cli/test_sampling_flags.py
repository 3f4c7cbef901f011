"""Each sampling flag of `outrider generate` does what the parameter of the Python API does."""

from typing import Any

import pytest

from outrider import LLM, RequestOutput, SamplingParams
from outrider.entrypoints.cli import main
from tests.entrypoints.generate_command import Generate

TEXT = "def f(x):"
SAMPLED = ("--temperature", "1", "--seed", "5")


def api(llm: LLM, prompts: Any = TEXT, **params: Any) -> list[RequestOutput]:
    defaults = {"temperature": 1, "seed": 5, "max_tokens": 6}
    return llm.generate(prompts, SamplingParams(**{**defaults, **params}))


def greedy_ids(llm: LLM) -> list[int]:
    return api(llm, temperature=0)[0].outputs[0].token_ids


def test_flags_are_parameters(generate: Generate, llm: LLM) -> None:
    (plain,) = generate.ids(TEXT, *SAMPLED)
    first, second = plain[:2]
    flags: list[tuple[list[str], dict[str, Any]]] = [
        (["--presence-penalty", "2"], {"presence_penalty": 2}),
        (["--frequency-penalty", "-2"], {"frequency_penalty": -2}),
        (["--repetition-penalty", "9"], {"repetition_penalty": 9}),
        (["--logit-bias", f'{{"{first}": -100}}'], {"logit_bias": {first: -100}}),
        (
            ["--logit-bias", f'{{"{second}": 100}}', "--min-tokens", "3"],
            {"logit_bias": {second: 100}, "min_tokens": 3},
        ),
    ]
    for given, params in flags:
        ids = generate.ids(TEXT, *SAMPLED, *given)
        assert ids == [api(llm, **params)[0].outputs[0].token_ids], given
        assert ids != [plain], given


def test_structured_outputs(generate: Generate) -> None:
    (output,) = generate.json(TEXT, "--structured-outputs", '{"regex": "[0-9]{3}"}')["outputs"]
    assert output["text"].isdigit()
    assert len(output["text"]) == 3
    for wrong, told in (
        ('{"regexp": "a"}', "--structured-outputs: unknown key 'regexp'; there are json, regex,"),
        ("[0-9]", "--structured-outputs: no valid JSON"),
        ("{}", "structured_outputs"),
    ):
        assert main(["generate", TEXT, "--structured-outputs", wrong]) == 2
        assert told in generate.capsys.readouterr().err


def test_stop_strings(generate: Generate, llm: LLM) -> None:
    text = api(llm, temperature=0)[0].outputs[0].text
    place = len(text) // 2
    found = text[place : place + 2]
    cut = text[: text.index(found)]
    (output,) = generate.json(TEXT, "--stop", "is never said", "--stop", found)["outputs"]
    assert (output["text"], output["finish_reason"]) == (cut, "stop")
    assert output["stop_reason"] == found
    (output,) = generate.json(TEXT, "--stop", found, "--include-stop-str-in-output")["outputs"]
    assert output["text"] == cut + found
    out, _ = generate(TEXT, "--stop", found)
    assert out == f"{cut}\n"


def test_min_tokens(generate: Generate, llm: LLM) -> None:
    ids = greedy_ids(llm)
    stop = ("--stop-token-id", str(ids[0]))
    assert generate.ids(TEXT, *stop) == [ids[:1]]
    (output,) = generate.json(TEXT, *stop, "--min-tokens", "4")["outputs"]
    assert len(output["token_ids"]) >= 4
    assert ids[0] not in output["token_ids"][:3]


def test_bad_words(generate: Generate, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = greedy_ids(llm)
    word = next(tokenizer.decode([one]) for one in ids if tokenizer.decode([one]).isalpha())
    (found,) = generate.ids(TEXT, "--bad-word", word, "--bad-word", "another one")
    assert found == api(llm, temperature=0, bad_words=[word, "another one"])[0].outputs[0].token_ids
    assert found != ids


def test_special_tokens(generate: Generate, llm: LLM) -> None:
    bias = ("--logit-bias", '{"1": 100}')
    (shown,) = generate.json(TEXT, *bias, "--no-skip-special-tokens")["outputs"]
    assert shown["text"] == "<|im_start|>" * 6
    for flags in ((), ("--skip-special-tokens",)):
        (hidden,) = generate.json(TEXT, *bias, *flags)["outputs"]
        assert (hidden["text"], hidden["token_ids"]) == ("", [1] * 6)


@pytest.mark.parametrize("flag", ["-n", "--n"])
def test_several_completions(generate: Generate, llm: LLM, flag: str) -> None:
    texts = [TEXT, "import os"]
    value = generate.json(*texts, *SAMPLED, flag, "3")
    expected = [
        (place, one.index, one.token_ids, one.text)
        for place, result in enumerate(api(llm, texts, n=3))
        for one in result.outputs
    ]
    assert [
        (one["prompt_index"], one["index"], one["token_ids"], one["text"])
        for one in value["outputs"]
    ] == expected
    assert len({tuple(ids) for _, _, ids, _ in expected}) == 6


def test_several_completions_have_headings(generate: Generate, llm: LLM) -> None:
    (result,) = api(llm, n=2)
    out, err = generate(TEXT, *SAMPLED, "-n", "2")
    first, second = (one.text for one in result.outputs)
    assert out == f"==> 1.1 <==\n{first}\n==> 1.2 <==\n{second}\n"
    assert err.startswith("12 tokens, ")


def test_logprobs(generate: Generate, llm: LLM) -> None:
    flags = ("--logprobs", "3", "--prompt-logprobs", "2", "--max-tokens", "4")
    tokenizer = llm.get_tokenizer()
    value = generate.json(TEXT, *SAMPLED, "-n", "2", *flags)
    (result,) = api(llm, n=2, logprobs=3, prompt_logprobs=2, max_tokens=4)
    for output, completion in zip(value["outputs"], result.outputs, strict=True):
        assert completion.logprobs is not None
        assert output["cumulative_logprob"] == pytest.approx(completion.cumulative_logprob)
        content = output["logprobs"]["content"]
        assert [one["token_id"] for one in content] == output["token_ids"]
        for one, position in zip(content, completion.logprobs, strict=True):
            logprob = position[one["token_id"]]
            assert one["logprob"] == pytest.approx(logprob.logprob)
            assert (one["rank"], one["token"]) == (logprob.rank, logprob.decoded_token)
            assert bytes(one["bytes"]) == tokenizer.token_bytes(one["token_id"])
            top = one["top_logprobs"]
            assert [entry["rank"] for entry in top] == [1, 2, 3]
            assert all(set(entry) == {*one} - {"top_logprobs"} for entry in top)
            assert (one["token_id"] in [entry["token_id"] for entry in top]) == (one["rank"] <= 3)
        first, *others = output["prompt_logprobs"]
        assert first is None
        assert len(others) == len(tokenizer.encode(TEXT)) - 1
        for position, token_id in zip(others, tokenizer.encode(TEXT)[1:], strict=True):
            assert next(iter(position)) == str(token_id)
            assert set(position[str(token_id)]) == {"logprob", "rank", "decoded_token"}
    (output,) = generate.json(TEXT, "--logprobs", "0", "--max-tokens", "1")["outputs"]
    assert output["logprobs"]["content"][0]["top_logprobs"] == []
    assert "prompt_logprobs" not in output


def test_a_token_that_cannot_be_drawn_is_json(generate: Generate) -> None:
    mode = ("--logprobs-mode", "processed_logprobs")
    (output,) = generate.json(TEXT, *SAMPLED, "--top-k", "1", "--logprobs", "2", *mode)["outputs"]
    for position in output["logprobs"]["content"]:
        assert [one["logprob"] for one in position["top_logprobs"]] == [0, -9999]
