"""The configuration is transformers', field by field, and what it does not know is an error."""

import json
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.ops.ngram_hash import setup
from tests.models.tiny_checkpoint import TINY, tiny_config

Values = dict[str, Any]

# The released model, from public transcriptions of its config.json.
REAL_TEXT: Values = {
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    * 12,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "pad_token_id": None,
    "initializer_range": 0.02,
    "use_cache": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "mtp": {
        "hybrid": True,
        "layer_types": ["full_attention"],
        "mtp_use_hidden_state_from_layer": None,
        "num_hidden_layers": 1,
        "rope_theta": 10000000,
    },
}
REAL: Values = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "vision_config": {"model_type": "qwen4_exp", "depth": 27, "hidden_size": 1152},
    "text_config": REAL_TEXT,
}
# Fields of ours that transformers has elsewhere or not at all.
OWN_FIELDS = {
    "rope_theta",
    "partial_rotary_factor",
    "eos_token_ids",
    "mtp_num_hidden_layers",
    "index_share_for_mtp_iteration",
}


def test_real_model_in_both_layouts() -> None:
    config = Qwen4ExpConfig.from_dict(REAL)
    assert config == Qwen4ExpConfig.from_dict(REAL_TEXT)
    assert config.stream_width == 10240
    assert config.rotary_dim == 64
    assert config.rope_theta == 1e7
    assert config.num_index_blocks == 512
    assert (config.linear_key_dim, config.linear_value_dim) == (2048, 6144)
    assert config.linear_conv_dim == 10240
    assert config.ple_layer_indices == (1,)
    assert config.layer_types[3] == "indexed_attention"
    assert len(config.linear_layer_indices) == 36
    assert config.indexed_layer_indices == tuple(range(3, 48, 4))
    assert config.mtp_num_hidden_layers == 1
    assert config.seed == 1234
    assert config.norm_topk_prob
    assert not config.index_share_for_mtp_iteration
    assert config.output_gate == "sigmoid"


def test_ngram_hash_of_the_real_model() -> None:
    """Values that the released checkpoint stores in its hash buffers."""
    config = Qwen4ExpConfig.from_dict(REAL)
    tails = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    assert config.ngram_head_vocab_sizes(0) == tuple(20_000_000 + tail for tail in tails)
    assert config.ngram_multipliers(0) == (23703573157769, 20109073645365, 8052911324071)
    offsets = config.ngram_head_offsets(0)
    assert offsets[:3] == (0, 20000003, 40000026)
    assert offsets[-1] + 20000171 == 320001446
    assert config.ngram_table_rows(0) == 320001536
    assert config.ngram_head_dim == 160
    assert max(config.ngram_multipliers(0)) * (config.vocab_size - 1) < 1 << 63
    # A second layer goes on in the list of primes, with offsets from 0 again.
    second = config.ngram_head_vocab_sizes(1)
    assert second[0] > config.ngram_head_vocab_sizes(0)[-1]
    assert config.ngram_head_offsets(1)[:2] == (0, second[0])
    assert config.ngram_multipliers(1) != config.ngram_multipliers(0)


@pytest.mark.parametrize(
    ("base", "ngram_size", "heads", "vocab_size", "seed"),
    [(53, 3, 3, 61, 1234), (54, 2, 4, 248320, 0), (2, 5, 2, 7, 99), (20_000_000, 4, 5, 5000, -3)],
)
def test_ngram_hash_equals_transformers(
    base: int, ngram_size: int, heads: int, vocab_size: int, seed: int
) -> None:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as reference

    num_heads = (ngram_size - 1) * heads
    for ple_index in range(3):
        expected = tuple(
            reference._find_nth_prime_after(base - 1, ple_index * num_heads + head + 1)
            for head in range(num_heads)
        )
        assert setup.head_vocab_sizes(base, num_heads, ple_index) == expected
        multipliers = reference._build_layer_multipliers(vocab_size, ngram_size, ple_index, seed)
        ours = setup.layer_multipliers(vocab_size, ngram_size, ple_index, seed)
        assert list(ours) == multipliers.tolist()


