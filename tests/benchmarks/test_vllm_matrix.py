"""The matrix of vLLM's layouts, without vLLM: what is run, what is written, what is a fault."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_agreement, vllm_matrix
from benchmarks.vllm_agreement import Agreement, Comparison, num_shared_places
from benchmarks.vllm_faults import faults, is_worse_than_chance
from benchmarks.vllm_judge import SCHEMA, ForbiddenTokenError, Judge
from benchmarks.vllm_matrix import (
    DECIDING,
    ENTRIES,
    ROOT,
    Entry,
    Report,
    run_missing,
    source_id,
)
from benchmarks.vllm_process import VllmError
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams

TEXT = [5, 6, 7, 8]
GOOD = Agreement(
    k=3,
    num_tokens=1000,
    num_agreeing=1000,
    mean_gap=0.0,
    largest_gap=0.0,
    num_shared=1000,
    num_shared_agreeing=1000,
    num_plain_agreeing=1000,
    num_only_wrong=0,
    num_only_plain_wrong=0,
    num_same_texts=8,
    num_texts=8,
    mean_acceptance_length=2.5,
    num_draft_tokens_missing=4,
    num_cached_tokens=640,
    seconds_to_start=4.0,
    tokens_per_s=50.0,
)


class FakeJudge:
    """Would have written TEXT."""

    def prompts(self, suites: tuple[str, ...], num_prompts: int) -> list[list[int]]:
        return [[1] * 200] * num_prompts

    def gaps(
        self, prompts: list[list[int]], texts: list[list[int]], schema: dict[str, Any] | None
    ) -> list[list[float]]:
        return [[float(a != b) for a, b in zip(text, TEXT, strict=True)] for text in texts]


class FakeVllm:
    """Writes TEXT, or at some K another text, or fails."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.texts: dict[int, list[int]] = {}
        self.error: VllmError | None = None

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        k = task["engine"].get("speculative_config", {}).get("num_speculative_tokens", 0)
        self.asked.append(k)
        if self.error is not None and k:
            raise self.error
        one = {
            "token_ids": [self.texts.get(k, TEXT)] * len(task["prompts"]),
            "seconds": 2.0,
            "num_drafts": 4 * (k > 0),
            "num_draft_tokens": 4 * k,
            "num_accepted_tokens": 3 * (k > 0),
            "num_cached_tokens": 0,
        }
        return {"seconds_to_start": 1.0, "rounds": [one for _ in task["rounds"]]}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()
    monkeypatch.setattr(vllm_agreement, "run_vllm", fake)
    monkeypatch.setattr(vllm_matrix, "run_vllm", fake)
    return fake


def run_rows(path: Path, *entries: Entry, source: str = "one", deadline: float = math.inf) -> None:
    run_missing(entries, Report(path, source), FakeJudge(), deadline)  # type: ignore[arg-type]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_done_is_not_run_again(tmp_path: Path, vllm: FakeVllm) -> None:
    path, entry = tmp_path / "rows.jsonl", Entry("TP2", Comparison({}, num_prompts=2), (0, 1, 3))
    run_rows(path, entry)
    assert vllm.asked == [0, 1, 3]
    assert [(row["k"], row["num_agreeing"], row["faults"]) for row in rows_of(path)] == [
        (0, 8, []),
        (1, 8, []),
        (3, 8, []),
    ]
    assert rows_of(path)[2]["mean_acceptance_length"] == 1.75
    run_rows(path, entry)
    assert vllm.asked == [0, 1, 3]
    run_rows(path, entry, source="another")
    assert vllm.asked == [0, 1, 3, 0, 1, 3]
    # A row of other settings is another one; it takes the old one's place.
    run_rows(path, replace(entry, comparison=Comparison({}, num_prompts=3)), source="another")
    assert [len(vllm.asked), len(rows_of(path))] == [9, 3]


def test_a_fault_is_run_again_beside_k_0(tmp_path: Path, vllm: FakeVllm) -> None:
    path, entry = tmp_path / "rows.jsonl", Entry("TP2", Comparison({}, num_prompts=2), (0, 1, 3))
    vllm.texts[3] = [5, 6, 9, 9]
    run_rows(path, entry)
    bad = rows_of(path)[2]
    assert bad["faults"] == ["4 tokens are not the float32 engine's"]
    assert [bad[name] for name in ("num_shared", "num_shared_agreeing", "num_plain_agreeing")] == [
        6,
        4,
        6,
    ]
    vllm.texts.clear()
    run_rows(path, entry)
    assert vllm.asked == [0, 1, 3, 0, 3]
    assert [row["faults"] for row in rows_of(path)] == [[], [], []]


