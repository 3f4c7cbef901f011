"""Block verification through vLLM's own sampler: the law of what comes out, and its edges."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.vllm_plugin import block_verification, register
from tests.chi_square import chi_square_p_value, count_tuples
from tests.vllm_plugin.v1_sampler import Tables, decode, sampling_metadata, verify

pytestmark = pytest.mark.vllm

RULES = ("standard", "block")
TABLES = Tables.random(vocab_size=3, spread=1.0, seed=3)
NUM_REQUESTS, LENGTH, LEAST_P_VALUE = 20_000, 4, 1e-6


@pytest.fixture(autouse=True, scope="module")
def worker() -> None:
    """What each of vLLM's workers does first."""
    from vllm.platforms import current_platform

    register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.mark.parametrize("num_drafts", [1, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s_several_tokens_deep(rule: str, num_drafts: int) -> None:
    tokens, _ = decode(rule, TABLES, NUM_REQUESTS, num_drafts, LENGTH)
    law = TABLES.joint_law(0, LENGTH)
    assert chi_square_p_value(count_tuples(tokens, 3), law) > LEAST_P_VALUE


@pytest.mark.parametrize("rule", RULES)
def test_the_law_sees_a_draft_law_that_is_not_the_true_one(rule: str) -> None:
    flatter = (TABLES.draft.log() / 1.3).softmax(-1)
    tokens, _ = decode(rule, TABLES, NUM_REQUESTS, 3, LENGTH, q=flatter)
    law = TABLES.joint_law(0, LENGTH)
    assert chi_square_p_value(count_tuples(tokens, 3), law) < LEAST_P_VALUE


TOY = Tables(
    torch.tensor([[1 / 3, 2 / 3]]).expand(2, 2), torch.tensor([[2 / 3, 1 / 3]]).expand(2, 2)
)


@pytest.mark.parametrize(("rule", "expected"), [("standard", 10 / 9), ("block", 11 / 9)])
def test_accepted_drafts_of_the_toy(rule: str, expected: float) -> None:
    """With K = 2 the two rules accept 10/9 and 11/9 drafts on average."""
    _, accepted = decode(rule, TOY, NUM_REQUESTS, 2, 1)
    # Between 0 and 2 drafts are accepted, so one window's standard deviation is at most 1.
    assert accepted == pytest.approx(expected, abs=4 / math.sqrt(NUM_REQUESTS))


def test_without_the_hook_block_is_the_standard_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    upstream = rejection_sampler.rejection_sample.__wrapped__
    monkeypatch.setattr(rejection_sampler, "rejection_sample", upstream)
    _, accepted = decode("block", TOY, NUM_REQUESTS, 2, 1)
    assert accepted == pytest.approx(10 / 9, abs=4 / math.sqrt(NUM_REQUESTS))


# --- edges -------------------------------------------------------------------------------------


def one_hot(token_id: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token_id), 3).float()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ragged_batch_of_certain_laws(rule: str, temperature: float) -> None:
    """Laws that leave no choice: the drafts 1, 2 are right, what follows is 0."""
    drafts = [[1, 2, 0], [], [1, 1], [2]]
    right = [[1, 2, 0, 0], [0], [1, 2, 0], [1, 0]]
    logits = torch.stack([one_hot(id).log().clamp(min=-1e4) for row in right for id in row])
    draft_probs = torch.stack([one_hot(id) for row in drafts for id in row]) * 0.9 + 1 / 30
    output = verify(rule, drafts, draft_probs, logits, sampling_metadata([temperature] * 4))
    assert output.tolist() == [[1, 2, 0, 0], [0, -1, -1, -1], [1, 2, -1, -1], [1, -1, -1, -1]]
    assert output.dtype == torch.int32


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", [[1, -1, -1], [-1, -1, -1]], ids=["some", "all"])
def test_invalid_drafts_are_rejections(rule: str, drafts: list[int]) -> None:
    """What was drawn and is invalid leaves the residual to the token in its place.

    The draft that the mask forbids is token 2, drawn with probability 0.5.
    """
    num_requests = 30_000
    law = torch.tensor([0.6, 0.4, 0.0])
    draft_law = torch.tensor([0.1, 0.4, 0.5])
    first = torch.tensor([0.0, 1.0, 0.0])
    num_valid = drafts.index(-1)
    target = torch.stack([*[first] * num_valid, *[law] * (4 - num_valid)])
    laws = torch.stack([*[first] * num_valid, *[draft_law] * (3 - num_valid)])
    output = verify(
        rule,
        [drafts] * num_requests,
        laws.repeat(num_requests, 1),
        target.log().repeat(num_requests, 1),
        sampling_metadata([1.0] * num_requests),
    )
    assert (output[:, :num_valid] == 1).all()
    assert (output[:, num_valid + 1 :] == -1).all()
    # The residual of (0.6, 0.4, 0) over (0.1, 0.4, 0.5) is token 0 alone.
    assert (output[:, num_valid] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_invalid_drafts_of_a_greedy_request(rule: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 4)
    laws = torch.full((3, 3), 1 / 3)
    output = verify(rule, [[1, -1, -1]], laws, logits, sampling_metadata([0.0]))
    assert output.tolist() == [[1, 1, -1, -1]]


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 6)
    laws = torch.full((4, 3), 1 / 3)
    metadata = sampling_metadata([0.0, 1.0])
    seen = {
        tuple(verify("block", [[1, 0], [1, 0]], laws, logits.clone(), metadata)[0].tolist())
        for _ in range(20)
    }
    assert seen == {(1, 1, -1)}


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_law_of_zeros_was_not_drawn_from(rule: str) -> None:
    """A law that is lost leaves the token to the target."""
    num_requests = 30_000
    law = torch.tensor([0.5, 0.3, 0.2])
    output = verify(
        rule,
        [[0, 1]] * num_requests,
        torch.zeros(2 * num_requests, 3),
        law.log().repeat(3 * num_requests, 1),
        sampling_metadata([1.0] * num_requests),
    )
    assert (output[:, 1:] == -1).all()
    assert chi_square_p_value(output[:, 0].long().bincount(), law) > LEAST_P_VALUE


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_with_their_request(
    broken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[None] = []
    monkeypatch.setattr(block_verification, "_warn_of_broken_rows", lambda: told.append(None))
    torch.manual_seed(0)
    laws, sound = torch.rand(4, 3).softmax(-1), torch.rand(3, 3)
    for whole in (True, False):
        logits = torch.cat([torch.zeros(3, 3), sound])
        logits[:3, slice(None) if whole else 1] = broken
        metadata = sampling_metadata([1.0, 1.0], generators(5, 6))
        output = verify("block", [[1, 1], [1, 0]], laws, logits, metadata)
        assert ((output >= -1) & (output < 3)).all()
        assert (output[:, 0] >= 0).all()
        alone = sampling_metadata([1.0], {0: generators(5, 6)[1]})
        (expected,) = verify("block", [[1, 0]], laws[2:], sound, alone).tolist()
        assert output[1].tolist() == expected
    # What is -inf in one place alone is a law without that token.
    assert len(told) == (1 if broken == -math.inf else 2)


@pytest.mark.parametrize(
    ("rule", "method", "draws"),
    [("block", "probabilistic", True), ("block", "greedy", False), ("standard", "greedy", False)],
)
def test_proposers_draw_under_block(rule: str, method: str, draws: bool) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    class Proposer:
        """Draws where vLLM's would."""

        def __init__(self) -> None:
            self.speculative_config = SimpleNamespace(
                rejection_sample_method=rule, draft_sample_method=method
            )
            self._enable_probabilistic_draft_probs = False

    proposer = Proposer()
    makers, link = [], SpecDecodeBaseProposer.__init__
    while link is not None:
        makers.append(getattr(link, "__outrider_maker__", ""))
        link = getattr(link, "__wrapped__", None)
    assert any(maker.endswith("_drawing_under_block") for maker in makers)
    block_verification._drawing_under_block(Proposer.__init__)(proposer)
    assert proposer._enable_probabilistic_draft_probs is draws


@pytest.mark.parametrize("has_laws", [True, False])
def test_laws_of_a_request_that_sat_out_a_step(has_laws: bool) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    laws = torch.rand(2, 3, 5)
    runner = SimpleNamespace(
        drafter=SimpleNamespace(_enable_probabilistic_draft_probs=True),
        input_batch=SimpleNamespace(
            req_ids=["new", "waited", "plain"],
            vocab_size=5,
            sampling_metadata=sampling_metadata([1.0, 1.0, 1.0]),
        ),
        device=torch.device("cpu"),
        _draft_probs=laws if has_laws else None,
        _draft_prob_req_ids=["plain", "new"] if has_laws else None,
    )
    metadata = SimpleNamespace(num_draft_tokens=[2, 3, 0])
    found = GPUModelRunner._get_spec_decode_draft_probs(runner, metadata)
    assert torch.equal(found[:2], laws[1, :2] if has_laws else torch.zeros(2, 5))
    assert torch.equal(found[2:], torch.zeros(3, 5))
    upstream = GPUModelRunner._get_spec_decode_draft_probs.__wrapped__
    assert upstream(runner, metadata) is None


def generators(*seeds: int) -> dict[int, torch.Generator]:
    return {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds)}


def test_seeds_decide_whatever_the_batch_mates() -> None:
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token as draw

    def text(*seeds: int) -> list[list[int]]:
        metadata = sampling_metadata([1.0] * len(seeds), generators(*seeds))
        logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
        drafted = [draw(logits.repeat(len(seeds), 1), metadata) for _ in range(4)]
        drafts = torch.stack([ids for ids, _ in drafted], 1)
        laws = torch.stack([probs for _, probs in drafted], 1)
        target = 0.5 * logits.repeat(5 * len(seeds), 1)
        return verify("block", drafts.tolist(), laws.flatten(0, 1), target, metadata).tolist()

    alone = text(1)[0]
    torch.manual_seed(7)
    assert text(1, 2)[0] == alone
    assert len({tuple(text(seed)[0]) for seed in range(10)}) > 5


def test_rows_of_parallel_drafts_have_their_request_s_seed() -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    proposer = SimpleNamespace(_enable_probabilistic_draft_probs=True, use_fp64_gumbel=False)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))

    def drafts(*seeds: int) -> list[list[int]]:
        """Of requests with 3 rows each, all of the same laws."""
        metadata = sampling_metadata([1.0] * len(seeds), generators(*seeds))
        rows = logits.repeat(len(seeds), 1)
        token_ids, _ = SpecDecodeBaseProposer._sample_from_logits(proposer, rows, metadata)
        return token_ids.view(-1, 3).tolist()

    alone = [drafts(seed)[0] for seed in (1, 2, 3)]
    torch.manual_seed(7)
    assert drafts(1, 2, 3) == alone
    assert len({tuple(row) for row in alone}) == 3


def test_a_request_without_drafts_leaves_its_generator() -> None:
    """Its only draw is the one of the bonus token, which is vLLM's."""
    states = []
    for rule in RULES:
        known = generators(5, 6)
        metadata = sampling_metadata([1.0, 1.0], known)
        verify(rule, [[], [1]], torch.full((1, 3), 1 / 3), torch.zeros(3, 3), metadata)
        states.append(known[0].get_state())
    assert torch.equal(*states)


def test_one_hot_drafts_go_to_the_standard_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError("nothing was drawn, so there is no block to verify")

    monkeypatch.setattr(block_verification, "verify_block", never)
    output = verify("block", [[1, 1]], None, torch.zeros(3, 3), sampling_metadata([1.0]))
    assert output[0, 0] >= 0
