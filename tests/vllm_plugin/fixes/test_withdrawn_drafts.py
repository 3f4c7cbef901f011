"""Drafts that were drawn and are forbidden: where they are kept, and the law of the text."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.vllm_plugin import register
from outrider.vllm_plugin.fixes import withdrawn_drafts
from tests.chi_square import chi_square_p_value
from tests.vllm_plugin.v1_sampler import sampling_metadata, verify

pytestmark = pytest.mark.vllm

FORBIDDEN = 2


@pytest.fixture(autouse=True, scope="module")
def worker() -> None:
    from vllm.platforms import current_platform

    register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


class Grammar:
    """Forbids one token everywhere, from a place in the drafts on."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.masked: dict[str, list[int]] = {}

    def validate_tokens(self, request: Any, drafts: list[int]) -> list[int]:
        if not request.use_structured_output or FORBIDDEN not in drafts:
            return drafts
        return drafts[: drafts.index(FORBIDDEN)]

    def _get_constraint_bounds(self, request: Any, drafts: list[int]) -> Any:
        return SimpleNamespace(constraint_start=self.start)

    def grammar_bitmask(self, requests: Any, names: Any, drafts: dict[str, list[int]]) -> None:
        self.masked = drafts


def request(*, temperature: float = 1.0, is_structured: bool = True) -> Any:
    return SimpleNamespace(
        is_finished=lambda: False,
        is_prefill_chunk=False,
        use_structured_output=is_structured,
        sampling_params=SimpleNamespace(temperature=temperature),
        spec_token_ids=[],
    )


def scheduler(
    requests: dict[str, Any],
    method: str = "probabilistic",
    start: int = 0,
    rule: str = "standard",
) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    made: Any = object.__new__(Scheduler)
    made.requests = requests
    made.structured_output_manager = Grammar(start)
    config = SimpleNamespace(draft_sample_method=method, rejection_sample_method=rule)
    made.vllm_config = SimpleNamespace(speculative_config=config)
    return made


def arrive(made: Any, drafts: dict[str, list[int]]) -> None:
    arrived = SimpleNamespace(req_ids=[*drafts], draft_token_ids=[*drafts.values()])
    made.update_draft_token_ids(arrived)


def test_the_scheduler_has_the_hook() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    for name, maker in (
        ("update_draft_token_ids", "_keeping_the_first"),
        ("schedule", "_counting"),
        ("get_grammar_bitmask", "_masking"),
    ):
        assert getattr(Scheduler, name).__outrider_maker__.endswith(f"withdrawn_drafts.{maker}")


def test_the_first_forbidden_draft_stays() -> None:
    requests = {
        "some": request(),
        "all": request(),
        "none": request(),
        "greedy": request(temperature=0),
        "free": request(is_structured=False),
    }
    made = scheduler(requests)
    arrive(made, {name: [1, 2, 2] for name in requests} | {"all": [2, 1, 1], "none": [1, 1, 1]})
    assert {name: one.spec_token_ids for name, one in requests.items()} == {
        "some": [1, 2],
        "all": [2],
        "none": [1, 1, 1],
        "greedy": [1],
        "free": [1, 2, 2],
    }


@pytest.mark.parametrize(
    ("method", "start", "rule"),
    [
        ("greedy", 0, "standard"),
        ("probabilistic", 2, "standard"),
        ("probabilistic", 0, "synthetic"),
    ],
)
def test_what_was_not_drawn_or_is_not_judged_by_the_mask_goes(
    method: str, start: int, rule: str
) -> None:
    """Before the place from which the grammar holds, no mask makes a draft's probability 0."""
    requests = {"a": request()}
    arrive(scheduler(requests, method, start, rule), {"a": [1, 2, 1]})
    assert requests["a"].spec_token_ids == [1]


def schedule(made: Any, limit: int) -> Any:
    """A step with room for so many drafts of each request."""
    from vllm.v1.core.sched.output import SchedulerOutput

    def upstream(self: Any) -> Any:
        output = SchedulerOutput.make_empty()
        for name, one in self.requests.items():
            if drafts := one.spec_token_ids[:limit]:
                output.scheduled_spec_decode_tokens[name] = drafts
            output.num_scheduled_tokens[name] = 1 + len(drafts)
            one.spec_token_ids = []
        output.has_structured_output_requests = True
        return output

    return withdrawn_drafts._counting(upstream)(made)


@pytest.mark.parametrize(
    ("limit", "invalid", "masked"), [(3, {"a": 1}, [1, -1]), (1, None, [1]), (0, None, [])]
)
def test_counts_and_mask_of_a_step(
    limit: int, invalid: dict[str, int] | None, masked: list[int]
) -> None:
    """Where the budget cuts the draft itself, it is a draft like any that did not fit."""
    made = scheduler({"a": request(), "b": request()})
    arrive(made, {"a": [1, 2, 1], "b": [1, 1, 1]})
    output = schedule(made, limit)
    assert (output.num_invalid_spec_tokens or None) == invalid
    assert output.scheduled_spec_decode_tokens.get("a", []) == [1, 2, 1][: min(limit, 2)]
    made.get_grammar_bitmask(output)
    assert made.structured_output_manager.masked.get("a", []) == masked
    assert made.structured_output_manager.masked.get("b", []) == [1, 1, 1][:limit]


def test_a_later_step_knows_nothing_of_it() -> None:
    made = scheduler({"a": request()})
    arrive(made, {"a": [1, 2, 1]})
    schedule(made, 3)
    arrive(made, {"a": [1, 1, 1]})
    assert not schedule(made, 3).num_invalid_spec_tokens


NUM_REQUESTS = 20_000
LAW = torch.tensor([0.6, 0.4, 0.0])  # with the mask
DRAFT_LAW = torch.tensor([0.1, 0.4, 0.5])  # without


def first_tokens(rule: str, *, keeps_forbidden: bool) -> Tensor:
    """[3] counts of the tokens after a window of one draft, which the grammar may forbid."""
    drawn = DRAFT_LAW.multinomial(NUM_REQUESTS, replacement=True).tolist()
    drafts = [[id] if keeps_forbidden or id != FORBIDDEN else [] for id in drawn]
    num_drafts = sum(len(one) for one in drafts)
    output = verify(
        rule,
        drafts,
        DRAFT_LAW.expand(num_drafts, 3).contiguous(),
        LAW.log().repeat(num_drafts + NUM_REQUESTS, 1),
        sampling_metadata([1.0] * NUM_REQUESTS),
    )
    return output[:, 0].long().bincount(minlength=3)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_text_has_the_target_s_law(rule: str) -> None:
    assert chi_square_p_value(first_tokens(rule, keeps_forbidden=True), LAW) > 1e-6


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_cut_drafts_bias_the_text(rule: str) -> None:
    """Token 0 comes with probability 0.1 + 0.5 * 0.6, not 0.6."""
    counts = first_tokens(rule, keeps_forbidden=False)
    assert counts[0] / NUM_REQUESTS == pytest.approx(0.4, abs=0.02)
