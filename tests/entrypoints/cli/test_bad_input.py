"""What bad input gets: one line that names the thing and what would be right, and exit code 2."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.entrypoints.cli import main
from tests.entrypoints.plan_line import without_plan
from tests.models.tiny_checkpoint import edit_json, edit_tensors


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail as wrong input does, and returns its line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = without_plan(captured.err)
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    return told


FLAGS: dict[str, tuple[list[str], str]] = {
    # -k and what drafts
    "k above": (["a", "-k", "9"], "-k must be from 0 to 8, got 9"),
    "k below": (["a", "-k", "-1"], "-k must be from 0 to 8, got -1"),
    "k fraction": (["a", "-k", "1.5"], "'-k'"),
    "k word": (["a", "-k", "many"], "'-k'"),
    "method alias": (
        ["a", "--speculative-config", '{"method": "qwen4_exp_mtp"}'],
        'speculative_config.method: write "mtp", not "qwen4_exp_mtp"',
    ),
    "method": (
        ["a", "--speculative-config", '{"method": "eagle"}'],
        'speculative_config.method must be "mtp" or "ngram", got \'eagle\'',
    ),
    "config key": (
        ["a", "--speculative-config", '{"num_speculative_token": 3}'],
        'the nearest is "speculative_config.num_speculative_tokens"',
    ),
    "config k": (
        ["a", "--speculative-config", '{"num_speculative_tokens": 1000000000}'],
        "speculative_config.num_speculative_tokens must be an integer from 1 to 8",
    ),
    "config k text": (
        ["a", "--speculative-config", '{"num_speculative_tokens": "3"}'],
        "speculative_config.num_speculative_tokens must be an integer from 1 to 8",
    ),
    "config quotes": (["a", "--speculative-config", "{'method': 'mtp'}"], "write double quotes"),
    "config comma": (
        ["a", "--speculative-config", '{"method": "mtp",}'],
        "remove the trailing comma",
    ),
    "contradiction": (
        [
            "a",
            "--speculative-config",
            '{"rejection_sample_method": "standard"}',
            "--additional-config",
            '{"rejection_sampler_config": {"enable_block_verify": true}}',
        ],
        "give one of the two",
    ),
    # sampling
    "temperature below": (["a", "--temperature", "-0.1"], "temperature must be a finite number"),
    "temperature nan": (["a", "--temperature", "nan"], "temperature must be a finite number, 0 or"),
    "temperature inf": (["a", "--temperature", "inf"], "temperature must be a finite number, 0 or"),
    "temperature word": (["a", "--temperature", "hot"], "'--temperature'"),
    "top_p zero": (["a", "--top-p", "0"], "top_p must be a number in (0, 1], got 0.0"),
    "top_p above": (["a", "--top-p", "1.01"], "top_p must be a number in (0, 1], got 1.01"),
    "top_p nan": (["a", "--top-p", "nan"], "top_p must be a number in (0, 1], got nan"),
    "top_k": (["a", "--top-k", "-2"], "top_k must be an integer -1 or more"),
    "min_p": (["a", "--min-p", "1.5"], "min_p must be a number in [0, 1], got 1.5"),
    "max_tokens": (["a", "--max-tokens", "0"], "max_tokens must be an integer 1 or more, got 0"),
    "seed fraction": (["a", "--seed", "1.5"], "'--seed'"),
    "seed word": (["a", "--seed", "lucky"], "'--seed': Input should be a valid integer"),
    "seed long": (["a", "--seed", str(1 << 63)], "seed must be an integer from -"),
    "rule": (["a", "--rule", "greedy"], "must be standard, block or coupled, got 'greedy'"),
    "n zero": (["a", "-n", "0"], "n must be an integer from 1 to 16384, got 0"),
    "n word": (["a", "--n", "two"], "'-n' / '--n'"),
    "stop empty": (["a", "--stop", "b", "--stop", ""], "stop[1] must be a text of one character"),
    "bad word": (["a", "--bad-word", ""], "bad_words[0] must be a text of one character or more"),
    "bias text": (["a", "--logit-bias", "5"], "--logit-bias must be a JSON object, "),
    "bias quotes": (["a", "--logit-bias", "{'5': 1}"], "--logit-bias: no valid JSON at column 2"),
    "bias value": (["a", "--logit-bias", '{"5": 101}'], "logit_bias[5] must be a number in [-100"),
    "bias twice": (["a", "--logit-bias", '{"5": 1, "5": 2}'], '--logit-bias: "5" is given twice'),
    "bias nan": (["a", "--logit-bias", '{"5": NaN}'], "logit_bias[5] must be a number in [-100,"),
    "bias id": (["a", "--logit-bias", '{"4096": 1}'], "token id 4096 in logit_bias is out of ran"),
    "penalty": (["a", "--presence-penalty", "2.5"], "presence_penalty must be a number in [-2, 2]"),
    "repetition": (["a", "--repetition-penalty", "0"], "repetition_penalty must be a finite numb"),
    "min_tokens": (["a", "--min-tokens", "129"], "min_tokens must not be more than max_tokens (12"),
    "logprobs below": (["a", "--json", "--logprobs", "-2"], "logprobs must be an integer -1 or mo"),
    "logprobs above": (["a", "--json", "--logprobs", "21"], "logprobs 21 is more than max_logprob"),
    "logprobs as text": (["a", "--logprobs", "2"], "--logprobs is printed with --json alone"),
    "prompt logprobs": (["a", "--prompt-logprobs", "2"], "--prompt-logprobs is printed with --js"),
    # engine
    "graphs": (
        ["a", "--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'],
        "compilation_config.cudagraph_mode FULL_DECODE_ONLY cannot be honoured",
    ),
    "additional": (["a", "--additional-config", '{"x": 1}'], "unknown option 'additional_config.x"),
    "device": (["a", "--device", "tpu9"], "device must be auto, cpu, cuda, cuda:0 or npu"),
    "dtype": (["a", "--dtype", "int4"], "dtype must be auto, float32 or float64, got 'int4'"),
    "memory": (["a", "--kv-cache-memory", "lots"], "must be a number of bytes such as 4GiB"),
    "model": (["a", "--model", ""], "model must be the path of a checkpoint, got ''"),
    "max_model_len": (["a", "--max-model-len", "0"], "max_model_len must be an integer 1 or more"),
    # prompts
    "no prompt file": (["--prompts", "nowhere.txt"], "nowhere.txt: cannot be read: No such file"),
    "a folder": (["--prompts", "."], "cannot be read: Is a directory"),
    "both": (["a", "--prompts", "x.txt"], "as arguments or as --prompts, not both"),
    "stdin twice": (["a", "-"], "- (stdin) is one prompt and excludes others"),
    # the command line itself
    "flag": (["a", "--temprature", "1"], "No such option: --temprature"),
}


@pytest.mark.parametrize(("arguments", "reason"), FLAGS.values(), ids=FLAGS.keys())
def test_flags(
    model_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in fails(capsys, "generate", "--model", str(model_dir), *arguments)


PROMPTS: dict[str, tuple[bytes, str]] = {
    "no line": (b"", "no prompt in it"),
    "no JSON": (b'{"prompt": "a"}\n{"prompt": \n', "line 2: no valid JSON"),
    "no object": (b"[]\n", 'line 1: must be an object such as {"prompt": "def f("}, got []'),
    "no prompt": (b'{"text": "a"}\n', 'line 1: must be an object such as {"prompt": "def f("}'),
    "number": (b'{"prompt": 5}\n', "prompt must be a text, got 5"),
    "empty": (b'{"prompt": "a"}\n{"prompt": ""}\n', "prompts[1]: the prompt is empty"),
    "long": (
        b'{"prompt": "a"}\n' + json.dumps({"prompt_token_ids": [5] * 256}).encode(),
        "prompts[1]: the prompt has 256 tokens, and the maximum context length is 256 tokens",
    ),
    "id out of range": (b'{"prompt_token_ids": [4096]}', "token id 4096 is out of range: ids are"),
    "id below": (b'{"prompt_token_ids": [-1]}', "token id -1 is out of range: ids are 0 to 4095"),
    "id fraction": (b'{"prompt_token_ids": [1.5]}', "prompt_token_ids[0] must be a token id"),
    "surrogate": (b'{"prompt": "\\ud800"}', "the prompt is no valid Unicode text"),
    "latin-1": (b'{"prompt": "\xe9"}', "not UTF-8 text at byte 12"),
}


@pytest.mark.parametrize(("data", "reason"), PROMPTS.values(), ids=PROMPTS.keys())
def test_prompt_files(
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
    reason: str,
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    for command in ("generate", "check"):
        line = fails(capsys, command, "--prompts", str(path), "--model", str(model_dir))
        assert reason in line


def test_an_empty_prompt(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "generate", "", "--model", str(model_dir))
    assert line == "error: the prompt is empty: at least one token is needed\n"


def test_a_prompt_longer_than_the_model(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("generate", "def f(x):", "--model", str(model_dir), "--max-model-len", "4")
    assert (
        "maximum context length is 4 tokens (max_model_len): no room is left for output"
        in fails(capsys, *given)
    )
    assert "max_model_len" in fails(capsys, *given[:-1], "257")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-k", "0"], "-k must be numbers from 1 to 8 such as 3, 1,2,4 or 1-8, got '0'"),
        (["-k", "1-9"], "-k must be numbers from 1 to 8 such as 3, 1,2,4 or 1-8, got '1-9'"),
        (["--max-tokens", "0"], "--max-tokens must be an integer 1 or more, got 0"),
        (["--num-prompts", "-3"], "--num-prompts must be an integer 1 or more, got -3"),
        (["prompt"], "unexpected extra argument"),
    ],
)
def test_flags_of_check(
    model_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in fails(capsys, "check", *arguments, "--model", str(model_dir))


def test_a_flag_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'--seed' requires an argument" in fails(capsys, "generate", "a", "--seed")


def test_an_argument_that_is_no_unicode(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What Python makes of the byte 0xff in an argument.
    line = fails(capsys, "generate", "a\udcff", "--model", str(model_dir))
    assert line == "error: the prompt is no valid Unicode text: '\\udcff' at character 1\n"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such command 'generat'. Did you mean 'generate'?" in fails(capsys, "generat")
    assert main([]) == 2
    assert "Usage: outrider" in capsys.readouterr().out


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(model_type="llama"))


def unknown_config_key(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(hiden_size=1))


def quantised(folder: Path) -> None:
    quantization = {"quant_method": "fp8"}
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=quantization))


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def large_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


def slash_in_name(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"../evil": t["lm_head.weight"].clone()}))


def drop_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.linear_attn.out_proj.weight"))


def left_over_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.extra.weight": t["lm_head.weight"].clone()}))


def one_shape(folder: Path) -> None:
    def cut(tensors: Any) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()

    edit_tensors(folder, cut)


def index_leaves_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:5000])


def large_tokenizer(folder: Path) -> None:
    def add(config: Any) -> None:
        config["added_tokens_decoder"]["4096"] = {"content": "<new>", "special": True}

    edit_json(folder / "tokenizer_config.json", add)


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


CHECKPOINTS: dict[Callable[[Path], None], str] = {
    no_folder: "own: no such checkpoint directory",
    drop_config: "config.json: missing",
    other_architecture: 'model_type: expected "qwen4_exp"',
    unknown_config_key: "unknown key 'hiden_size'",
    quantised: "quantised checkpoints ('fp8') are not supported",
    drop_weights: "neither model.safetensors nor model.safetensors.index.json is there",
    cut_weights: "model.safetensors: truncated",
    cut_header: "model.safetensors: truncated",
    large_header: "model.safetensors: truncated",
    slash_in_name: "'../evil' is no valid tensor name",
    drop_tensor: "model.layers.1.linear_attn.out_proj.weight",
    left_over_tensor: "model.extra.weight",
    one_shape: "lm_head.weight",
    index_leaves_the_folder: "'../model.safetensors', which is no plain *.safetensors file name",
    shard_is_missing: "model-00001-of-00002.safetensors: missing",
    pickle_only: "only safetensors is read",
    drop_tokenizer: "tokenizer.json: missing",
    cut_tokenizer: "tokenizer.json: no valid tokenizer",
    large_tokenizer: "larger than the embedding: 4097 tokens, but vocab_size in config.json is 40",
}


@pytest.mark.parametrize(
    ("damage", "reason"), CHECKPOINTS.items(), ids=[damage.__name__ for damage in CHECKPOINTS]
)
@pytest.mark.parametrize("command", [["generate", "a"], ["generate", "a", "-k", "0"], ["check"]])
def test_checkpoints(
    own_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    damage(own_model_dir)
    assert main([*command, "--model", str(own_model_dir)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # The loader may have logged what it skips before.
    *logged, line = captured.err.splitlines()
    assert all("skipped" in one for one in logged)
    assert line.startswith("error: ")
    assert reason in line
