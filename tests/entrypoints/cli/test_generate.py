"""`outrider generate`: where prompts come from, what is printed, what each flag does."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.engine import LLMEngine
from outrider.entrypoints.cli import main
from outrider.outputs import StepOutput
from tests.entrypoints.generate_command import Generate
from tests.entrypoints.plan_line import PLAN_LINE, without_plan

STATS = [
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "mean_acceptance_length",
    "acceptance_rate",
    "tokens_per_target_pass",
    "decode_tokens_per_s",
]
TEXTS = ["def f(x):", "import os"]


def api_ids(llm: LLM, prompts: Any, **params: Any) -> list[list[int]]:
    results = llm.generate(prompts, SamplingParams(**{"temperature": 0, "max_tokens": 6, **params}))
    return [result.outputs[0].token_ids for result in results]


def test_json(generate: Generate, llm: LLM) -> None:
    value = generate.json(TEXTS[0], TEXTS[1])
    assert list(value) == ["outputs", "stats"]
    assert list(value["stats"]) == STATS
    keys = ["text", "token_ids", "finish_reason", "stop_reason", "prompt_index", "index"]
    assert [list(output) for output in value["outputs"]] == [keys] * 2
    places = [(output["prompt_index"], output["index"]) for output in value["outputs"]]
    assert places == [(0, 0), (1, 0)]
    assert [output["token_ids"] for output in value["outputs"]] == api_ids(llm, TEXTS)
    for output in value["outputs"]:
        assert output["text"] == llm.get_tokenizer().decode(output["token_ids"])
        assert output["finish_reason"] == "length"
    # Drafts are on without a flag, three a step.
    assert value["stats"]["num_drafts"] > 0
    assert len(value["stats"]["num_accepted_tokens_per_pos"]) == 3
    assert value["stats"]["decode_tokens_per_s"] > 0


def test_what_the_caches_take_is_told_once(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, in one line, before anything else."""
    given = ["--model", str(model_dir), "--max-tokens", "2", "--max-num-seqs", "3"]
    assert main(["generate", "a", *given, "--block-size", "32", "--max-model-len", "50"]) == 0
    told = capsys.readouterr().err
    assert len(PLAN_LINE.findall(told)) == 1
    assert told.startswith("caches: 6 blocks of 32 tokens at ")
    assert "states of 3 requests" in told
    assert "a request of 50 tokens takes" in told


def test_the_text_of_one_prompt_is_streamed(
    generate: Generate, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (pieces.append(text), write(text))[1])
    out, err = generate(TEXTS[0])
    (text,) = (result.outputs[0].text for result in llm.generate(TEXTS[0], GREEDY))
    assert out == f"{text}\n"
    assert len(pieces) > 3
    assert err.startswith("6 tokens, ")
    assert "mean acceptance length" in err


GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_several_prompts_have_headings(generate: Generate, llm: LLM) -> None:
    out, _ = generate(*TEXTS)
    first, second = (result.outputs[0].text for result in llm.generate(TEXTS, GREEDY))
    assert out == f"==> 1 <==\n{first}\n==> 2 <==\n{second}\n"


