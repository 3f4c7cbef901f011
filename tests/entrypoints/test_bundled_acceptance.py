"""What the bundled checkpoint accepts: less at a temperature, less under JSON, more under `block`.

Every statement is one of an interval: it holds for prompts like these, and not just for these.
"""

import math

import pytest

from outrider.bundled import BUNDLED_SUITES
from outrider.entrypoints.acceptance import AcceptanceSample
from outrider.entrypoints.acceptance_sweep import AcceptanceSweep, SweepResult, Way
from outrider.entrypoints.cli.prompt_sources import read_prompts_file
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.ratio_estimate import Z95

pytestmark = pytest.mark.slow

K = 3
NUM_PROMPTS = 100
SAMPLED, ONE_HOT = "probabilistic", "greedy"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        max_num_seqs=32,
        max_model_len=1024,
        speculative_config={"method": "mtp", "num_speculative_tokens": K},
    )


def measure(llm: LLM, suites: list[str], temperatures: list[float]) -> SweepResult:
    listed = {name: read_prompts_file(BUNDLED_SUITES[name]) for name in suites}
    spread = {name: one[:: len(one) // NUM_PROMPTS][:NUM_PROMPTS] for name, one in listed.items()}
    return AcceptanceSweep(
        llm,
        suites={name: llm.encode_prompts(prompts) for name, prompts in spread.items()},
        ks=[K],
        temperatures=temperatures,
        draft_sample_methods=[SAMPLED, ONE_HOT],
        rules=["standard", "block", "coupled"],
        max_tokens=64,
        seed=0,
    ).run()


@pytest.fixture(scope="module")
def code(llm: LLM) -> SweepResult:
    return measure(llm, ["code"], [0.0, 1.0])


def sample(result: SweepResult, suite: str, temperature: float, *way: str) -> AcceptanceSample:
    return result.samples[Way(suite, K, temperature, *way)]


@pytest.mark.parametrize(
    ("method", "rule"), [(ONE_HOT, "standard"), (ONE_HOT, "coupled"), (SAMPLED, "coupled")]
)
def test_it_falls_with_the_temperature(code: SweepResult, method: str, rule: str) -> None:
    greedy, warm = (sample(code, "code", one, method, rule).length for one in (0.0, 1.0))
    low, _ = greedy.minus(warm).ci95(-K, K) or (-K, K)
    assert low > 0


def test_block_accepts_more_than_standard(code: SweepResult) -> None:
    (gain,) = code.gains
    low, _ = gain.ci95 or (-K, K)
    assert low > 0
    assert gain.gain < 0.5


def test_it_falls_under_json(llm: LLM) -> None:
    result = measure(llm, ["code", "json"], [0.0])
    code, json = (
        sample(result, name, 0.0, SAMPLED, "block").fresh_length for name in ("code", "json")
    )
    assert code is not None
    assert json is not None
    # Other prompts, and so independent.
    error = math.hypot(code.standard_error or math.inf, json.standard_error or math.inf)
    assert code.value - json.value > Z95 * error
