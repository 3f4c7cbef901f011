"""Facts about the bundled prompts."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.bundled import BUNDLED_SUITES
from outrider.training import prompts as prompts_module
from outrider.training.corpus import HELD_OUT_MODULES, collect_documents
from outrider.training.documents import Document, write_json_lines
from outrider.training.prompts import (
    MAX_PER_DOCUMENT,
    MAX_TOKENS,
    MIN_TOKENS,
    PROMPTS_FILE,
    SUITES_FOLDER,
    main,
    make_prompts,
    places_to_cut,
    spread_evenly,
    write_suites,
    write_workload,
)
from tests.training.prompt_lines import load_prompts

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "bundled"
MAX_SUITE_BYTES = 200_000


def test_prompts_are_many_spread_and_of_the_stated_length() -> None:
    prompts = load_prompts(BUNDLED / PROMPTS_FILE)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    assert len(prompts) >= 128
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.source for prompt in prompts)
    assert counts.keys() == HELD_OUT_MODULES
    assert max(counts.values()) <= 8
    for prompt in prompts:
        assert MIN_TOKENS <= len(tokenizer.encode(prompt.prompt).ids) <= MAX_TOKENS


def test_cutting_is_deterministic_and_quotes_the_source() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    documents = collect_documents(held_out=True)[:3]
    prompts = make_prompts(tokenizer, documents)
    assert prompts == make_prompts(tokenizer, documents)
    texts = {document.source: document.text for document in documents}
    for prompt in prompts:
        start = texts[prompt.source].index(prompt.prompt)
        assert start == 0 or texts[prompt.source][start - 1] == "\n"


@pytest.mark.parametrize(("suite", "num_prompts"), [("code", 200), ("prose", 100), ("json", 100)])
def test_a_suite_has_enough_prompts_from_many_files(suite: str, num_prompts: int) -> None:
    path = BUNDLED_SUITES[suite]
    assert path.stat().st_size < MAX_SUITE_BYTES
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert all(json.loads(line).keys() == {"prompt", "source"} for line in lines)
    prompts = load_prompts(path)
    assert len(prompts) >= num_prompts
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)
    assert max(Counter(prompt.source for prompt in prompts).values()) == MAX_PER_DOCUMENT == 2
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    for prompt in prompts:
        assert MIN_TOKENS <= len(tokenizer.encode(prompt.prompt).ids) <= MAX_TOKENS


def test_code_is_of_the_held_out_modules_and_of_other_packages() -> None:
    sources = {prompt.source for prompt in load_prompts(BUNDLED_SUITES["code"])}
    assert len(sources) >= 130
    # One or two of them may have no function that is long enough for this.
    assert len(sources & HELD_OUT_MODULES) >= 30
    assert len({source.split("/")[0] for source in sources - HELD_OUT_MODULES}) >= 20


def test_other_text_is_cut_in_the_middle_of_its_halves() -> None:
    assert places_to_cut("line\n" * 47, "prose") == []
    assert places_to_cut("line\n" * 51, "json") == [(0, 24), (25, 50)]
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    lines = [f"Line {number} of a page about many things.\n" for number in range(100)]
    document = Document("page.rst", "".join(lines))
    prompts = make_prompts(tokenizer, [document], suite="prose", max_per_document=2)
    assert len(prompts) == 2
    ends = []
    for prompt in prompts:
        assert document.text.count(prompt.prompt) == 1
        assert prompt.prompt.startswith("Line ")
        ends.append(document.text.index(prompt.prompt) + len(prompt.prompt))
    first, second = sorted(document.text[:end].count("\n") for end in ends)
    assert 12 <= first <= 38
    assert 62 <= second <= 88


def test_python_of_another_version_is_not_cut() -> None:
    body = "".join(f"    line{number} = {number}\n" for number in range(9))
    # An escape that Python warns of is no other version.
    assert places_to_cut(f"def f():\n{body}    return '\\d'\n", "code") == [(1, 10)]
    assert places_to_cut(f"def f():\n{body}    print line1\n", "code") == []
    assert places_to_cut(f"def f():\n{body}    '\0'\n", "code") == []


def test_suites_are_cut_from_the_held_out_files_of_a_corpus(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    page = Document("page.rst", "".join(f"A line about the number {i}.\n" for i in range(90)))
    sources = []
    for suite, documents in (
        ("code", collect_documents(held_out=True)[:2]),
        ("prose", [page]),
        ("json", [page]),
    ):
        write_json_lines(tmp_path / f"held_out_{suite}.jsonl", documents)
        entry = {"suite": suite, "name": f"a-{suite}", "version": "1", "licence": "MIT"}
        # A file that gave no prompt is not counted.
        names = [*(document.source for document in documents), "absent"]
        sources.append({**entry, "held_out": names})
    (tmp_path / "provenance.json").write_text(json.dumps({"sources": sources}))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    write_suites(tokenizer, tmp_path, tmp_path / SUITES_FOLDER)
    code = load_prompts(tmp_path / SUITES_FOLDER / "code.jsonl")
    assert Counter(prompt.source for prompt in code) == {"asyncio/locks.py": 2, "bisect.py": 2}
    assert len(load_prompts(tmp_path / SUITES_FOLDER / "prose.jsonl")) == 2
    page_text = (tmp_path / SUITES_FOLDER / "README.md").read_text()
    assert "| code | a-code 1 | MIT | 2 |\n| prose | a-prose 1 | MIT | 1 |\n" in page_text


def test_a_suite_that_is_cut_short_has_prompts_of_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    pages = [
        Document(f"{name}.rst", "".join(f"A line of {name}, number {i}.\n" for i in range(90)))
        for name in "abcd"
    ]
    write_json_lines(tmp_path / "held_out_prose.jsonl", pages)
    (tmp_path / "provenance.json").write_text('{"sources": []}')
    monkeypatch.setattr(prompts_module, "_MAX_PROMPTS", {"prose": 5})
    write_suites(tokenizer, tmp_path, tmp_path)
    sources = [prompt.source for prompt in load_prompts(tmp_path / "prose.jsonl")]
    assert len(sources) == 5
    assert set(sources) == {"a.rst", "b.rst", "c.rst", "d.rst"}


def test_a_workload_is_cut_from_what_is_trained_on(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    page = "".join(f"A line of the page, number {i}.\n" for i in range(90))
    documents = [
        *collect_documents(held_out=True)[:8],
        *(Document(f"page{number}.rst", f"Page {number}\n{page}") for number in range(3)),
        Document("data.json", page),
    ]
    write_json_lines(tmp_path / "train.jsonl", documents)
    write_workload(tokenizer, tmp_path, tmp_path / "workload.jsonl", num_prompts=10)
    prompts = load_prompts(tmp_path / "workload.jsonl")
    kinds = Counter(prompt.source.rsplit(".")[-1] for prompt in prompts)
    assert kinds == {"py": 7, "rst": 2, "json": 1}
    assert len({prompt.prompt for prompt in prompts}) == 10
    by_command = tmp_path / "by_command.jsonl"
    assert main([str(BUNDLED), "--corpus", str(tmp_path), "--workload", str(by_command)]) == 0
    assert {prompt.source for prompt in load_prompts(by_command)} == {
        document.source for document in documents
    }


def test_what_cannot_be_cut_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert told.count("\n") == 1
        return told

    workload = ("--workload", tmp_path / "w.jsonl")
    with pytest.raises(SystemExit, match="2"):
        main([str(BUNDLED), "--workload", "w.jsonl"])
    assert "--workload: needs --corpus" in capsys.readouterr().err
    assert "tokenizer.json" in fails(tmp_path, "--corpus", tmp_path, *workload)
    assert "train.jsonl" in fails(BUNDLED, "--corpus", tmp_path, *workload)
    documents = [Document("a.rst", "A line.\n" * 99)]
    write_json_lines(tmp_path / "train.jsonl", documents)
    absent = tmp_path / "absent" / "w.jsonl"
    told = fails(BUNDLED, "--corpus", tmp_path, "--workload", absent)
    assert told == f"error: {absent}: No such file or directory\n"


ENTRY = {"suite": "code", "name": "a", "version": "1", "licence": "MIT", "held_out": ["a.py"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "no valid JSON at line 1"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "'sources' is missing"),
        ('{"sources": 3}', "not what a corpus has: 'int' object is not iterable"),
        ('{"sources": ["a"]}', "not what a corpus has: string indices"),
        (json.dumps({"sources": [{**ENTRY, "suite": "verse"}]}), "'verse' is missing, or unknown"),
        (json.dumps({"sources": [{"suite": "code", "held_out": ["a.py"]}]}), "'name' is missing"),
    ],
)
def test_a_corpus_of_unknown_origin_is_not_cut(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    page = "".join(f"A line of the page, number {i}.\n" for i in range(90))
    write_json_lines(
        tmp_path / "held_out_code.jsonl",
        [Document("a.py", collect_documents(held_out=True)[0].text)],
    )
    for suite in ("prose", "json"):
        write_json_lines(tmp_path / f"held_out_{suite}.jsonl", [Document("a", page)])
    if text is not None:
        (tmp_path / "provenance.json").write_text(text)
    assert main([str(tmp_path), "--corpus", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path}/provenance.json: {message}")
    assert told.count("\n") == 1
    assert not (tmp_path / SUITES_FOLDER).exists()


def test_every_suite_says_where_it_is_from() -> None:
    page = BUNDLED_SUITES["code"].with_name("README.md").read_text()
    for suite, path in BUNDLED_SUITES.items():
        rows = [row.split(" | ") for row in page.splitlines() if row.startswith(f"| {suite} |")]
        num_files = sum(int(row[-1].rstrip(" |")) for row in rows)
        assert num_files == len({prompt.source for prompt in load_prompts(path)})


def test_prompts_are_spread_over_their_file() -> None:
    assert spread_evenly(range(10), 4) == [0, 2, 5, 7]
    assert spread_evenly(range(300), 200)[-1] == 298
    assert spread_evenly(range(3), 3) == spread_evenly(range(3), 9) == [0, 1, 2]
