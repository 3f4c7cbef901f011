"""Text for training: documents packed into one array of token ids, and windows of it.

Runs before the first step: the documents that the configuration names, or the standard library's
Python sources, become one array of token ids, and the trainer reads fixed windows of it.

Documents simply follow each other. The n-gram context of the model resets at the end-of-text id by
the architecture; the delta-rule state, the convolutions and attention do not, and no boundary is
passed down: the model learns that what stands before an end-of-text id says nothing about what
follows.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from outrider.errors import OutriderError
from outrider.tokenizer import TOKENIZER_NAME, Tokenizer
from outrider.training.documents import Document, read_documents, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.training.config import DataConfig

END_OF_TEXT = "<|endoftext|>"

# As narrow as the ids of the tokenizer allow.
TokenIds = npt.NDArray[np.unsignedinteger]

# Evaluation text and prompts come from these files; neither the tokenizer nor the model sees them
# in training.
HELD_OUT_MODULES = frozenset(
    {
        "bisect.py",
        "calendar.py",
        "cmd.py",
        "configparser.py",
        "contextlib.py",
        "csv.py",
        "fractions.py",
        "ftplib.py",
        "getopt.py",
        "gettext.py",
        "glob.py",
        "graphlib.py",
        "gzip.py",
        "heapq.py",
        "html/parser.py",
        "json/encoder.py",
        "mimetypes.py",
        "plistlib.py",
        "pprint.py",
        "queue.py",
        "random.py",
        "selectors.py",
        "shlex.py",
        "string.py",
        "textwrap.py",
        "timeit.py",
        "tomllib/_parser.py",
        "asyncio/locks.py",
        "concurrent/futures/thread.py",
        "urllib/robotparser.py",
        "xml/dom/pulldom.py",
    }
)

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
# Most are one long table, or written by a build: a model of this size would only learn them by
# heart.
_SKIPPED_FILES = frozenset(
    {
        "html/entities.py",
        "locale.py",
        "stringprep.py",
        "re/_casefix.py",
        "tkinter/tix.py",
        "this.py",
        # Siblings that share long passages: one of them held out would not be held out.
        "aifc.py",
        "chunk.py",
        "sunau.py",
        "wave.py",
    }
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "__phello__", "config-")


@dataclass(frozen=True)
class TokenArray:
    """Packed documents."""

    token_ids: TokenIds  # [N], every document followed by one end-of-text id
    num_bytes: int  # UTF-8 bytes of the documents' texts, without the separators
    num_documents: int
    bytes_per_id: npt.NDArray[np.int64]  # [V], UTF-8 bytes that an id spells, 0 a special one


def stdlib_root() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_documents(config: DataConfig) -> tuple[list[Document], list[Document]]:
    """Reads the texts to train on and those that are only measured.

    A text that is held out is not trained on, even where `train` names it as well.

    Raises:
        OutriderError: nothing to read, or something that cannot be read, see `read_documents`.
    """
    if config.train is None or config.held_out is None:
        return collect_documents(), collect_documents(held_out=True)
    held_out = read_documents("data.held_out", config.held_out, config.suffixes)
    held_out_texts = {document.text for document in held_out}
    train = [
        document
        for document in read_documents("data.train", config.train, config.suffixes)
        if document.text not in held_out_texts
    ]
    if not train:
        raise OutriderError("data.train: every text in it is one of data.held_out as well")
    return train, held_out


def collect_documents(*, held_out: bool = False) -> list[Document]:
    """Reads the standard library's Python files, ordered by path.

    Args:
        held_out: False gives the files to train on, True only those of `HELD_OUT_MODULES`.
    """
    folder = stdlib_root()
    documents = [
        Document(source, read_text(folder / source))
        for source in sorted(_python_sources(folder))
        if (source in HELD_OUT_MODULES) == held_out
    ]
    return [document for document in documents if document.text.strip()]


def load_tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint, which tells where its tokens begin.

    Raises:
        CheckpointError: it is missing, or wrong.
    """
    Tokenizer.from_pretrained(model_dir)  # Tells what is wrong with it.
    return tokenizers.Tokenizer.from_file(str(model_dir / TOKENIZER_NAME))


def encode_documents(tokenizer: tokenizers.Tokenizer, documents: Iterable[Document]) -> TokenArray:
    """Encodes and packs documents in the order given, an end-of-text id after each."""
    texts = [document.text for document in documents]
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise OutriderError(f"the tokenizer has no {END_OF_TEXT} entry")
    speller = Tokenizer(tokenizer)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return TokenArray(
        token_ids=pack(
            [encoding.ids for encoding in encodings], end_of_text, speller.num_tokens - 1
        ),
        num_bytes=sum(len(text.encode()) for text in texts),
        num_documents=len(texts),
        bytes_per_id=np.array(
            [len(speller.token_bytes(token_id)) for token_id in range(speller.num_tokens)]
        ),
    )


def pack(documents: Iterable[list[int]], end_of_text: int, max_id: int) -> TokenIds:
    """Concatenates documents, an end-of-text id after each: [a, b], [c] gives [a, b, e, c, e].

    Args:
        documents: ids of each.
        end_of_text: its id.
        max_id: of the tokenizer; where 16 bits do not hold it, each id takes 32.
    """
    dtype: type[np.unsignedinteger] = np.uint16 if max_id <= np.iinfo(np.uint16).max else np.uint32
    parts = [np.asarray([*ids, end_of_text], dtype=dtype) for ids in documents]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


class WindowSampler:
    """Windows of a token array, every position once an epoch, as a pure function of the step.

    Nothing has to be saved for an exact resume but the step number. Each epoch starts its windows
    at another offset, so that the cuts fall elsewhere, and shuffles them anew.
    """

    def __init__(
        self, token_ids: TokenIds, *, window_size: int, batch_size: int, seed: int
    ) -> None:
        """Checks that one epoch holds at least one batch.

        Args:
            token_ids: [N] uint16 or uint32.
            window_size: ids in a window, inputs and targets together.
            batch_size: windows in a step.
            seed: decides offsets and order.
        """
        # One window less than fits, so that every epoch has room for its offset.
        self._num_windows = len(token_ids) // window_size - 1
        if self._num_windows < batch_size:
            raise OutriderError(
                f"{len(token_ids)} tokens are too few for {batch_size} windows of {window_size}; "
                f"at least {(batch_size + 1) * window_size} are needed"
            )
        self._token_ids = token_ids
        self._window_size = window_size
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._starts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def identity(self) -> dict[str, int | str]:
        """What decides the windows of every step; a resume compares it."""
        return {
            "window_size": self._window_size,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "text": hashlib.sha256(self._token_ids.tobytes()).hexdigest()[:16],
        }

    @property
    def num_steps_per_epoch(self) -> int:
        """Whole batches in one epoch; what is left over waits for another epoch's order."""
        return self._num_windows // self._batch_size

    def batch(self, step: int) -> torch.Tensor:
        """Returns the windows of one step, [B, window_size] int64."""
        epoch, index = divmod(step, self.num_steps_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            offset = rng.integers(self._window_size)
            self._starts = offset + self._window_size * rng.permutation(self._num_windows)
            self._epoch = epoch
        starts = self._starts[index * self._batch_size : (index + 1) * self._batch_size]
        rows = self._token_ids[starts[:, None] + np.arange(self._window_size)]
        return torch.from_numpy(rows.astype(np.int64))


def _python_sources(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        source = relative.as_posix()
        if _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or source in _SKIPPED_FILES:
            continue
        if any(part.startswith(_SKIPPED_PREFIXES) for part in relative.parts):
            continue
        yield source
