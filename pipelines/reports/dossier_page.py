"""One HTML file from one `Dossier`: `render_dossier`. It stands alone, runs no script and asks for nothing, like the main report.

Part 1 fills the first printed page; part 2 begins on a new one. Equal facts give equal bytes.
"""

import hashlib

from pipelines.reports import attack_words
from pipelines.reports import dossier_words as words
from pipelines.reports.dossier import Dossier
from pipelines.reports.dossier_drawings import drawings
from pipelines.reports.page import environment, picture

MAX_PEOPLE = 25
"""People shown on the page; the JSON has all."""


def render_dossier(dossier: Dossier) -> str:
    """Write a dossier as one self-contained HTML page.

    Args:
        dossier: every fact of the page.

    Returns:
        HTML text, UTF-8 when written.
    """
    text = dossier.to_json()
    made = {
        name: picture(
            one.draw, f"chart-{name}", one.title, (one.told, one.caption), one.height
        )
        for name, one in drawings(dossier).items()
    }  # fmt: skip
    return (
        environment()
        .get_template("dossier.html")
        .render(
            dossier=dossier,
            words=words,
            attack=attack_words.title,
            subgroup=attack_words.subgroup,
            pictures=made,
            max_people=MAX_PEOPLE,
            digest=hashlib.sha256(text.encode()).hexdigest(),
        )
    )
