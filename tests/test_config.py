"""An option is honoured or refused by name: nothing is parsed and ignored."""

import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import (
    EngineConfig,
    RejectionSamplerConfig,
    SpeculativeConfig,
    parse_json_object,
    parse_size,
)
from outrider.errors import ConfigError

Values = dict[str, Any]


def block_verify(enabled: bool) -> Values:
    return {"rejection_sampler_config": {"enable_block_verify": enabled}}


def test_defaults_decode_plainly() -> None:
    config = EngineConfig.from_kwargs()
    assert config == EngineConfig()
    assert config.speculative is None
    assert config.num_speculative_tokens == 0
    assert config.rejection_sample_method == "block"


def test_options_of_vllm() -> None:
    config = EngineConfig.from_kwargs(
        model=Path("some/model"),
        dtype="float64",
        seed=7,
        max_model_len=100,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=8,
        kv_cache_memory_bytes="2GiB",
        speculative_config='{"method": "mtp", "num_speculative_tokens": 5}',
        additional_config=block_verify(True),
        enforce_eager=True,
        tensor_parallel_size=1,
        trust_remote_code=False,
        quantization=None,
    )
    assert config == EngineConfig(
        model="some/model",
        dtype="float64",
        seed=7,
        max_model_len=100,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=8,
        kv_cache_memory=2 << 30,
        speculative=SpeculativeConfig("mtp", 5),
        rejection_sampler=RejectionSamplerConfig(enable_block_verify=True),
    )
    assert config.torch_dtype is torch.float64
    assert config.num_speculative_tokens == 5


# As the article writes them, for the command line of vLLM.
ARTICLE = {
    "speculative_config": '{"method":"mtp","num_speculative_tokens":3,"enforce_eager":true}',
    "additional_config": '{"rejection_sampler_config":{"enable_block_verify":true}}',
}
ARTICLE_GRAPHS = '{"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[8,16,32,64]}'


def test_the_options_of_the_article() -> None:
    """As JSON text and as objects of Python they mean the same."""
    from_json = EngineConfig.from_kwargs(**ARTICLE)
    from_python = EngineConfig.from_kwargs(**{k: json.loads(v) for k, v in ARTICLE.items()})
    assert from_json == from_python
    assert from_json.speculative == SpeculativeConfig("mtp", 3)
    assert from_json.uses_mtp
    assert from_json.rejection_sampler.enable_block_verify is True
    assert from_json.rejection_sample_method == "block"


@pytest.mark.parametrize("given", [ARTICLE_GRAPHS, json.loads(ARTICLE_GRAPHS)])
def test_the_graphs_of_the_article_are_refused(given: object) -> None:
    message = (
        "compilation_config.cudagraph_mode FULL_DECODE_ONLY cannot be honoured: this build runs "
        'every step eagerly; write "NONE" or leave compilation_config out'
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        EngineConfig.from_kwargs(**ARTICLE, compilation_config=given)


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        "{}",
        {"cudagraph_mode": "NONE"},
        '{"cudagraph_mode": "NONE", "cudagraph_capture_sizes": []}',
        {"cudagraph_mode": None},
    ],
)
def test_no_graphs_are_what_there_is(given: object) -> None:
    config = EngineConfig.from_kwargs(**ARTICLE, compilation_config=given)
    assert config.compilation.cudagraph_mode in (None, "NONE")
    assert config.compilation.cudagraph_capture_sizes == ()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_every_mode_of_graphs_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"cudagraph_mode {mode} cannot be honoured"):
        EngineConfig.from_kwargs(compilation_config={"cudagraph_mode": mode})


def test_the_dict_given_is_left_as_it_is() -> None:
    speculative = {"num_speculative_tokens": 2, "enforce_eager": True}
    given = dict(speculative)
    EngineConfig.from_kwargs(speculative_config=given)
    assert given == speculative


@pytest.mark.parametrize("number", range(1, 9))
def test_every_number_of_drafts(number: int) -> None:
    for given in ({"num_speculative_tokens": number}, f'{{"num_speculative_tokens": {number}}}'):
        assert EngineConfig.from_kwargs(speculative_config=given).num_speculative_tokens == number


