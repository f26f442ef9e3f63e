"""What the inbox sensor looks at: names, sizes and times first, content only when those changed."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.results import latest

if TYPE_CHECKING:
    from pipelines.site import Site


def listing(inbox: Path) -> str:
    """Digest over name, size and modification time of every delivery; cheap enough for every minute.

    Args:
        inbox: Folder `OWNER/*`; a missing one is an empty one.
    """
    found = []
    for path in sorted(inbox.glob("*/*")):
        if not path.name.startswith(".") and path.is_file():
            stat = path.stat()
            found.append(f"{path.parent.name}/{path.name}|{stat.st_size}|{stat.st_mtime_ns}")
    return sha256("\n".join(found).encode()).hexdigest()


def changed_content(site: "Site") -> str | None:
    """Digest of the inbox's content, or None if it is empty or the last run saw just that."""
    from pipelines.steps.corpus import content_digest
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.deliveries import scan
    from pipelines.storage.errors import IntakeError

    if site.demo and not site.home.keys_path.exists():
        return None  # the default corpus is not delivered yet; the first run is a person's
    try:
        digest = content_digest(scan(site.inbox, corpus_keys(site).k_file))
    except IntakeError:
        return None
    seen = latest(site.home.results, "deliveries")
    return None if seen and seen.data_version == digest else digest