def test_prompts_from_a_file(generate: Generate, llm: LLM, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("def f(x):\r\n\n  \nimport os")
    assert generate.ids("--prompts", str(lines)) == api_ids(llm, TEXTS)
    objects = tmp_path / "prompts.jsonl"
    separator = "a\u2028b"
    objects.write_text(
        f'{{"prompt": "{separator}", "source": "x"}}\n{{"prompt_token_ids": [5, 6]}}\n'
    )
    assert generate.ids("--prompts", str(objects)) == api_ids(llm, [separator, [5, 6]])


@pytest.mark.parametrize("arguments", [[], ["-"]])
@pytest.mark.parametrize("text", ["def f(x):\n    return", "def f(x):\n    return\n"])
def test_a_prompt_from_stdin(
    generate: Generate, llm: LLM, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert generate.ids(*arguments) == api_ids(llm, "def f(x):\n    return")


def test_number_of_drafts(generate: Generate, llm: LLM) -> None:
    plain, two = generate.json(TEXTS[0], "-k", "0"), generate.json(TEXTS[0], "-k", "2")
    assert plain["outputs"] == two["outputs"]
    assert plain["stats"]["num_drafts"] == 0
    assert len(two["stats"]["num_accepted_tokens_per_pos"]) == 2
    config = '{"method": "mtp", "num_speculative_tokens": 4}'
    four = generate.json(TEXTS[0], "--speculative-config", config)
    assert len(four["stats"]["num_accepted_tokens_per_pos"]) == 4
    assert generate.json(TEXTS[0], "--speculative-config", '{"method": "mtp"}', "-k", "4")[
        "stats"
    ].keys() == set(STATS)


def test_sampling_flags(generate: Generate, llm: LLM) -> None:
    greedy = generate.ids(TEXTS[0])
    sampling = (TEXTS[0], "--temperature", "1.0", "--seed", "5")
    sampled = generate.ids(*sampling, "--rule", "coupled")
    assert sampled != greedy
    assert sampled == api_ids(
        llm, TEXTS[0], temperature=1, seed=5, rejection_sample_method="coupled"
    )
    # The same text without drafts is what the rule promises.
    assert generate.ids(*sampling, "--rule", "coupled", "-k", "0") == sampled
    for rule in ("standard", "block"):
        assert generate.ids(*sampling, "--rule", rule) == api_ids(
            llm, TEXTS[0], temperature=1, seed=5, rejection_sample_method=rule
        )
    # Each of these leaves one token to choose from.
    for flags in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
        assert generate.ids(*sampling, *flags) == greedy


def test_ends(generate: Generate) -> None:
    (ids,) = generate.ids(TEXTS[0])
    place = next(i for i in range(2, 6) if ids[i] not in ids[:i])
    stopped = generate.json(TEXTS[0], "--stop-token-id", "4000", "--stop-token-id", str(ids[place]))
    assert stopped["outputs"][0]["token_ids"] == ids[: place + 1]
    assert stopped["outputs"][0]["finish_reason"] == "stop"
    assert generate.ids(TEXTS[0], "--max-tokens", "2") == [ids[:2]]


def test_the_end_of_sequence(own_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = Generate(own_model_dir, capsys)
    (ids,) = generate.ids(TEXTS[0])
    place = next(i for i in range(2, 6) if ids[i] not in ids[:i])
    (own_model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[place]}))
    assert generate.ids(TEXTS[0]) == [ids[: place + 1]]
    assert generate.ids(TEXTS[0], "--ignore-eos") == [ids]


def test_engine_flags(generate: Generate, llm: LLM) -> None:
    assert generate.ids(TEXTS[0], "--dtype", "float64", "--device", "cpu") == api_ids(llm, TEXTS[0])
    small = ("--max-model-len", "12", "--max-num-seqs", "1", "--max-num-batched-tokens", "5")
    out = generate.ids(*TEXTS, *small, "--block-size", "8", "--kv-cache-memory", "1MiB")
    room = [12 - len(llm.get_tokenizer().encode(text)) for text in TEXTS]
    expected = zip(api_ids(llm, TEXTS), room, strict=True)
    assert out == [ids[:number] for ids, number in expected]


def test_without_a_head_it_decodes_plainly(
    own_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.models.tiny_checkpoint import edit_tensors

    def drop(tensors: Any) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    edit_tensors(own_model_dir, drop)
    assert Generate(own_model_dir, capsys).json("a")["stats"]["num_drafts"] == 0
    assert main(["generate", "a", "--model", str(own_model_dir), "-k", "1"]) == 2
    assert "mtp" in capsys.readouterr().err


def test_the_bundled_checkpoint_is_the_default(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import outrider.bundled
    import outrider.engine.engine
    import outrider.entrypoints.front_end

    folder = Path(shutil.copytree(model_dir, tmp_path / "bundled"))
    for module in (outrider.bundled, outrider.engine.engine, outrider.entrypoints.front_end):
        monkeypatch.setattr(module, "BUNDLED_MODEL_DIR", folder)
    assert main(["generate", "a", "--max-tokens", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]) == 2


def test_a_broken_model_is_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = LLMEngine.step

    def broken_step(engine: LLMEngine) -> list[StepOutput]:
        outputs = step(engine)
        for output in outputs[1:]:
            engine.abort_request(output.request_id)
        return outputs[:1] + [
            StepOutput(o.request_id, [], "", 0, 0, finish_reason="error") for o in outputs[1:]
        ]

    monkeypatch.setattr(LLMEngine, "step", broken_step)
    given = ["--model", str(model_dir), "--max-tokens", "2"]
    assert main(["generate", "a", "b", *given, "--json"]) == 1
    captured = capsys.readouterr()
    reasons = [one["finish_reason"] for one in json.loads(captured.out)["outputs"]]
    assert reasons == ["length", "error"]
    assert (
        without_plan(captured.err)
        == "error: the model's probabilities were not finite for prompt 2\n"
    )
