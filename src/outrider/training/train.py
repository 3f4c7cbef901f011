"""Trains trunk and head from text files: `python -m outrider.training.train --config FILE`.

Run again with the same file, it goes on from the newest checkpoint in the output folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

from outrider.errors import OutriderError
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.training.config import TrainConfig
from outrider.training.corpus import encode_documents, load_documents
from outrider.training.export import export_checkpoint
from outrider.training.trainer import Trainer, load_tokenizer

logger = logging.getLogger(__name__)


def train(config: TrainConfig) -> None:
    """Builds corpus and model, trains, and exports to `output_dir/export`."""
    tokenizer = load_tokenizer(config.run.model_dir)
    model_config = Qwen4ExpConfig.from_pretrained(config.run.model_dir)
    config.data.check_sequence_length(model_config.ngram_size)
    train_documents, held_out_documents = load_documents(config.data)
    train_tokens = encode_documents(tokenizer, train_documents)
    held_out_tokens = encode_documents(tokenizer, held_out_documents)
    for name, tokens in (("train", train_tokens), ("held out", held_out_tokens)):
        logger.info(
            "%s: %d documents, %d bytes, %d tokens",
            name,
            tokens.num_documents,
            tokens.num_bytes,
            len(tokens.token_ids),
        )
    model = Qwen4ExpForCausalLM(model_config, num_mtp_layers=model_config.mtp_num_hidden_layers)
    model.init_weights(torch.Generator().manual_seed(config.run.seed))
    model.to(config.run.device)
    model.build_tables()
    logger.info("%d parameters", sum(parameter.numel() for parameter in model.parameters()))
    trainer = Trainer(model, config, train_tokens=train_tokens, held_out_tokens=held_out_tokens)
    trainer.train()
    export_checkpoint(model, config.run.model_dir, config.run.output_dir / "export")


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a TOML file, see configs/")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        train(TrainConfig.from_toml(arguments.config))
    except OutriderError as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
