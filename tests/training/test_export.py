"""A trained trunk is the same model in transformers; what is written is what was trained."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.models.qwen4_exp.weights import load_model
from outrider.training.config import TrainConfig
from outrider.training.export import export_checkpoint
from outrider.training.train import make_trainer, run_to_the_end
from tests.models.parity import TOLERANCE, ReferenceForCausalLM, is_clear, recorded_margins
from tests.training.tiny_run import ROWS_PER_STEP, tiny_config, untrained, write_run

LENGTH = 40  # the indexers' budget is 8 keys, all of 11
NUM_TEXTS = 12


def test_transformers_gives_the_same_logits_on_a_trained_trunk(tmp_path: Path) -> None:
    options = {"schedule.max_tokens": 60 * ROWS_PER_STEP, "run.eval_every_steps": 100}
    path = write_run(tmp_path, **options, **{"run.checkpoint_every_minutes": 5.0})
    config = TrainConfig.from_toml(path)
    trainer = make_trainer(config)
    before = trainer.evaluate().trunk_loss
    export_dir = run_to_the_end(trainer, config)
    assert export_dir is not None
    assert trainer.evaluate().trunk_loss < before - 1.0, "trained"
    model = load_model(export_dir)
    reference = ReferenceForCausalLM.from_pretrained(export_dir, dtype=torch.float32).eval()
    ids = torch.randint(1, 4096, (NUM_TEXTS, LENGTH))
    ids[1, 17] = 0  # an end of text within, where the n-gram context starts anew
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits
        with recorded_margins((NUM_TEXTS, LENGTH)) as margins:
            logits = model.logits(model.model.forward_sequence(ids).streams)
    is_compared = is_clear(margins)
    # A score of 0 for two blocks is a tie, and hides the rest of its text.
    assert is_compared.float().mean() > 0.6
    assert expected.std() > 0.3
    assert (logits - expected).abs().amax(-1)[is_compared].max() < TOLERANCE


def test_an_export_loads_back(tmp_path: Path) -> None:
    model = untrained(tiny_config(64))
    export_checkpoint(model, BUNDLED_MODEL_DIR, tmp_path / "export")
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert all(t.dtype in (torch.bfloat16, torch.int64) for t in stored.values())
    loaded = load_model(tmp_path / "export")
    for name, parameter in model.named_parameters():
        rounded = parameter.bfloat16().float()
        assert torch.equal(loaded.get_parameter(name), rounded), name


def test_an_export_may_go_where_its_tokenizer_comes_from(tmp_path: Path) -> None:
    export_checkpoint(untrained(tiny_config(64)), BUNDLED_MODEL_DIR, tmp_path)
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    other = untrained(tiny_config(64), seed=1)
    export_checkpoint(other, tmp_path, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer
    rounded = other.lm_head.weight.bfloat16().float()
    assert torch.equal(load_model(tmp_path).lm_head.weight, rounded)
