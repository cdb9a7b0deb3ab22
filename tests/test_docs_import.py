"""Every example of `docs/import.md`, run as it stands."""

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "import.md"
EXAMPLE = re.compile(r"^## (?P<title>[^\n]+)$|^```python\n(?P<code>.*?)^```$", re.M | re.S)


def examples() -> list:
    """Each fenced block under its heading's name, on the page's own lines."""
    text, title, found = PAGE.read_text(encoding="utf-8"), "", []
    for match in EXAMPLE.finditer(text):
        title = match["title"] or title
        if match["code"] is not None:
            # The empty lines make a failure point at the line of the page.
            above = text.count("\n", 0, match.start("code"))
            found.append(pytest.param("\n" * above + match["code"], id=title))
    return found


@pytest.fixture
def _compiling_without_optimizing():
    # What these examples cost is compilation, and each program runs once.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_compiling_without_optimizing")
@pytest.mark.parametrize("code", examples())
def test_an_example_runs_and_checks_something(code):
    assert re.search(r"^\s*assert ", code, re.M)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})


def test_the_page_has_an_example_for_every_way_in():
    assert len(examples()) == PAGE.read_text(encoding="utf-8").count("```python") == 9
