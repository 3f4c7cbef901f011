"""What the bundled checkpoint accepts, over temperatures, rules and kinds of text.

Every statement is one of an interval: it holds for prompts like these, and not just for these. It
is not a law that less is accepted at a temperature, or of JSON. Here both kinds of drafts lose with
the temperature, one-hot ones most of their length. Of JSON, which others have seen accepted less
than code, more is: the trunk was trained on it, and it is the more regular text.
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
SAMPLED, ONE_HOT = "probabilistic", "greedy"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        max_num_seqs=32,
        max_model_len=1024,
        speculative_config={"method": "mtp", "num_speculative_tokens": K},
    )


def measure(
    llm: LLM, num_prompts: dict[str, int | None], temperatures: list[float], methods: list[str]
) -> SweepResult:
    """Both rules over the first prompts of each suite; None is all of them."""
    prompts = {
        name: read_prompts_file(BUNDLED_SUITES[name])[:number]
        for name, number in num_prompts.items()
    }
    return AcceptanceSweep(
        llm,
        suites={name: llm.encode_prompts(listed) for name, listed in prompts.items()},
        ks=[K],
        temperatures=temperatures,
        draft_sample_methods=methods,
        rules=["standard", "block"],
        max_tokens=64,
        seed=0,
    ).run()


@pytest.fixture(scope="module")
def warm(llm: LLM) -> SweepResult:
    """Everything at temperature 1: code against JSON, `block` against `standard`."""
    return measure(llm, {"code": None, "json": None}, [1.0], [SAMPLED])


def sample(result: SweepResult, suite: str, temperature: float, *way: str) -> AcceptanceSample:
    return result.samples[Way(suite, K, temperature, *way)]


@pytest.mark.parametrize(("method", "least"), [(SAMPLED, 0.05), (ONE_HOT, 0.8)])
def test_drafts_lose_with_the_temperature(llm: LLM, method: str, least: float) -> None:
    result = measure(llm, {"code": None}, [0.0, 1.0], [method])
    # Fresh windows: texts of temperature 0 repeat themselves, which is easy to draft.
    cold, warm = (
        sample(result, "code", temperature, method, "standard").fresh_length
        for temperature in (0.0, 1.0)
    )
    assert cold is not None
    assert warm is not None
    low, _ = cold.minus(warm).ci95(-K, K) or (-K, K)
    assert low > least


def test_block_accepts_more_than_standard(warm: SweepResult) -> None:
    (gain,) = [one for one in warm.gains if one.suite == "code"]
    low, high = gain.ci95 or (-K, K)
    assert 0 < low < high < 0.3


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_json_is_accepted_more_than_code_at_temperature_1(warm: SweepResult, rule: str) -> None:
    code, json = (sample(warm, name, 1.0, SAMPLED, rule).length for name in ("code", "json"))
    # Other prompts, and so independent.
    error = math.hypot(code.standard_error or math.inf, json.standard_error or math.inf)
    assert json.value - code.value > Z95 * error
