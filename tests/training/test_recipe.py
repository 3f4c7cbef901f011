"""The recipe of the bundled corpus is strict, and names permissive licences alone."""

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.training.recipe import PERMISSIVE_LICENCES, STDLIB, SUITES, Recipe, Source

BUNDLED_RECIPE = Path(__file__).parents[2] / "configs" / "corpus.toml"
TABLE = """\
[[source]]
name = "a"
version = "1.0"
kind = "wheel"
licence = "MIT"
suite = "code"
include = ["a/*.py"]
"""


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "corpus.toml"
    path.write_text(text, encoding="utf-8")
    return Recipe.from_toml(path)


def test_the_bundled_recipe_is_read() -> None:
    sources = Recipe.from_toml(BUNDLED_RECIPE).sources
    assert {source.suite for source in sources} == set(SUITES)
    assert [source.kind for source in sources].count(STDLIB) == 1
    keys = [(source.name, source.suite, source.include) for source in sources]
    assert len(set(keys)) == len(keys)
    # One version of each package.
    assert len({(s.name, s.kind, s.version) for s in sources if s.kind != STDLIB}) == len(
        {(s.name, s.kind) for s in sources if s.kind != STDLIB}
    )


def test_no_licence_on_the_list_asks_for_more_than_a_notice() -> None:
    assert not [name for name in PERMISSIVE_LICENCES if "GPL" in name or "MPL" in name]


def test_globs_choose_files(tmp_path: Path) -> None:
    text = 'exclude_code = ["*/tests/*"]\nexclude_json = ["*"]\n' + TABLE + 'exclude = ["a/x*"]\n'
    (source,) = read(tmp_path, text).sources
    assert source.label == "a-1.0"
    paths = ("a/b.py", "a/b/c.py", "a/b.pyi", "a/xy.py", "a/tests/b.py", "b.py")
    assert [path for path in paths if source.matches(path)] == ["a/b.py", "a/b/c.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no source; tables named source are expected"),
        (TABLE.replace("[[source]]", "[[sources]]"), "sources; tables named source"),
        (TABLE + "max_byte = 3\n", "unknown key 'max_byte'; known are exclude, include"),
        (TABLE.replace('kind = "wheel"\n', ""), "a: .*missing.*'kind'"),
        (TABLE.replace("MIT", "GPL-3.0-only"), "a: licence 'GPL-3.0-only' is none of Apache-2.0"),
        (TABLE.replace("wheel", "egg"), "a: kind 'egg' is none of sdist, wheel, npm, stdlib"),
        (TABLE.replace('"code"', '"poems"'), "a: suite 'poems' is none of code, prose, json"),
        (TABLE.replace("wheel", "stdlib"), "a: version and include are needed, but for"),
        (TABLE.replace('version = "1.0"\n', ""), "a: version and include are needed, but for"),
        ("[[source]\n", "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/corpus\.toml: {message}"):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        Recipe.from_toml(tmp_path / "absent.toml")


def test_the_standard_library_needs_no_version() -> None:
    assert Source("python", STDLIB, "PSF-2.0", "code").include == ()
