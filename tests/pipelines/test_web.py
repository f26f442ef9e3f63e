"""The first picture that a user sees: Dagster's page of the graph over a finished home, looked at in Chromium."""

import importlib.util
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from graph_commands import BIN, processes, started, until

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
GROUPS = ("corpus", "valuation", "provenance", "training", "unlearning")
DRAWN_S = 60

missing = [
    name
    for name, found in (
        ("chromium", CHROMIUM.exists()),
        ("playwright", importlib.util.find_spec("playwright")),
        ("dagster-webserver", importlib.util.find_spec("dagster_webserver")),
    )
    if not found
]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(url: str) -> bool:
    """Whether a web server is there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@contextmanager
def served(home: Path, port: int, *command: str) -> Iterator[str]:
    """A server over a home, stopped when the block is left."""
    with started(home, *command) as server:
        url = f"http://127.0.0.1:{port}"
        until(
            lambda: answers(f"{url}/server_info") or server.poll() is not None,
            "the server answers",
            240,
        )
        assert server.poll() is None, f"the server ended with {server.returncode}"
        yield url
        server.send_signal(signal.SIGINT)
        until(lambda: not processes(home), "the server stopped when it was asked to", 60)


@contextmanager
def browsed(url: str) -> Iterator:
    """A page in a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.goto(url, wait_until="domcontentloaded", timeout=120_000)
        try:
            yield page
        finally:
            browser.close()


def drawn(page, *words: str) -> str:
    """The page's text, once all of these words are on it."""
    deadline = time.monotonic() + DRAWN_S
    text = ""
    while time.monotonic() < deadline:
        text = page.inner_text("body")
        if all(word in text for word in words):
            page.wait_for_timeout(1500)  # the graph's own layout comes a moment after its words
            return page.inner_text("body")
        page.wait_for_timeout(250)
    raise AssertionError(f"of {words} the page shows only: {text[:2000]}")


@pytest.fixture
def site(tiny_home: Path, copied: Callable[[Path], Path]) -> Iterator[str]:
    """Dagster's web server over a copy of the finished home."""
    home, port = copied(tiny_home), free_port()
    server = [
        str(BIN / "dagster-webserver"),
        "-m",
        "pipelines.definitions",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    with served(home, port, *server) as url:
        yield url


def test_the_asset_graph_is_the_first_picture(site: str, tmp_path: Path) -> None:
    """The five groups stand on /asset-groups with their states, and no dialog stands before them."""
    picture = tmp_path / "asset-groups.png"
    with browsed(f"{site}/asset-groups") as page:
        text = drawn(page, *GROUPS)
        page.screenshot(path=picture)
        assert page.locator("[role=dialog]").count() == 0
    assert "Join the Dagster community" not in text
    assert "Welcome" not in text
    assert picture.stat().st_size > 20_000  # an empty page is smaller

    with browsed(f"{site}/assets/prices") as page:
        text = drawn(page, "prices", "Latest")
        page.screenshot(path=tmp_path / "prices.png")
    assert "Owners\nvaluation" in text
    assert "a fixed function of committed values that adds up to the pool" in text
    assert "No description found" not in text


@pytest.mark.slow
def test_dataworth_ui_serves_the_graph_and_stops(
    tiny_home: Path, copied: Callable[[Path], Path], tmp_path: Path
) -> None:
    """`dataworth ui` answers on its port with schedule and sensor running, and Ctrl-C ends all of it."""
    home, port = copied(tiny_home), free_port()
    command = [str(BIN / "dataworth"), "ui", "--port", str(port)]
    with served(home, port, *command) as url, browsed(f"{url}/automation") as page:
        drawn(page, "nightly", "Standard sensor", "Scheduled")
        page.screenshot(path=tmp_path / "automation.png")
