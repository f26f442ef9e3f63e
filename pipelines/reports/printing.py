"""PDF from a page by a headless Chromium of this machine; nothing is installed or fetched for it.

The page is self-contained, so that the browser needs no network: it gets none (every host is mapped to nowhere) and a profile of its
own that is thrown away. A PDF carries its time of making, so equal pages give unequal bytes: the digest that counts is the JSON's.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pipelines.reports.errors import ReportError

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "headless_shell",
)
PATIENCE_S = 120


def browser() -> str | None:
    """Path of a Chromium on this machine: the first known name on the PATH; None without one."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def print_pdf(page: Path, target: Path) -> None:
    """Print a page to PDF.

    Args:
        page: HTML file.
        target: PDF file, replaced when the new one is whole.

    Raises:
        ReportError: No Chromium, or it made no PDF; says what to do.
    """
    program = browser()
    if program is None:
        raise ReportError(
            "no Chromium found for the PDF: install one (apt install chromium) or put yours on the PATH; "
            f"the HTML file prints just as well from any browser: {page}"
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".printing-") as folder:
        made = Path(folder) / "page.pdf"
        command = [
            program, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
            "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile",
            "--no-pdf-header-footer", f"--print-to-pdf={made}", page.resolve().as_uri(),
        ]  # fmt: skip
        if os.geteuid() == 0:  # Chromium refuses its sandbox to root; the page runs no script
            command.insert(1, "--no-sandbox")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReportError(f"Chromium ({program}) could not print {page.name}: {error}") from error  # fmt: skip
        if not made.exists() or not made.read_bytes().startswith(b"%PDF"):
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ReportError(f"Chromium ({program}) made no PDF of {page.name}: {last}")
        made.replace(target)
