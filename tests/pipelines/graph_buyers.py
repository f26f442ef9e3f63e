"""Two buyers beside the first, for the homes of the tests."""

import json
from pathlib import Path

ROADS = ["The roads that were begun in the spring are open.", "Canals and harbors are repaired every year.", "A road is paid by toll."]  # fmt: skip
BANKS = ["The debt grows smaller with every quarter.", "Interest is paid in silver.", "The bank keeps its books open.", "Notes are redeemed."]  # fmt: skip
POOLS = {"acme": 7_000_001, "zeta": 3_000_000}


def asked(home: Path) -> None:
    """Two buyers with files of their own, written into the home's configuration."""
    with (home / "dataworth.toml").open("a") as file:
        for name, texts in (("acme", ROADS), ("zeta", BANKS)):
            rows = [json.dumps({"text": text, "licence": "CC0-1.0"}) for text in texts]
            (home / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
            file.write(f'\n[buyers.{name}]\ntarget = "{name}.jsonl"\npool_microunits = {POOLS[name]}\ncurrency = "USD"\n')  # fmt: skip
