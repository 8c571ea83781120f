"""Checkers of types read a page's programs at the lines that these have on the page."""

import pytest
from harness.docs_blocks import READMES, ROOT
from structure.pages import programs

PAGES = (ROOT / "docs/howto/keras.md", ROOT / "docs/howto/fit-over-processes.md")


@pytest.mark.parametrize("page", (*PAGES, READMES[-1]), ids=lambda page: page.stem)
def test_every_line_of_a_program_is_that_of_its_page(page):
    lines = page.read_text().splitlines()
    found = dict(programs(page))
    assert len({*found}) > 0
    for code in found.values():
        for number, line in enumerate(code.splitlines()):
            assert not line or lines[number].strip() == line.strip()
        compile(code, page.name, "exec")


def test_the_blocks_of_a_page_are_one_program_but_for_files_and_readmes(tmp_path):
    block = "```python\n{}\n```\n"
    page = ROOT / "docs" / "howto" / "a-page.md"
    text = block.format("x = 1") + block.format("# train.py\ny = 2") + block.format("x")
    assert _programs(page, text) == {
        "docs_howto_a_page.py": "\nx = 1\n\n\n\n\n\n\nx\n",
        "docs_howto_a_page_1.py": "\n\n\n\n# train.py\ny = 2\n",
    }
    assert len(_programs(READMES[0], text)) == 3


def _programs(page, text):
    """Finds the programs of a page that is ``text`` instead of what is there."""

    class Page(type(page)):
        def read_text(self, **_):
            return text

    return dict(programs(Page(page)))
