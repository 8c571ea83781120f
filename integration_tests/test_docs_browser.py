"""The built site, looked at with a real Chromium, on a desk and on a phone.

`nox -s docs -- browser` builds the site and runs this. It needs playwright, and a
Chromium: playwright's own, or one of the system. Where something is missing, this is
skipped, but not when TOWERS_SITE names the site, as that session has it.
"""

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urljoin, urlparse

import pytest

ROOT = Path(__file__).parents[1]
SITE = Path(os.environ.get("TOWERS_SITE", ROOT / "out" / "docs")).resolve()
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
WAIT_MS = 20_000
SYSTEM_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

pytestmark = pytest.mark.timeout(240)
api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright, as nox -s docs -- browser has it"
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
    with served(SITE) as found:
        yield found


@contextlib.contextmanager
def served(folder):
    """Serves a folder on a free port, whose address it gives."""
    handler = functools.partial(Quiet, directory=str(folder))
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
    # A page that is left at once does not wait for what it asked for.
    opened.on(
        "requestfailed",
        lambda asked: "ERR_ABORTED" in asked.failure or faults.append(asked.url),
    )
    opened.on("response", lambda got: got.status < 400 or faults.append(got.url))
    yield opened
    opened.close()
    assert not faults


def test_every_page_loads_and_fits_the_width(page, address):
    """Nothing but code is scrolled sideways on a phone, either."""
    too_wide, scrolled = {}, {}
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
        wide = page.evaluate(
            "[...document.querySelectorAll('article :not(pre)')].filter(e =>"
            " e.scrollWidth > e.clientWidth + 1 &&"
            " ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)"
            ").map(e => e.innerText.slice(0, 60))"
        )
        if wide and page.viewport_size == PHONE:
            scrolled[name] = wide
    assert not too_wide, f"wider than {room} pixels: {too_wide}"
    assert not scrolled


def test_code_keeps_its_columns_and_commands_wrap(page, address):
    page.goto(f"{address}howto/gpus.html")
    shown = page.evaluate(
        "[...document.querySelectorAll('.highlight pre')].map(pre => {"
        " const style = getComputedStyle(pre);"
        " const [above, below] = [style.paddingTop, style.paddingBottom];"
        " const padding = parseFloat(above) + parseFloat(below);"
        " return {"
        "  kind: pre.closest('[class*=highlight-]').className.split(/[- ]/)[1],"
        "  scrolls: pre.scrollWidth > pre.clientWidth,"
        "  lines: pre.textContent.trimEnd().split('\\n').length,"
        "  rows: Math.round("
        "   (pre.clientHeight - padding) / parseFloat(style.lineHeight)),"
        " }})"
    )
    code = [block for block in shown if block["kind"] == "python"]
    assert len(code) >= 3
    assert all(block["rows"] == block["lines"] for block in code), code
    commands = [block for block in shown if block["kind"] == "sh"]
    assert commands and not any(block["scrolls"] for block in commands)
    if page.viewport_size == PHONE:
        assert any(block["scrolls"] for block in code)


def test_a_table_of_two_columns_is_a_list_on_a_phone(page, address):
    page.goto(address + "errors/index.html")
    row = page.locator("article table tbody tr").first
    [one, other] = [cell.bounding_box() for cell in row.locator("td").all()]
    stacked = page.viewport_size == PHONE
    assert (other["y"] >= one["y"] + one["height"]) is stacked
    page.goto(address + "tested.html")
    label = "getComputedStyle(document.querySelectorAll('td')[1], '::before').content"
    assert ("attr" in page.evaluate(label) or '"' in page.evaluate(label)) is stacked


def test_an_address_of_a_former_page_of_errors_leads_to_its_message(page, address):
    page.goto(address + HEADING.replace("messages", "core"))
    page.wait_for_url(address + HEADING)


def test_names_in_code_look_unlike_links_in_dark_mode(browser, address):
    page = browser.new_page(viewport=DESK, color_scheme="dark")
    page.goto(address)
    lines = page.evaluate(
        "[...document.querySelectorAll('pre span')].filter(s => !s.closest('a'))"
        ".map(s => getComputedStyle(s).textDecorationLine)"
    )
    page.close()
    assert set(lines) == {"none"}


