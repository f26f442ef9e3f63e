"""A user's home for the tests whose values start from a base model, and which gets a second delivery."""

import json
from pathlib import Path

from graph_commands import dataworth

from pipelines.storage.demo import speeches
from pipelines.storage.records import paragraphs

SETTINGS = """
size = "tiny"
[target]
since = "2000-01-01"
[pricing]
pool_microunits = 7_000_001
"""
MESSAGES = {"lincoln": "1861", "hoover": "1929", "adams": "1825", "nixon": "1970", "bush": "2002"}
"""Owner → year of the message that it delivers; none of the default corpus at `tiny`. The last one is held out."""
LATER = {"taft": "1909"}
RECORDS = 6


def deliver(inbox: Path, owners: dict[str, str]) -> None:
    """Write the first records of one message per owner."""
    found = {speech.date[:4]: speech for speech in speeches()}
    for owner, year in owners.items():
        folder = inbox / owner
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "text": text,
                "date": found[year].date,
                "licence": "public-domain",
                "consent_resell": True,
            }
            for text in paragraphs(found[year].text)[:RECORDS]
        ]
        (folder / "message.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def base_of(home: Path) -> Path:
    """The released model of a home, as a base for another."""
    return next((home / "runs").glob("train-*")) / "step-12"


def valued(home: Path, settings: str) -> str:
    """Deliver, and run the graph up to the receipts in a user's home with an inbox beside it."""
    inbox = home.parent / "inbox"
    deliver(inbox, MESSAGES)
    assert dataworth(home, "init", DATAWORTH_INBOX=str(inbox)).returncode == 0
    (home / "dataworth.toml").write_text(SETTINGS + settings)
    return run(home)


def run(home: Path) -> str:
    """Run the graph up to the receipts; what was said."""
    done = dataworth(home, "run", "--select", "*receipts", DATAWORTH_INBOX=str(home.parent / "inbox"))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