def test_primes() -> None:
    sieve = [n for n in range(2, 2000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert [n for n in range(2000) if setup.is_prime(n)] == sieve
    assert setup.is_prime((1 << 61) - 1)
    # Composites that fool one base of the Miller-Rabin test, or several.
    assert not any(map(setup.is_prime, (2047, 3215031751, 341550071728321, (1 << 61) + 1)))


def test_fields_and_defaults_are_those_of_transformers() -> None:
    from transformers import Qwen4ExpTextConfig

    reference = Qwen4ExpTextConfig().to_dict()
    ours = {field.name for field in fields(Qwen4ExpConfig)}
    generic = {"use_cache", "attention_bias", "attention_dropout", "output_router_logits"}
    architecture = set(vars(Qwen4ExpTextConfig)["__annotations__"]) & reference.keys()
    assert architecture - generic - {"rope_parameters"} == ours - OWN_FIELDS
    linear = ["linear_attention"]
    config = Qwen4ExpConfig.from_dict({**reference, "layer_types": linear * 40})
    expected = {**reference, "layer_types": linear * 40}
    for name in sorted(ours - OWN_FIELDS):
        value = getattr(config, name)
        value = list(value) if isinstance(value, tuple) else value
        value = value or None if name.startswith("indexer_") else value
        assert value == expected[name], name
    assert config.rope_theta == reference["rope_parameters"]["rope_theta"]
    assert config.partial_rotary_factor == 1.0


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"layer_types": ["indexed_attention"] * 4, "ple_layer_ids": []},
        {"eos_token_id": [2, 5]},
        {"output_gate_type": None, "norm_topk_prob": False, "tie_word_embeddings": True},
        {"layer_types": None, "ple_layer_ids": [3, 1, 3], "ple_embed_dim": None, "hidden_size": 12},
        {"layer_types": None, "full_attention_interval": 2, "ple_layer_ids": None},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25}},
        {
            "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25},
            "rope_scaling": {"rope_type": "default", "rope_theta": 2e5},
        },
    ],
    ids=str,
)
def test_reads_a_file_as_transformers_does(values: Values) -> None:
    from transformers import Qwen4ExpTextConfig

    file = {**TINY, **values, "model_type": "qwen4_exp_text"}
    config = Qwen4ExpConfig.from_dict(file)
    reference = Qwen4ExpTextConfig.from_dict(dict(file))
    assert Qwen4ExpConfig.from_dict(reference.to_dict()) == config
    assert Qwen4ExpConfig.from_dict(config.to_hf_dict()) == config
    again = Qwen4ExpTextConfig.from_dict(config.to_hf_dict()).to_dict()
    # transformers keeps an unknown key as it is; ours goes into rope_parameters.
    for name in reference.to_dict().keys() - {"architectures", "partial_rotary_factor"}:
        assert again[name] == reference.to_dict()[name], name


def test_names_of_sparse_attention_are_one() -> None:
    names = ["full_attention", "indexed_attention", "qwen_sparse_attention", "linear_attention"]
    config = tiny_config(layer_types=names, ple_layer_ids=[4])
    assert config.layer_types == ("indexed_attention",) * 3 + ("linear_attention",)


def test_absent_fields_and_nested_head() -> None:
    file = {**TINY, "model_type": "qwen4_exp_text", "mtp": {"num_hidden_layers": 2}}
    del file["mtp_num_hidden_layers"]
    assert Qwen4ExpConfig.from_dict(file).mtp_num_hidden_layers == 2
    del file["mtp"]
    config = Qwen4ExpConfig.from_dict(file)
    assert config.mtp_num_hidden_layers == 0
    assert "mtp_num_hidden_layers" not in config.to_hf_dict()
    assert tiny_config(ple_embed_dim=0, hidden_size=12).ple_embed_dim == 12


def test_is_frozen_and_hashable() -> None:
    config = tiny_config()
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 3  # type: ignore[misc]
    assert hash(config) == hash(tiny_config())