@pytest.mark.parametrize(
    ("method", "enabled", "rule"),
    [
        (None, None, "block"),
        (None, True, "block"),
        (None, False, "standard"),
        ("standard", None, "standard"),
        ("standard", False, "standard"),
        ("block", True, "block"),
        ("coupled", None, "coupled"),
    ],
)
def test_two_ways_to_name_the_rule(method: Any, enabled: bool | None, rule: str) -> None:
    config = EngineConfig(
        speculative=SpeculativeConfig(rejection_sample_method=method),
        rejection_sampler=RejectionSamplerConfig(enabled),
    )
    assert config.rejection_sample_method == rule


@pytest.mark.parametrize(
    ("method", "enabled"),
    [("standard", True), ("block", False), ("coupled", True), ("coupled", False)],
)
def test_contradicting_rules(method: str, enabled: bool) -> None:
    phrase = f'rejection_sample_method is "{method}" but .*enable_block_verify {enabled}'.lower()
    with pytest.raises(ConfigError, match=phrase):
        EngineConfig.from_kwargs(
            speculative_config={"rejection_sample_method": method},
            additional_config=block_verify(enabled),
        )


K = "speculative_config.num_speculative_tokens must be an integer from 1 to 8, got "
BROKEN_SPECULATIVE: list[tuple[object, str]] = [
    ("{'method': 'mtp'}", "speculative_config: no valid JSON at column 2: write double quotes"),
    ("{\"method\": 'mtp'}", "speculative_config: no valid JSON at column 12: write double quotes"),
    ('{"method": "mtp",}', "speculative_config: no valid JSON at column 18: remove the trailing"),
    ('{"a": [1, ]}', "speculative_config: no valid JSON at column 11: remove the trailing comma"),
    (
        '{"method": None}',
        "speculative_config: no valid JSON at column 12: write true, false or null",
    ),
    ('{"method" "mtp"}', "speculative_config: no valid JSON at column 11: expecting ':' delimiter"),
    ("", "speculative_config: no valid JSON at column 1: expecting value"),
    ("mtp", "speculative_config: no valid JSON at column 1: expecting value: mtp"),
    ('"mtp"', 'speculative_config must be a JSON object, {"name": value}, got'),
    ('{"method": "mtp", "method": "mtp"}', 'speculative_config: "method" is given twice'),
    ('{"method":\n "mtp",\n}', "no valid JSON at column 20: remove the trailing comma"),
    ("[" * 100_000, "speculative_config: no valid JSON: nested too deep"),
    (3, "speculative_config must be a dict or a JSON object, got 3"),
    ({"method": "qwen4_exp_mtp"}, 'speculative_config.method: write "mtp", not "qwen4_exp_mtp"'),
    ({"method": "deepseek_mtp"}, 'speculative_config.method: write "mtp", not "deepseek_mtp"'),
    ({"method": "mpt"}, 'speculative_config.method must be "mtp" or "ngram", got \'mpt\''),
    ({"method": "MTP"}, 'speculative_config.method must be "mtp" or "ngram", got \'MTP\''),
    ({"method": "eagle3"}, 'speculative_config.method must be "mtp" or "ngram", got \'eagle3\''),
    ({"method": None}, 'speculative_config.method must be "mtp" or "ngram", got None'),
    ({"num_speculative_tokens": 0}, K + "0 (leave speculative_config out for plain decoding)"),
    ({"num_speculative_tokens": -1}, K + "-1"),
    ({"num_speculative_tokens": 9}, K + "9"),
    ({"num_speculative_tokens": 10**9}, K + "1000000000"),
    ({"num_speculative_tokens": 10**5000}, K + "a int too long to print"),
    ({"num_speculative_tokens": "3"}, K + "'3'"),
    ({"num_speculative_tokens": 3.0}, K + "3.0"),
    ({"num_speculative_tokens": True}, K + "True"),
    ({"num_speculative_tokens": None}, K + "None"),
    (
        {"num_spec_tokens": 3},
        "unknown option 'speculative_config.num_spec_tokens'; the nearest is "
        '"speculative_config.num_speculative_tokens"',
    ),
    ({"draft_sample_method": "random"}, "draft_sample_method must be probabilistic or greedy"),
    (
        {"rejection_sample_method": "blok"},
        "rejection_sample_method must be standard, block or coupled, got 'blok'",
    ),
    ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max must be an integer 1 or more"),
    ({"method": "ngram", "prompt_lookup_min": True}, "prompt_lookup_min must be an integer 1"),
    (
        {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3},
        "prompt_lookup_min must not be more than prompt_lookup_max (2), got 3",
    ),
    (
        {"prompt_lookup_max": 3},
        'speculative_config.prompt_lookup_max belongs to the method "ngram"',
    ),
    (
        {"method": "ngram", "index_share_for_mtp_iteration": True},
        'speculative_config.index_share_for_mtp_iteration belongs to the method "mtp"',
    ),
    (
        {"method": "ngram", "draft_sample_method": "probabilistic"},
        'speculative_config.draft_sample_method "probabilistic" belongs to the method "mtp"',
    ),
    ({"method": "ngrams"}, 'speculative_config.method must be "mtp" or "ngram", got \'ngrams\''),
    ({"method": "ngram", "prompt_lookup_max": "3"}, "prompt_lookup_max must be an integer 1 or"),
    ({"method": "ngram", "prompt_lookup": 3}, 'the nearest is "speculative_config.prompt_lookup_'),
    ({"max_model_len": 0}, "speculative_config.max_model_len must be an integer 1 or more, got 0"),
    ({"index_share_for_mtp_iteration": 1}, "index_share_for_mtp_iteration must be true or false"),
    ({"enforce_eager": False}, "speculative_config.enforce_eager: this build supports only True"),
    ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size: this build supports only 1"),
    ({"model": "other"}, "speculative_config.model: this build supports only None, got 'other'"),
]


