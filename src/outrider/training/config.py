"""Options of a training run, read from a TOML file; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from outrider.config import LossKind  # noqa: TC001 - the types of the fields are read when run
from outrider.errors import ConfigError

_T = TypeVar("_T")

_MAX_SEED = 2**64 - 1  # of torch's generators


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which portions."""

    # Files and folders of text, see `read_documents`. Both or neither are named; neither means the
    # Python sources of the standard library, less a fixed list of held-out modules.
    train: tuple[Path, ...] | None = None
    held_out: tuple[Path, ...] | None = None  # measured only
    suffixes: tuple[str, ...] = (".py", ".md", ".rst", ".txt", ".json")  # read in folders
    sequence_length: int = 512  # rows of a window
    batch_size: int = 4  # windows of a step

    def __post_init__(self) -> None:
        """Checks that the texts to train on and to measure on are named together."""
        for name, other in (("train", "held_out"), ("held_out", "train")):
            if getattr(self, name) == ():
                raise ConfigError(
                    f"data.{name}: an empty list; name files or folders, or leave out both "
                    f"data.{name} and data.{other} for the standard library"
                )
            if getattr(self, name) is None and getattr(self, other):
                raise ConfigError(f"data.{name}: missing; data.{other} needs it beside it")
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise ConfigError(f"data.suffixes: {suffix!r} does not start with a dot")

    def check_sequence_length(self, ngram_size: int) -> None:
        """Raises a ConfigError where no window holds a whole n-gram of the model."""
        if self.sequence_length < ngram_size:
            raise ConfigError(
                f"data.sequence_length: {self.sequence_length} is below the model's ngram_size, "
                f"{ngram_size}"
            )


