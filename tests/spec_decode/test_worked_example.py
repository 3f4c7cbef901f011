"""The numbers of the README's worked example, computed again."""

from pathlib import Path

import torch
from torch import Tensor

import outrider.spec_decode
from outrider.sampling import sample_with_gumbel
from outrider.spec_decode import (
    VerifyResult,
    block_verify,
    coupled_verify,
    standard_verify,
)
from outrider.spec_decode.verify_rules import residual_weights
from tests.spec_decode.window_law import Draws, RuleLaw, Tables, block_law, standard_law

README = (Path(outrider.spec_decode.__file__).parent / "README.md").read_text()
TARGET = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
DRAFT = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
DRAFTS = torch.tensor([1, 0, 2])
UNIFORMS = [0.7, 0.5, 0.9]
LAWS = {"standard": standard_law, "block": block_law}


def example() -> tuple[Tables, Draws, int]:
    """Every draft sequence, and the row of the example's."""
    tables = Tables(
        draft=[DRAFT.expand(3**i, 3) for i in range(3)],
        target=[TARGET.expand(3**i, 3) for i in range(4)],
    )
    draws = Draws.of(tables)
    return tables, draws, int((draws.token_ids == DRAFTS).all(-1).int().argmax())


def table_row(cells: list[object]) -> str:
    texts = [f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return "| " + " | ".join(texts) + " |"


def emitted(result: VerifyResult) -> list[int]:
    return result.output_token_ids[0, : int(result.num_accepted_tokens) + 1].tolist()


def test_table_of_the_drafts() -> None:
    _, draws, row = example()
    window = draws.window()
    prefix_ratio = 1.0
    standard, block = standard_law(window).coin[row], block_law(window).coin[row]
    for i, draft in enumerate(DRAFTS.tolist()):
        ratio = float(TARGET[draft] / DRAFT[draft])
        prefix_ratio = min(1.0, prefix_ratio * ratio)
        mass = (prefix_ratio * TARGET - DRAFT).clamp(min=0).sum()
        cells = [i + 1, draft, ratio, float(standard[i]), prefix_ratio]
        line = table_row([*cells, float(mass), float(block[i]), UNIFORMS[i]])
        line = line.replace(f" {mass:.4f} |", "  |", 1) if i == 2 else line
        line = line.replace(f"{UNIFORMS[i]:.4f}", f"{UNIFORMS[i]}")
        assert line in README


def test_what_the_rules_emit() -> None:
    accept = torch.tensor([UNIFORMS], dtype=torch.float64)
    resample = torch.rand(1, 4, dtype=torch.float64)  # the residuals hold one token
    laws = (DRAFTS.unsqueeze(0), DRAFT.expand(1, 3, 3), TARGET.expand(1, 4, 3))
    standard = standard_verify(*laws, accept, resample)
    block = block_verify(*laws, accept, resample)
    assert emitted(standard) == [0]
    assert emitted(block) == [1, 0, 0]
    text = " ".join(README.split())
    assert "keeps 0 drafts and emits `[0]`" in text
    assert "keeps 2 drafts and emits `[1, 0, 0]`" in text
    for scale, rounded in ((0.6, [0.16, 0.0, 0.0]), (1.0, [0.4, 0.0, 0.0])):
        residual = residual_weights(TARGET, DRAFT, torch.tensor(scale).double())
        torch.testing.assert_close(residual, torch.tensor(rounded, dtype=torch.float64))
        assert str(tuple(rounded)).replace("0.0", "0") in text


def test_tables_of_the_drafts_kept() -> None:
    _, draws, row = example()
    for rule, rule_law in LAWS.items():
        law = rule_law(draws.window())
        assert kept_row(rule, law.stop[row]) in README
        assert kept_row(rule, draws.weight @ law.stop) in README


def kept_row(rule: str, stop: Tensor) -> str:
    mean = float(stop @ torch.arange(4).double())
    return table_row([f"`{rule}`", *(abs(share) for share in stop.tolist()), mean])


def test_coupled_part() -> None:
    noise = torch.tensor([[0.1, 1.4, -0.3], [0.9, 0.2, 1.0]], dtype=torch.float64)
    drafts = sample_with_gumbel(DRAFT, noise)
    tokens = sample_with_gumbel(TARGET, noise)
    for place in range(2):
        numbers = [
            ", ".join(f"{x:.2f}" for x in (law.log() + noise[place]).tolist())
            for law in (DRAFT, TARGET)
        ]
        noises = ", ".join(str(x) for x in noise[place].tolist())
        cells = [place + 1, noises, numbers[0], int(drafts[place]), numbers[1], int(tokens[place])]
        assert table_row(cells) in README
    result = coupled_verify(
        torch.cat([drafts, torch.tensor([0])]).unsqueeze(0),
        TARGET.expand(1, 4, 3),
        torch.cat([noise, torch.zeros(2, 3)]).unsqueeze(0),
    )
    assert emitted(result) == [1, 0]
    assert "keeps 1 draft and emits `[1, 0]`" in " ".join(README.split())


def test_means_are_those_of_the_laws() -> None:
    """The README's comparison of the two rules, over all drafts."""
    _, draws, _ = example()
    means = []
    for rule_law in LAWS.values():
        law: RuleLaw = rule_law(draws.window())
        means.append(float((draws.weight @ law.stop) @ torch.arange(4).double()))
    assert means == sorted(means)