@pytest.mark.parametrize(("given", "phrase"), BROKEN_SPECULATIVE)
def test_broken_speculative_config(given: object, phrase: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(phrase)) as error:
        EngineConfig.from_kwargs(speculative_config=given)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


BROKEN_OPTIONS: list[tuple[Values, str]] = [
    ({"max_modl_len": 3}, "unknown option 'max_modl_len'; the nearest is \"max_model_len\""),
    ({"speculative": {}}, "unknown option 'speculative'; the nearest is \"speculative_config\""),
    ({"rejection_sampler": None}, "unknown option 'rejection_sampler'"),
    (
        {"additional_config": {"rejection_sampler": {}}},
        'the nearest is "additional_config.rejection',
    ),
    ({"additional_config": block_verify(True) | {"x": 1}}, "unknown option 'additional_config.x'"),
    (
        {"additional_config": {"rejection_sampler_config": {"block_verify": True}}},
        'the nearest is "additional_config.rejection_sampler_config.enable_block_verify"',
    ),
    ({"additional_config": block_verify("yes")}, "enable_block_verify must be true or false"),
    ({"additional_config": "{'a': 1}"}, "additional_config: no valid JSON at column 2"),
    ({"model": ""}, "model must be the path of a checkpoint, got ''"),
    ({"model": 3}, "model must be the path of a checkpoint, got 3"),
    ({"dtype": "bfloat16"}, "dtype must be auto, float32 or float64, got 'bfloat16'"),
    ({"device": "gpu"}, "device must be auto, cpu, cuda, cuda:0 or npu, got 'gpu'"),
    ({"device": 0}, "device must be auto, cpu, cuda, cuda:0 or npu, got 0"),
    ({"seed": 1.5}, "seed must be an integer from -9223372036854775808 to"),
    ({"seed": True}, "seed must be an integer"),
    ({"seed": 1 << 63}, "seed must be an integer"),
    ({"max_model_len": 0}, "max_model_len must be an integer 1 or more, got 0"),
    ({"max_num_seqs": "8"}, "max_num_seqs must be an integer 1 or more, got '8'"),
    ({"block_size": -1}, "block_size must be an integer 1 or more, got -1"),
    ({"kv_cache_memory": "much"}, "kv_cache_memory must be a number of bytes such as 4GiB"),
    ({"kv_cache_memory": 0.5}, "kv_cache_memory must be an integer 1 or more, got 0.5"),
    ({"kv_cache_memory": 1, "kv_cache_memory_bytes": 1}, "are the same option: give one"),
    (
        {"max_num_batched_tokens": 3, "speculative_config": {}},
        "max_num_batched_tokens must be greater than num_speculative_tokens (3), got 3",
    ),
    ({"enforce_eager": False}, "enforce_eager: this build supports only True, got False"),
    ({"enforce_eager": 1}, "enforce_eager: this build supports only True, got 1"),
    ({"tensor_parallel_size": 8}, "tensor_parallel_size: this build supports only 1, got 8"),
    (
        {"compilation_config": {"level": 3}},
        "unknown option 'compilation_config.level'; the nearest is",
    ),
    (
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        "compilation_config.cudagraph_mode FULL_DECODE_ONLY cannot be honoured: this build runs",
    ),
    ({"compilation_config": {"cudagraph_mode": "full"}}, "cudagraph_mode must be NONE, PIECEWISE,"),
    (
        {"compilation_config": {"cudagraph_capture_sizes": [8, 16]}},
        "compilation_config.cudagraph_capture_sizes cannot be honoured",
    ),
    (
        {"compilation_config": {"cudagraph_capture_sizes": [8, 0]}},
        "compilation_config.cudagraph_capture_sizes[1] must be an integer 1 or more, got 0",
    ),
    (
        {"compilation_config": {"cudagraph_capture_sizes": 8}},
        "compilation_config.cudagraph_capture_sizes must be a list of integers, got 8",
    ),
    ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be an integer 0"),
    ({"max_logprobs": -2}, "max_logprobs must be an integer -1 or more, got -2"),
    (
        {"logprobs_mode": "raw_logits"},
        "logprobs_mode must be raw_logprobs or processed_logprobs, got 'raw_logits'",
    ),
    ({"trust_remote_code": True}, "trust_remote_code: this build supports only False, got True"),
    ({"quantization": "fp8"}, "quantization: this build supports only None, got 'fp8'"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false, got 1"),
    ({"prefix_cache_memory": "much"}, "prefix_cache_memory must be a number of bytes such as 4GiB"),
    ({"prefix_cache_memory": 0}, "prefix_cache_memory must be an integer 1 or more, got 0"),
    (
        {"prefix_cache_memory": 1, "enable_prefix_caching": False},
        "prefix_cache_memory needs enable_prefix_caching true",
    ),
    ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization is not supported: give the bytes"),
]


@pytest.mark.parametrize(("options", "phrase"), BROKEN_OPTIONS, ids=lambda v: str(v)[:50])
def test_broken_options(options: Values, phrase: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(phrase)) as error:
        EngineConfig.from_kwargs(**options)
    assert "\n" not in str(error.value)


def test_json_errors_name_the_flag_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^--speculative-config: no valid JSON at column 2"):
        parse_json_object("--speculative-config", "{'method': 'mtp'}")
    assert parse_json_object("--speculative-config", '{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("4G", 4 << 30), ("4GiB", 4 << 30), ("512 MB", 512 << 20), ("1k", 1024)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("kv_cache_memory", text) == size


def test_auto_is_resolved_into_a_new_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    config = EngineConfig()
    resolved = config.resolve()
    assert (config.device, config.dtype) == ("auto", "auto")
    assert (resolved.device, resolved.dtype) == ("cpu", "float32")
    assert resolved.resolve() == resolved
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    assert config.resolve().device == "cuda"


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "meta"])
def test_device_that_is_not_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device != "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=f"device '{device}' is not there; write auto or cpu"):
        EngineConfig(device=device).resolve()


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


def test_a_dict_in_place_of_the_object_says_where_dicts_go() -> None:
    with pytest.raises(ConfigError, match="give a dict as speculative_config to from_kwargs"):
        EngineConfig(speculative={"method": "mtp"})  # type: ignore[arg-type]