def test_a_failure_is_a_row_and_the_next_way_runs(tmp_path: Path, vllm: FakeVllm) -> None:
    path = tmp_path / "rows.jsonl"
    vllm.error = VllmError(1, "...\n(Worker) RuntimeError: out of shape\nmore\n")
    run_rows(
        path,
        Entry("TP1", Comparison({}), (0, 1, 3)),
        Entry("PP2", Comparison({}), (3,), refusal="of shape"),
        Entry("TP2", Comparison({}), (3,), refusal="another reason"),
    )
    assert [(row["entry"], row["k"], row["faults"]) for row in rows_of(path)] == [
        ("TP1", 0, []),
        ("TP1", 1, ["(Worker) RuntimeError: out of shape"]),
        ("TP2", 3, ["not refused by the name another reason"]),
        ("PP2", 3, []),
    ]
    assert vllm.asked == [0, 1, 3, 3]


def test_no_row_begins_after_the_deadline(tmp_path: Path, vllm: FakeVllm) -> None:
    path = tmp_path / "rows.jsonl"
    run_rows(path, Entry("TP1", Comparison({}), (0, 1, 3)), deadline=0.0)
    assert not vllm.asked
    assert not path.exists()


def test_the_source_of_a_row_is_what_decides_it(tmp_path: Path) -> None:
    deciding = (
        "constraints-vllm.txt",
        "benchmarks/vllm_faults.py",
        "src/outrider/tokenizer.py",
        "src/outrider/models/qwen4_exp/head.py",
        "src/outrider/vllm_plugin/fixes/new.py",
        "src/outrider/bundled/model.safetensors",
        "src/outrider/entrypoints/llm.py",
        "src/outrider/training/prompts.py",
    )
    others = (
        "benchmarks/serving.py",
        "src/outrider/entrypoints/server/page.html",
        "src/outrider/training/train.py",
        "src/outrider/models/__pycache__/head.pyc",
    )
    ids = [source_id(tmp_path)]
    for name in (*deciding, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for text in ("one", "two"):
            path.write_text(text)
            ids.append(source_id(tmp_path))
    assert len(set(ids)) == 1 + 2 * len(deciding)
    (tmp_path / deciding[0]).unlink()
    assert source_id(tmp_path) not in ids


def test_no_part_of_the_package_is_forgotten_in_the_source_of_a_row() -> None:
    assert all(any(ROOT.glob(pattern)) for pattern in DECIDING)
    package = ROOT / "src" / "outrider"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    named = {pattern.split("/")[2] for pattern in DECIDING if pattern.startswith("src/")}
    assert folders - named == {"grammar"}
    benchmarks = {f"benchmarks/{path.name}" for path in ROOT.glob("benchmarks/vllm_*.py")}
    assert benchmarks - set(DECIDING) == {
        f"benchmarks/vllm_{name}.py" for name in ("acceptance", "matrix", "speed")
    }


def test_pieces_need_long_prompts(tmp_path: Path, vllm: FakeVllm) -> None:
    entry = Entry("TP1", Comparison({"max_num_batched_tokens": 100}))
    with pytest.raises(ConfigError, match="TP1: no prompt takes several pieces"):
        run_rows(tmp_path / "rows.jsonl", entry)


CASES: dict[str, tuple[Comparison, dict[str, Any], list[str]]] = {
    "good": (Comparison({}), {}, []),
    "a near-tie": (Comparison({}), {"num_agreeing": 999, "largest_gap": 1e-6}, []),
    "a wrong token": (
        Comparison({}),
        {"num_agreeing": 999, "largest_gap": 0.3},
        ["1 tokens are not the float32 engine's"],
    ),
    "many near-ties": (
        Comparison({}),
        {"num_agreeing": 998, "largest_gap": 1e-6},
        ["2 tokens are not the float32 engine's"],
    ),
    "bfloat16": (Comparison({"dtype": "bfloat16"}), {"num_agreeing": 980, "largest_gap": 0.2}, []),
    "bfloat16, worse": (
        Comparison({"dtype": "bfloat16"}),
        {"num_agreeing": 960},
        ["40 tokens are not the float32 engine's"],
    ),
    "bfloat16, worse after the same tokens": (
        Comparison({"dtype": "bfloat16"}),
        {"num_only_wrong": 14, "num_only_plain_wrong": 1},
        ["where one of the two is wrong, K is in 14 places and K = 0 in 1"],
    ),
    "no hits": (
        Comparison({"enable_prefix_caching": True}),
        {"num_cached_tokens": 64},
        ["only 64 tokens came from the prefix cache"],
    ),
    "nothing accepted": (
        Comparison({}),
        {"mean_acceptance_length": 1.0},
        ["no draft was accepted"],
    ),
    "nothing cut": (
        Comparison({}, has_schema=True),
        {"num_draft_tokens_missing": 0},
        ["the schema cut no draft"],
    ),
}


@pytest.mark.parametrize(("comparison", "changes", "told"), CASES.values(), ids=CASES.keys())
def test_faults(comparison: Comparison, changes: dict[str, Any], told: list[str]) -> None:
    plain = replace(GOOD, k=0, num_agreeing=985, mean_acceptance_length=1.0)
    assert faults(comparison, replace(GOOD, **changes), plain) == told


def test_a_bfloat16_row_is_at_fault_for_its_first_differences(
    tmp_path: Path, vllm: FakeVllm
) -> None:
    """As many wrong tokens as of K = 0, but those before the first difference are K = 0's."""
    vllm.texts = {0: [5, 6, 7, 9], 1: [5, 6, 7, 1], 3: [5, 6, 9, 8]}
    path = tmp_path / "rows.jsonl"
    run_rows(path, Entry("TP1", Comparison({"dtype": "bfloat16"}, num_prompts=10), (0, 1, 3)))
    assert [row["faults"] for row in rows_of(path)] == [
        [],
        [],
        ["where one of the two is wrong, K is in 10 places and K = 0 in 0"],
    ]
    assert [row["num_agreeing"] for row in rows_of(path)] == [30, 30, 30]


def test_bfloat16_is_compared_over_enough_texts() -> None:
    """A text has one place that tells of K, and ten of them are the least that can."""
    for entry in ENTRIES:
        if entry.comparison.engine_options["dtype"] == "bfloat16":
            assert entry.comparison.num_prompts * len(entry.comparison.suites) >= 20, entry.name


def test_worse_than_chance() -> None:
    assert not is_worse_than_chance(0, 0)
    assert not is_worse_than_chance(9, 0)  # 1 in 512
    assert is_worse_than_chance(10, 0)  # 1 in 1,024
    assert not is_worse_than_chance(0, 10)


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [([1, 2], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 2), ([4, 2], [1, 2], 1), ([1], [1, 2], 1)],
)
def test_shared_places(text: list[int], other: list[int], expected: int) -> None:
    assert num_shared_places(text, other) == expected