@dataclass(frozen=True)
class LossConfig:
    """The terms beside the trunk's cross entropy, which has weight 1."""

    # What the head is held to: "ce" the ids of the text, "kl" and "lk" the trunk's law of them.
    kind: LossKind = "ce"
    # Of "lk" alone: the weight of KL, the rest is that of total variation.
    lk_lambda: float = 0.5
    # One weight a depth that the head is unrolled to; FastMTP's, arXiv:2509.18362.
    depth_weights: tuple[float, ...] = (0.51, 0.31, 0.18)
    # How much the trunk and the shared embedding listen to the head. Adam's step on the head's own
    # parameters hardly depends on it: it does by way of the norm alone to which the gradient of all
    # of them together is clipped. 0 trains a trunk without a head.
    mtp_weight: float = 0.3
    # True hides the trunk from the head's gradient: the trunk is then as good as without a head
    # (it still shares the clipping), its streams no easier to draft from. docs/training.md has what
    # either way costs.
    detach_trunk: bool = False
    router_balance_weight: float = 0.01
    # The indexer learns from this alone (no gradient passes through a choice of blocks), and
    # nothing else learns from it.
    index_weight: float = 1.0

    def __post_init__(self) -> None:
        """Checks each value."""
        if not self.depth_weights or min(self.depth_weights) < 0 or sum(self.depth_weights) <= 0:
            raise ConfigError("loss.depth_weights: one weight a depth, none negative, not all zero")
        if not 0.0 <= self.lk_lambda <= 1.0:
            raise ConfigError(f"loss.lk_lambda: {self.lk_lambda} is not between 0 and 1")

    @property
    def num_depths(self) -> int:
        """How often the head is unrolled in training; 0 where no head is trained."""
        return len(self.depth_weights) if self.mtp_weight else 0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = 2e-3  # the peak, held between warm-up and decay
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # on matrices only
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, constant rate, decay to `final_fraction` over the last part of the budget.

    The budget is tokens, minutes of wall clock, or both: the one that is nearer to its end counts.
    With minutes alone the decay lands where the time ends, on whatever machine.
    """

    max_tokens: int | None = None
    max_minutes: float | None = None
    warmup_steps: int = 100
    decay_fraction: float = 0.3
    final_fraction: float = 0.02


@dataclass(frozen=True)
class RunConfig:
    """Where results go and how often."""

    model_dir: Path  # config.json and the tokenizer
    output_dir: Path  # log, loss plot, checkpoints and the export; a run in it goes on
    # A checkpoint with the same config.json to take the first weights from; None makes them anew.
    # Where it has no head, the head alone is made anew. The optimiser starts fresh either way.
    init_from: Path | None = None
    device: str = "auto"  # "cpu", "cuda:1", ...; "auto" is the accelerator at hand, or else the CPU
    seed: int = 1234
    log_every_steps: int = 10
    eval_every_steps: int = 200
    num_eval_windows: int = 16
    checkpoint_every_minutes: float = 5.0  # 0 is after each step
    num_kept_checkpoints: int = 2
    # Beside the export at the end, one each time that so many tokens more have been seen; all stay.
    export_every_tokens: int | None = None
    # Builds native kernels for the CPU with the C++ compiler at hand: seconds at the first start,
    # far less time a step.
    compile: bool = False
    # Threads that share a step's windows, each on one core; 1 leaves it to torch to share out each
    # operation, which costs more than it gains where another process has one of the cores.
    num_workers: int = 1


@dataclass(frozen=True)
class TrainConfig:
    """The whole file."""

    run: RunConfig
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Checks what no single field can."""
        self._check_finite()
        if self.schedule.max_tokens is None and self.schedule.max_minutes is None:
            raise ConfigError("schedule: set max_tokens, max_minutes or both")
        if not 0.0 <= self.schedule.decay_fraction <= 1.0:
            raise ConfigError(
                f"schedule.decay_fraction: {self.schedule.decay_fraction} is not between 0 and 1"
            )
        for name, value in (
            ("data.batch_size", self.data.batch_size),
            ("data.sequence_length", self.data.sequence_length),
            ("run.log_every_steps", self.run.log_every_steps),
            ("run.eval_every_steps", self.run.eval_every_steps),
            ("run.num_eval_windows", self.run.num_eval_windows),
            ("run.num_kept_checkpoints", self.run.num_kept_checkpoints),
            ("run.num_workers", self.run.num_workers),
            ("run.export_every_tokens", self.run.export_every_tokens),
            ("schedule.max_tokens", self.schedule.max_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not at least 1")
        if self.data.batch_size % self.run.num_workers:
            raise ConfigError(
                f"run.num_workers: {self.run.num_workers} cannot share {self.data.batch_size} "
                "windows (data.batch_size) evenly"
            )
        if self.data.sequence_length <= self.loss.num_depths:
            raise ConfigError(
                f"data.sequence_length: {self.data.sequence_length} is not above "
                f"{self.loss.num_depths}, the depths of loss.depth_weights"
            )
        self._check_not_negative()
        self._check_ranges()

    def _check_finite(self) -> None:
        for table in dataclasses.fields(self):
            for name, value in vars(getattr(self, table.name)).items():
                for number in value if isinstance(value, tuple) else (value,):
                    if isinstance(number, float) and not math.isfinite(number):
                        raise ConfigError(f"{table.name}.{name}: {number} is not a finite number")

    def _check_ranges(self) -> None:
        for name, value in (
            ("optimizer.max_grad_norm", self.optimizer.max_grad_norm),
            ("schedule.max_minutes", self.schedule.max_minutes),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"{name}: {value} is not above 0")
        for beta in self.optimizer.betas:
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"optimizer.betas: {beta} is not at least 0 and below 1")
        if self.schedule.final_fraction > 1.0:
            raise ConfigError(f"schedule.final_fraction: {self.schedule.final_fraction} is above 1")
        if self.run.seed > _MAX_SEED:
            raise ConfigError(f"run.seed: {self.run.seed} is above {_MAX_SEED}")

    def _check_not_negative(self) -> None:
        for name, value in (
            ("loss.mtp_weight", self.loss.mtp_weight),
            ("loss.router_balance_weight", self.loss.router_balance_weight),
            ("loss.index_weight", self.loss.index_weight),
            ("optimizer.learning_rate", self.optimizer.learning_rate),
            ("optimizer.weight_decay", self.optimizer.weight_decay),
            ("run.checkpoint_every_minutes", self.run.checkpoint_every_minutes),
            ("run.seed", self.run.seed),
            ("schedule.warmup_steps", self.schedule.warmup_steps),
            ("schedule.final_fraction", self.schedule.final_fraction),
        ):
            if value < 0:
                raise ConfigError(f"{name}: {value} is not at least 0")

    @classmethod
    def from_toml(cls, path: Path) -> TrainConfig:
        """Reads a file; paths in it are relative to the working folder."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not TOML ({error})") from error
        return _build(cls, content, str(path))


def _build(cls: type[_T], content: dict[str, Any], where: str) -> _T:
    hints = typing.get_type_hints(cls)
    for key in content:
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: unknown key {key!r}, did you mean {nearest[0]!r}?")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in content.items()}
    try:
        return cls(**values)
    except TypeError as error:
        missing = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type] # _T is always one of the dataclasses above
            if f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
            and f.name not in content
        ]
        raise ConfigError(f"{where}: missing {', '.join(missing)}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: a table is expected")
        return _build(typing.cast("type[Any]", hint), value, where)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is tuple:
        choices = typing.get_args(hint)
        if not isinstance(value, list) or (
            choices[-1] is not Ellipsis and len(value) != len(choices)
        ):
            example = "[0.5, 0.5]" if choices[0] is float else '["a", "b"]'
            raise ConfigError(f"{where}: a list is expected, such as {example}")
        return tuple(_convert(choices[0], item, where) for item in value)
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(
                f"{where}: {value!r} is not one of {', '.join(typing.get_args(hint))}"
            )
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where}: an integer too large for a number") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: {value!r} is not of type {hint.__name__}")
    return value
