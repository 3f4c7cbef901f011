"""Collection, packing and windows of the corpus."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outrider.errors import OutriderError
from outrider.training.corpus import (
    HELD_OUT_MODULES,
    Document,
    WindowSampler,
    collect_documents,
    encode_documents,
    pack,
)

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "bundled"


def test_documents_follow_each_other_with_one_separator() -> None:
    assert pack([[5, 6], [], [7]], end_of_text=0).tolist() == [5, 6, 0, 0, 7, 0]
    assert pack([[4095]], end_of_text=0).dtype == np.uint16


def test_encoded_documents_report_bytes_and_decode_to_their_texts() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    documents = [Document("a.py", "x = 'é'\n"), Document("b.py", "pass\n")]
    tokens = encode_documents(tokenizer, documents)
    assert tokens.num_documents == 2
    assert tokens.num_bytes == 9 + 5
    text = tokenizer.decode(tokens.token_ids.tolist(), skip_special_tokens=False)
    assert text == "x = 'é'\n<|endoftext|>pass\n<|endoftext|>"


def test_held_out_modules_are_whole_and_apart() -> None:
    train = {document.source for document in collect_documents()}
    held_out = {document.source for document in collect_documents(held_out=True)}
    assert held_out == HELD_OUT_MODULES
    assert not train & held_out
    assert not any(source.split("/")[0] in ("test", "site-packages") for source in train)


def test_unreadable_corpora_are_named(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="no Python source found"):
        collect_documents(tmp_path)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(OutriderError, match=r"latin\.py: not UTF-8 text \(byte 2\)"):
        collect_documents(tmp_path)


def test_an_epoch_visits_every_window_once() -> None:
    token_ids = np.arange(1000, dtype=np.uint16)
    sampler = WindowSampler(token_ids, window_size=10, batch_size=9, seed=3)
    assert sampler.num_steps_per_epoch == 11  # 99 windows
    batches = torch.cat([sampler.batch(step) for step in range(11)])
    assert batches.shape == (99, 10)
    assert (batches.diff(dim=1) == 1).all()
    offset = int(batches.min())
    assert sorted(batches[:, 0].tolist()) == [offset + 10 * i for i in range(99)]
    assert batches[:, 0].tolist() != sorted(batches[:, 0].tolist())


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    token_ids = np.arange(1000, dtype=np.uint16)
    first = WindowSampler(token_ids, window_size=10, batch_size=8, seed=3)
    second = WindowSampler(token_ids, window_size=10, batch_size=8, seed=3)
    in_order = [first.batch(step) for step in range(30)]
    for step in (29, 0, 17):
        assert torch.equal(second.batch(step), in_order[step])
    other = WindowSampler(token_ids, window_size=10, batch_size=8, seed=4)
    assert not torch.equal(other.batch(0), in_order[0])


def test_too_short_a_corpus_is_an_error() -> None:
    with pytest.raises(
        OutriderError, match="30 tokens are too few for 3 windows of 10; at least 40"
    ):
        WindowSampler(np.zeros(30, dtype=np.uint16), window_size=10, batch_size=3, seed=0)
