"""The TOML file of a run, and the schedule it describes."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.training.config import DataConfig, ScheduleConfig, TrainConfig
from outrider.training.prompts import TRAIN_FILE
from outrider.training.recipe import SUITES
from outrider.training.schedule import Progress, learning_rate_factor

CONFIGS = Path(__file__).parents[2] / "configs"
BUNDLED_TOML = CONFIGS / "bundled.toml"
RUN = '[run]\nmodel_dir = "m"\noutput_dir = "o"\n'
BUDGET = "[schedule]\nmax_tokens = 100\n"


def read(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return TrainConfig.from_toml(path)


def test_the_bundled_file_is_read() -> None:
    config = TrainConfig.from_toml(BUNDLED_TOML)
    assert config.run.model_dir == Path("src/outrider/bundled")
    assert config.schedule.max_minutes is not None
    assert config.loss.depth_weights == (0.51, 0.31, 0.18)


def test_each_stage_starts_where_the_one_before_it_ends() -> None:
    first, second, third = (
        TrainConfig.from_toml(CONFIGS / f"{name}.toml")
        for name in ("bundled", "bundled_corpus", "bundled_head")
    )
    assert second.run.init_from == first.run.output_dir / "export"
    # A run goes on in its folder where more is allowed; without its checkpoint this one fails.
    assert third.run.init_from == second.run.output_dir / "export"
    assert replace(third.run, init_from=second.run.init_from) == second.run
    assert third.data == second.data
    assert third.schedule.max_tokens is not None
    assert second.schedule.max_tokens is not None
    assert third.schedule.max_tokens > second.schedule.max_tokens
    # What the builder of the corpus writes.
    assert second.data.train is not None
    assert second.data.held_out is not None
    assert [path.name for path in second.data.train] == [TRAIN_FILE]
    assert [path.name for path in second.data.held_out] == [
        f"held_out_{suite}.jsonl" for suite in SUITES
    ]


def test_types_follow_the_fields(tmp_path: Path) -> None:
    text = RUN + BUDGET + "[loss]\ndepth_weights = [1, 0.5]\nmtp_weight = 1\ndetach_trunk = true\n"
    text += 'kind = "lk"\n'
    config = read(tmp_path, text)
    assert config.loss.depth_weights == (1.0, 0.5)
    assert config.loss.mtp_weight == 1.0
    assert config.loss.detach_trunk is True
    assert config.loss.kind == "lk"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RUN + BUDGET + "warmup = 5\n", "unknown key 'warmup', did you mean 'warmup_steps'"),
        (RUN + BUDGET + "[optimiser]\n", "unknown key 'optimiser', did you mean 'optimizer'"),
        (RUN, "set max_tokens, max_minutes or both"),
        ('[run]\nmodel_dir = "m"\n' + BUDGET, "missing output_dir"),
        (RUN + BUDGET + "[loss]\nmtp_weight = true\n", "mtp_weight: True is not of type float"),
        (RUN + BUDGET + "[loss]\ndepth_weights = 0.5\n", "depth_weights: a list is expected"),
        (RUN + BUDGET + "[loss]\ndepth_weights = []\n", "one weight a depth"),
        (RUN + BUDGET + '[loss]\nkind = "mse"\n', "kind: 'mse' is not one of ce, kl, lk"),
        (RUN + BUDGET + "[loss]\nlk_lambda = 1.5\n", "loss.lk_lambda: 1.5 is not between 0 and 1"),
        (RUN + BUDGET + "[optimizer]\nbetas = [0.9]\n", "betas: a list is expected"),
        (RUN + BUDGET + '[data]\ntrain = "a"\n', 'train: a list is expected, such as ["a", "b"]'),
        (RUN + BUDGET + '[data]\ntrain = ["a"]\n', "data.held_out: missing; data.train needs it"),
        (RUN + BUDGET + '[data]\nheld_out = ["a"]\n', "data.train: missing; data.held_out"),
        (RUN + BUDGET + "[data]\ntrain = []\n", "data.train: an empty list; name files or folders"),
        (RUN + BUDGET + '[data]\ntrain = ["a"]\nheld_out = []\n', "data.held_out: an empty list"),
        (RUN + BUDGET + '[data]\nsuffixes = ["py"]\n', "'py' does not start with a dot"),
        (RUN + BUDGET + "[data]\nbatch_size = 0\n", "data.batch_size: 0 is not at least 1"),
        (RUN + "export_every_tokens = 0\n" + BUDGET, "export_every_tokens: 0 is not at least 1"),
        (RUN + BUDGET + "[data]\nbatch_size = 1.5\n", "batch_size: 1.5 is not of type int"),
        (
            RUN + BUDGET + "[data]\nsequence_length = 3\n",
            "data.sequence_length: 3 is not above 3",
        ),
        (RUN + "[schedule]\nmax_tokens = 0\n", "schedule.max_tokens: 0 is not at least 1"),
        (RUN + "[schedule]\nmax_minutes = 0\n", "schedule.max_minutes: 0.0 is not above 0"),
        (
            RUN + "[schedule]\nmax_minutes = inf\n",
            "schedule.max_minutes: inf is not a finite number",
        ),
        (RUN + "seed = -1\n" + BUDGET, "run.seed: -1 is not at least 0"),
        (RUN + f"seed = {2**64}\n" + BUDGET, f"run.seed: {2**64} is above {2**64 - 1}"),
        (RUN + BUDGET + "[loss]\ndepth_weights = [1, nan]\n", "depth_weights: nan is not a finite"),
        (RUN + BUDGET + "[loss]\ndepth_weights = [inf]\n", "depth_weights: inf is not a finite"),
        (
            RUN + BUDGET + "[loss]\nmtp_weight = inf\n",
            "loss.mtp_weight: inf is not a finite number",
        ),
        (RUN + BUDGET + f"[loss]\nmtp_weight = 1{'0' * 400}\n", "mtp_weight: an integer too large"),
        (
            RUN + BUDGET + "[optimizer]\nbetas = [1.0, 0.95]\n",
            "betas: 1.0 is not at least 0 and below",
        ),
        (
            RUN + BUDGET + "[optimizer]\nbetas = [0.9, -0.1]\n",
            "betas: -0.1 is not at least 0 and below",
        ),
        (
            RUN + BUDGET + "[optimizer]\nmax_grad_norm = 0\n",
            "max_grad_norm: 0.0 is not above 0",
        ),
        (
            RUN + BUDGET + "final_fraction = 2.0\n",
            "schedule.final_fraction: 2.0 is above 1",
        ),
        (RUN + "[schedule\n", "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read(tmp_path, text)


def test_texts_are_named_by_paths(tmp_path: Path) -> None:
    text = '[data]\ntrain = ["a", "b.jsonl"]\nheld_out = ["c"]\nsuffixes = [".py"]\n'
    config = read(tmp_path, RUN + BUDGET + text)
    assert config.data.train == (Path("a"), Path("b.jsonl"))
    assert config.data.held_out == (Path("c"),)
    assert config.data.suffixes == (".py",)


def test_a_window_holds_an_ngram() -> None:
    DataConfig(sequence_length=3).check_sequence_length(3)
    with pytest.raises(
        ConfigError, match=r"data\.sequence_length: 2 is below the model's ngram_size, 3"
    ):
        DataConfig(sequence_length=2).check_sequence_length(3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        TrainConfig.from_toml(tmp_path / "absent.toml")


def test_rate_warms_up_holds_and_decays() -> None:
    config = ScheduleConfig(
        max_tokens=1000, warmup_steps=10, decay_fraction=0.2, final_fraction=0.1
    )

    def factor(step: int, num_tokens: int) -> float:
        return learning_rate_factor(Progress(step=step, num_tokens=num_tokens), config)

    assert factor(0, 0) == pytest.approx(0.1)
    assert factor(4, 40) == pytest.approx(0.5)
    assert factor(9, 90) == factor(50, 500) == factor(79, 790) == 1.0
    assert factor(90, 900) == pytest.approx(0.55)
    assert factor(100, 1000) == pytest.approx(0.1)


def test_the_budget_that_is_nearer_to_its_end_counts() -> None:
    config = ScheduleConfig(max_tokens=1000, max_minutes=1.0)
    assert Progress(num_tokens=500, elapsed_s=15.0).fraction(config) == pytest.approx(0.5)
    assert Progress(num_tokens=500, elapsed_s=45.0).fraction(config) == pytest.approx(0.75)
    assert Progress(elapsed_s=90.0).fraction(config) > 1.0
