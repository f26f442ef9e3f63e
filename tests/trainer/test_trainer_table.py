"""The table of layouts in trainer/README.md is what this test measured: `make table` measures again and writes it."""

import os
import re
from pathlib import Path

import pytest
from trainer_parity import KINDS, Case, alone, errors, fitting, measure
from trainer_processes import run_processes

from trainer.layout import Layout

README = Path(__file__).parents[2] / "trainer/README.md"
BEGIN, END = "<!-- layouts: written by `make table` -->\n", "<!-- /layouts -->"
HEADER = "| processes | layout | model | loss | gradient norm | gradients | weights |\n| ---: | --- | --- | ---: | ---: | ---: | ---: |\n"
COLUMNS = ("loss", "norm", "grad", "weight")
EXACT = 1e-10
PIPE = {"pp": 2, "microbatches": 4}
ROWS = [
    ("dense", Layout(dp_replicate=2)),
    ("mqa", Layout(dp_shard=4)),
    ("gqa", Layout(dp_replicate=2, dp_shard=2)),
    ("gqa", Layout(tp=4)),
    ("mqa", Layout(sp=4)),
    ("gqa", Layout(sp=2, tp=2)),
    ("dense", Layout(schedule="gpipe", **PIPE)),
    ("gqa", Layout(pp=4, microbatches=4)),
    ("gqa", Layout(schedule="interleaved", **PIPE)),
    ("mqa", Layout(schedule="zero-bubble", **PIPE)),
    ("gqa", Layout(schedule="zbv", **PIPE)),
    ("moe", Layout(dp_shard=4, ep=2)),
    ("moe", Layout(dp_shard=2, sp=2, ep=4)),
    ("gqa", Layout(dp_replicate=2, dp_shard=2, tp=2)),
    ("gqa", Layout(dp_shard=2, tp=2, **PIPE)),
    ("moe", Layout(dp_replicate=2, dp_shard=2, ep=2, schedule="zbv", **PIPE)),
    ("moe", Layout(dp_shard=2, sp=2, tp=2, ep=4, **PIPE)),
]


def _table():
    """Rows of the README's table: (processes, layout, model, errors)."""
    text = README.read_text()
    body = text.split(BEGIN)[1].split(END)[0]
    assert body.startswith(HEADER)
    lines = [line.strip("| \n").split(" | ") for line in body.removeprefix(HEADER).splitlines()]
    return [
        (int(n), layout.strip("`"), kind, tuple(map(float, more)))
        for n, layout, kind, *more in lines
    ]


def test_the_readme_has_every_row_and_no_other():
    """The printed table has the layouts of this file in this order, each with errors below 1e-10."""
    printed = _table()
    assert [row[:3] for row in printed] == [
        (layout.world_size, str(layout), kind) for kind, layout in ROWS
    ]
    assert max(max(row[3]) for row in printed) < EXACT


@pytest.mark.slow
def test_the_table_of_layouts(tmp_path):
    """Oracle, float64, packed rows with masked labels and padding: the largest relative error of each row is below 1e-10."""
    lines = []
    for number, (kind, layout) in enumerate(ROWS):
        case = fitting(Case(KINDS[kind], length=22, steps=3), layout)
        got, *_ = run_processes(layout.world_size, tmp_path / str(number), measure, case, layout)
        found = errors(got, alone(case))
        assert max(found.values()) < EXACT, (layout, found)
        cells = " | ".join(f"{found[name]:.0e}" for name in COLUMNS)
        lines.append(f"| {layout.world_size} | `{layout}` | {kind} | {cells} |\n")
    assert len(lines) == len(ROWS)
    if os.environ.get("LAYOUT_TABLE") == "write":
        text = README.read_text()
        README.write_text(
            re.sub(
                f"{re.escape(BEGIN)}.*?{re.escape(END)}",
                lambda _: BEGIN + HEADER + "".join(lines) + END,
                text,
                flags=re.DOTALL,
            )
        )