def test_every_picture_is_shown_and_has_a_text_alternative(page, address):
    seen = 0
    for name in PAGES:
        page.goto(address + name)
        for picture in page.locator("img").all():
            picture.scroll_into_view_if_needed()
            width = picture.evaluate("p => p.decode().then(() => p.naturalWidth)")
            source = picture.get_attribute("src")
            assert width > 0, f"{name}: {source} does not load"
            link = picture.locator("xpath=ancestor::a[1]").get_attribute("href")
            assert link == source, f"{name}: {source} has no link to its full size"
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


def test_the_start_pages_search_box_leads_there(browser, address):
    page = browser.new_page(viewport=DESK)
    page.goto(address)
    page.locator("input[name=q]").first.fill("LeastLoadedDeviceSetter")
    page.locator("input[name=q]").first.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.close()


# As it was raised; test_docs_search.py has more.
PASTED = (
    "RuntimeError: use_logical_cpus: TensorFlow has already started with 1 logical "
    "CPUs; asked for 4. Call it before the first tensor, variable or session."
)
HEADING = "errors/messages.html#tensorflow-has-already-started-with-logical-cpus"


def test_a_message_that_is_pasted_leads_to_its_explanation(page, address):
    page.goto(f"{address}search.html?q={quote(PASTED)}")
    first = page.locator(".find-error li a").first
    assert page.locator(".find-error h2").inner_text() == "The cause of this message"
    assert first.get_attribute("href") == f"{address}{HEADING}"
    page.goto(f"{address}errors/index.html")
    page.get_by_label("Paste a message").fill(PASTED)
    assert first.get_attribute("href") == f"{address}{HEADING}"
    first.click()
    page.wait_for_url(f"{address}{HEADING}")
    page.go_back()
    page.get_by_label("Paste a message").fill("something else entirely")
    page.get_by_text("No cause is listed for this message").wait_for()


def test_the_search_box_of_any_page_takes_a_message(browser, address):
    page = browser.new_page(viewport=DESK)
    page.set_default_timeout(WAIT_MS)
    for message, shown in (
        (PASTED, "The cause of this message"),
        ("ValueError: towers is empty; make some with towers(devices).", None),
    ):
        page.goto(f"{address}howto/keras.html")
        page.locator("input[name=q]").first.fill(message)
        page.locator("input[name=q]").first.press("Enter")
        page.get_by_text(shown or "No cause is listed for this message").wait_for()
    page.close()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Serves the site as two versions, the older without the how-tos."""
    pages = tmp_path_factory.mktemp("pages")
    older = tmp_path_factory.mktemp("older") / "site"
    shutil.copytree(SITE, older, ignore=shutil.ignore_patterns("howto"))
    for site, version in ((older, "tw-core-v0.1.0"), (SITE, "main")):
        command = [sys.executable, ROOT / "docs" / "publish.py", site, pages, version]
        subprocess.run(command, check=True, timeout=60)
    with served(pages) as found:
        yield found


def test_versions_are_chosen_by_keyboard_and_keep_the_page(browser, published):
    page = browser.new_page(viewport=DESK)
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{published}main/design/core.html")
    versions = page.get_by_label("Version", exact=True)
    versions.wait_for(state="visible")
    assert versions.locator("option").all_inner_texts() == [
        "development",
        "tw-core 0.1.0",
    ]
    assert versions.input_value() == "main"
    versions.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_url(f"{published}tw-core-v0.1.0/design/core.html")
    versions.wait_for(state="visible")
    assert versions.input_value() == "tw-core-v0.1.0"
    page.close()


def test_a_page_that_the_other_version_lacks_leads_to_its_start(browser, published):
    page = browser.new_page(viewport=DESK)
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{published}main/howto/core.html")
    page.get_by_label("Version", exact=True).select_option("tw-core-v0.1.0")
    page.wait_for_url(f"{published}tw-core-v0.1.0/")
    page.goto(published)
    page.wait_for_url(f"{published}main/")
    page.close()


def test_a_site_without_other_versions_offers_none(page, address):
    page.goto(address)
    page.wait_for_load_state("networkidle")
    assert not page.get_by_label("Version", exact=True).is_visible()


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
