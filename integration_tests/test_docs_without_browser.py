"""The session `browser` fails where it cannot look at the site."""

import subprocess
import sys
from pathlib import Path

LOOKS = Path(__file__).with_name("test_docs_browser.py")
# Playwright as it is where it has downloaded no browser.
PLAYWRIGHT = """
import contextlib

class Error(Exception): ...

class Found:
    class chromium:
        def launch(args):
            raise Error("Executable doesn't exist")

def sync_playwright():
    return contextlib.nullcontext(Found)
"""


def test_a_missing_chromium_is_a_fault_where_the_site_was_to_be_looked_at(tmp_path):
    (tmp_path / "playwright").mkdir()
    (tmp_path / "playwright" / "__init__.py").touch()
    (tmp_path / "playwright" / "sync_api.py").write_text(PLAYWRIGHT)
    (tmp_path / "index.html").touch()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider"),
            *(str(LOOKS), "-k", "start_pages"),
        ],
        env={name: str(tmp_path) for name in ("TOWERS_SITE", "PYTHONPATH", "PATH")},
        cwd=LOOKS.parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 error" in done.stdout, done.stdout + done.stderr
    assert "no Chromium: run `playwright install chromium`" in done.stdout
    assert done.returncode == 1