def test_entries_have_names_of_their_own_and_k_0() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert all(entry.ks[0] == 0 for entry in ENTRIES if entry.refusal is None)
    with pytest.raises(ConfigError, match="'TP3' is none of TP1; "):
        vllm_matrix.chosen("TP1; TP3")


def test_the_judge() -> None:
    judge = Judge()
    prompts = judge.prompts(["code"], 1)[:1]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    own = judge.llm.generate(prompts, params)[0].outputs[0].token_ids
    assert judge.gaps(prompts, [own]) == [[0.0] * 6]
    other = [*own[:3], own[3] ^ 1, *own[4:]]
    gaps = judge.gaps(prompts, [other])[0]
    assert gaps[:3] == [0.0] * 3
    assert gaps[3] > 0
    # What a grammar leaves no choice at is right however unlikely it is.
    text = judge.llm.get_tokenizer().encode('{"name": "')
    free, held = (judge.gaps(prompts, [text], schema)[0] for schema in (None, SCHEMA))
    assert max(free) > 0
    assert all(a <= b for a, b in zip(held, free, strict=True))
    assert held != free
    with pytest.raises(ForbiddenTokenError, match="where its schema forbids it"):
        judge.gaps(prompts, [judge.llm.get_tokenizer().encode('["name')], SCHEMA)
