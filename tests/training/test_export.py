"""A trained trunk is the same model in transformers."""

from pathlib import Path

import torch

from outrider.models.qwen4_exp.weights import load_model
from outrider.training.config import TrainConfig
from outrider.training.train import make_trainer, run_to_the_end
from tests.models.parity import TOLERANCE, ReferenceForCausalLM, is_clear, recorded_margins
from tests.training.tiny_run import ROWS_PER_STEP, write_run

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