WRONG_FIELDS: list[tuple[Values, str]] = [
    ({"hidden_sizes": 16}, "unknown key 'hidden_sizes'; did you mean \"hidden_size\"?"),
    ({"eos_token_ids": [2]}, "unknown key 'eos_token_ids'"),
    ({"hidden_size": "16"}, "hidden_size must be int, got '16'"),
    ({"hidden_size": True}, "hidden_size must be int, got True"),
    ({"hidden_size": 16.0}, "hidden_size must be int, got 16.0"),
    ({"hidden_size": 0}, "hidden_size must be 1 or more, got 0"),
    ({"hidden_size": 1 << 50}, "hidden_size must be"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
    ({"mtp_num_hidden_layers": 10**9}, "mtp_num_hidden_layers must be at most"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be float, got 1000"),
    ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be float, got 1000"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be bool, got 1"),
    ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers 4"),
    ({"layer_types": ["mamba"] * 4}, "layer_types: unknown 'mamba'; known are linear_attention"),
    ({"layer_types": "linear_attention"}, "layer_types must be list of str"),
    ({"layer_types": [["a"]] * 4}, "layer_types must be list of str"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be an int"),
    ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key"),
    ({"partial_rotary_factor": 0.0}, "partial_rotary_factor must be in (0, 1], got 0.0"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be in (0, 1], got 1.5"),
    ({"partial_rotary_factor": 0.4}, "head_dim * partial_rotary_factor must be an even number"),
    ({"indexer_head_dim": 2}, "indexer_head_dim must be at least the 4 rotated dimensions"),
    ({"indexer_budget": 9}, "indexer_budget must be a multiple of indexer_compress_ratio"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1, got 2"),
    ({"indexer_n_heads": None}, "indexer_n_heads is missing"),
    ({"hc_count": 1}, "hc_count must be greater than 1, got 1"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok must be at most num_experts, got 4 and 3"),
    ({"output_gate_type": "tanh"}, "output_gate_type must be sigmoid or silu, got 'tanh'"),
    ({"hidden_act": "gelu"}, "hidden_act must be \"silu\", got 'gelu'"),
    ({"attention_bias": True}, "attention_bias must be False, got True"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings must be False"),
    ({"ple_layer_ids": [4]}, "ple_layer_ids: layer 4 must be a linear_attention layer"),
    ({"ple_layer_ids": [0]}, "ple_layer_ids counts layers from 1 to 4, got 0"),
    ({"ple_layer_ids": [5]}, "ple_layer_ids counts layers from 1 to 4, got 5"),
    ({"ple_layer_ids": ["1"]}, "ple_layer_ids must be list of int, got ('1',)"),
    ({"ple_embed_dim": 25}, "ple_embed_dim must be a multiple of the 6 n-gram heads, got 25"),
    ({"ngram_size": 1}, "(ngram_size - 1) * heads_per_ngram must be in [1, 4096], got 0"),
    ({"heads_per_ngram": 10**6}, "(ngram_size - 1) * heads_per_ngram must be in [1, 4096]"),
    ({"eos_token_id": None}, "eos_token_id must be set where ple_layer_ids is"),
    ({"eos_token_id": []}, "eos_token_id must be set where ple_layer_ids is"),
    ({"eos_token_id": 61}, "eos_token_id must be in [0, 61), got 61"),
    ({"eos_token_id": [2, "3"]}, "eos_token_ids must be list of int"),
    ({"rope_parameters": {"rope_type": "yarn"}}, 'rope_parameters.rope_type must be "default"'),
    # By hand, beside what the file has.
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}},
        'rope_type must be "default"',
    ),
    ({"rope_parameters": {"factor": 4}}, "unknown key 'rope_parameters.factor'"),
    ({"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be greater than 0"),
    (
        {"mtp": {"num_hidden_layers": 2}},
        "mtp.num_hidden_layers is 2 but mtp_num_hidden_layers is 1",
    ),
    ({"mtp": {"rope_theta": 5.0}}, "mtp.rope_theta is 5.0 but rope_theta is absent"),
    ({"mtp": {"layer_types": ["linear_attention"]}}, "mtp.layer_types: expected full_attention"),
    ({"mtp": {"layer_types": 1}}, "mtp.layer_types must be a list, got 1"),
    (
        {"mtp": {"mtp_use_hidden_state_from_layer": 3}},
        "mtp.mtp_use_hidden_state_from_layer must be",
    ),
    ({"mtp": {"depth": 1}}, "unknown key 'mtp.depth'"),
    ({"mtp": 1}, "mtp must be an object, got 1"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints ('fp8') are not"),
    ({"model_type": "qwen3_next"}, 'model_type: expected "qwen4_exp" or "qwen4_exp_text"'),
    ({"model_type": None}, 'expected "qwen4_exp" or "qwen4_exp_text", got None'),
    ({"model_type": "qwen4_exp"}, "text_config is missing"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected Qwen4ExpForCausalLM or"),
]


@pytest.mark.parametrize(("values", "phrase"), WRONG_FIELDS, ids=lambda value: str(value)[:50])
def test_wrong_fields_are_named(values: Values, phrase: str) -> None:
    file = {"model_type": "qwen4_exp_text", **TINY, **values}
    with pytest.raises(CheckpointError, match=re.escape(phrase)) as error:
        Qwen4ExpConfig.from_dict(file)
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda d: d.update(text_config=None), "text_config must be an object, got None"),
        (lambda d: d.update(text_confg={}), "unknown key 'text_confg'; did you mean"),
        (lambda d: d.update(hidden_size=3), "unknown key 'hidden_size'"),
        (lambda d: d.update(quantization_config={"quant_method": "fp8"}), "quantised checkpoints"),
        (lambda d: d["text_config"].update(model_type="llama"), "text_config.model_type: expected"),
        (lambda d: d["text_config"].update(hc=1), "unknown key 'hc'"),
        (lambda d: d["text_config"].update(quantization_config={}), "quantised checkpoints"),
    ],
)
def test_wrong_multimodal_files_are_named(change: Callable[[Values], object], phrase: str) -> None:
    file = json.loads(json.dumps(REAL))
    change(file)
    with pytest.raises(CheckpointError, match=re.escape(phrase)):
        Qwen4ExpConfig.from_dict(file)


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (None, "config.json: missing"),
        (b"", "config.json: no valid JSON at line 1 column 1"),
        (b'{"a": 1,}', "config.json: no valid JSON at line 1 column 9"),
        (b"\xff", "config.json: not UTF-8 text"),
        (b"[]", "config.json: must hold a JSON object, got list"),
        (b"[" * 100_000, "config.json: no valid JSON: nested too deep"),
        (b"{}", 'config.json: model_type: expected "qwen4_exp"'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes | None, phrase: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/{phrase}")):
        Qwen4ExpConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        Qwen4ExpConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        Qwen4ExpConfig.from_pretrained(tmp_path / ("a" * 300))


def test_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    assert Qwen4ExpConfig.from_pretrained(str(tmp_path)) == Qwen4ExpConfig.from_dict(REAL)
