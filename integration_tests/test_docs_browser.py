"""The built site, looked at with a real Chromium, on a desk and on a phone.

`nox -s browser` builds the site and runs this. It needs playwright, and a Chromium:
playwright's own, or one of the system. Where something is missing, this is skipped, but
not when TOWERS_SITE names the site, as that session has it.
"""

import contextlib
import functools
import http.server
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

ROOT = Path(__file__).parents[1]
SITE = Path(os.environ.get("TOWERS_SITE", ROOT / "out" / "docs")).resolve()
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
WAIT_MS = 20_000
SYSTEM_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

pytestmark = pytest.mark.timeout(240)
api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; nox -s browser does it"
)


def miss(what, **options):
    """Skips, but fails where looking at the site was what was asked for."""
    if "TOWERS_SITE" in os.environ:
        pytest.fail(what, pytrace=False)
    pytest.skip(what, **options)


if not (SITE / "index.html").exists():
    miss(f"no site in {SITE}; nox -s docs builds it", allow_module_level=True)

PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))


@pytest.fixture(scope="module")
def address():
    """Serves the site on a free port."""
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = start(playwright.chromium)
        if started is None:
            miss(
                "no Chromium: run `playwright install chromium`, or install the "
                f"system's ({', '.join(SYSTEM_BROWSERS)})"
            )
        yield started
        started.close()


def start(chromium):
    """Starts playwright's own Chromium, else the system's; None without any."""
    # A sandbox needs rights that a container's root does not have.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with contextlib.suppress(api.Error):
        return chromium.launch(args=arguments)
    for name in SYSTEM_BROWSERS:
        if path := shutil.which(name):
            return chromium.launch(executable_path=path, args=arguments)
    return None


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def page(request, browser):
    opened = browser.new_page(viewport=request.param)
    opened.set_default_timeout(WAIT_MS)
    faults = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("requestfailed", lambda asked: faults.append(asked.url))
    yield opened
    opened.close()
    assert not faults


def test_every_page_loads_and_fits_the_width(page, address):
    too_wide = {}
    for name in PAGES:
        answer = page.goto(address + name)
        assert answer.status == 200, name
        assert "towers" in page.title(), f"{name} has no title"
        room, needed = page.evaluate(
            "[document.documentElement.clientWidth,"
            " document.documentElement.scrollWidth]"
        )
        if needed > room:
            too_wide[name] = needed
    assert not too_wide, f"wider than {room} pixels: {too_wide}"


def test_every_picture_is_shown_and_has_a_text_alternative(page, address):
    seen = 0
    for name in PAGES:
        page.goto(address + name)
        for picture in page.locator("img").all():
            picture.scroll_into_view_if_needed()
            width = picture.evaluate("p => p.decode().then(() => p.naturalWidth)")
            assert width > 0, f"{name}: {picture.get_attribute('src')} does not load"
            text = picture.get_attribute("alt") or ""
            assert len(text.split()) > 3, f"{name}: {picture.get_attribute('src')}"
            seen += 1
    assert seen >= 5


def test_no_link_inside_the_site_is_broken(browser, address):
    page = browser.new_page(viewport=DESK)
    anchors, links = {}, set()
    for name in PAGES:
        page.goto(address + name)
        anchors[name] = set(
            page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        )
        found = page.evaluate(
            "[...document.querySelectorAll('a[href]')].map(e => e.getAttribute('href'))"
        )
        links |= {(name, link) for link in found}
    page.close()
    inside = [
        (name, urldefrag(urljoin(address + name, link)))
        for name, link in links
        if not urlparse(link).scheme
    ]
    assert len(inside) > 100
    broken = {
        f"{name}: {target.url}#{target.fragment}"
        for name, target in inside
        if not leads_somewhere(unquote(urlparse(target.url).path)[1:], target, anchors)
    }
    assert not broken


def leads_somewhere(path, target, anchors):
    path = path or "index.html"
    if not (SITE / path).is_file():
        return False
    wanted = unquote(target.fragment)
    return not wanted or path not in anchors or wanted in anchors[path]


def test_the_search_finds_a_class_by_its_name(page, address):
    page.goto(address + "search.html?q=LeastLoadedDeviceSetter")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").evaluate_all(
        "links => links.map(link => link.getAttribute('href'))"
    )
    assert any("api/tw-core.html" in link for link in found), found


def test_the_start_pages_search_box_leads_there(browser, address):
    page = browser.new_page(viewport=DESK)
    page.goto(address)
    page.locator("input[name=q]").first.fill("LeastLoadedDeviceSetter")
    page.locator("input[name=q]").first.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.close()


def test_pictures_stay_readable_in_dark_mode(browser, address):
    """A picture has a ground of its own, and text that stands out from it."""
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport=DESK, color_scheme=scheme)
        for path in sorted((SITE / "_images").glob("*.svg")):
            page.goto(f"{address}_images/{path.name}")
            ground, text = page.evaluate(
                "['.ground', 'text'].map("
                "s => getComputedStyle(document.querySelector(s)).fill)"
            )
            assert contrast(ground, text) >= 7, f"{path.name}, {scheme}"
            assert page.locator("title").count() == page.locator("desc").count() == 1
        page.close()


def contrast(one, other):
    """The contrast ratio of two `rgb(...)` colours, as WCAG 2 defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [int(part) / 255 for part in colour.strip("rgb()").split(",")[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_public_name_is_in_the_reference():
    interfaces = sorted(ROOT.glob("packages/*/api.txt"))
    assert interfaces
    missing = []
    for interface in interfaces:
        package = interface.parent.name
        html = (SITE / "api" / f"{package}.html").read_text()
        for line in interface.read_text().splitlines():
            kind, _, rest = line.partition(" ")
            name = rest.partition("(")[0].split(":")[0].split(" ")[0]
            if kind in ("class", "def", "value") and name.count(".") == 1:
                missing += [name] if f'id="{name}"' not in html else []
    assert not missing
