"""Claims about layouts before any process starts: what is impossible is refused whole, with numbers and with a way out."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import MODEL

from trainer.codec import from_json, to_json
from trainer.errors import SpecError
from trainer.layout import Layout, demand, nearest, possible, violations
from trainer.spec import BatchSpec, RunConfig, RunSpec, load_run, no_versions, run_bytes

UNTIED = dataclasses.replace(MODEL, tied=False)  # 4 heads, 2 key heads, 2 layers
BATCH = BatchSpec(rows=8, length=32)
DEGREE = st.sampled_from([1, 2, 3, 4])
LAYOUTS = st.builds(
    Layout,
    dp_replicate=DEGREE,
    dp_shard=DEGREE,
    sp=DEGREE,
    tp=DEGREE,
    pp=DEGREE,
    ep=DEGREE,
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]),
    microbatches=DEGREE,
)


@given(LAYOUTS)
def test_a_layout_is_read_as_it_was_written(layout):
    """Law: JSON there and back gives the same layout, and the world is the product of five degrees, ep not among them."""
    assert from_json(Layout, json.loads(json.dumps(to_json(layout)))) == layout
    assert dataclasses.replace(layout, ep=1).world_size == layout.world_size
    assert (
        layout.world_size
        == layout.dp_replicate * layout.dp_shard * layout.sp * layout.tp * layout.pp
    )


@pytest.mark.parametrize(
    ("degrees", "lines"),
    [
        ({}, []),
        ({"dp_shard": 2, "sp": 2, "tp": 2}, []),
        ({"pp": 2, "microbatches": 2}, []),
        ({"sp": 3}, ["num_heads 4 is not a multiple of tp * sp = 1 * 3"]),
        ({"sp": 4, "tp": 4}, ["num_heads 4 is not a multiple of tp * sp = 4 * 4"]),
        (
            {"tp": 3},
            [
                "num_heads 4 is not a multiple of tp * sp = 3 * 1",
                "num_kv_heads 2 and tp 3: neither divides the other",
                "vocab_size 64 is not a multiple of tp 3",
            ],
        ),
        (
            {"dp_replicate": 3, "dp_shard": 3},
            ["batch.rows 8 is less than one row for each of dp_replicate * dp_shard = 9"],
        ),
        ({"ep": 2}, ["but the model has no experts", "dp_shard * sp = 1 * 1"]),
        ({"microbatches": 2}, ["microbatches 2 without stages (pp 1)"]),
        (
            {"pp": 2},
            ["microbatches 1 is less than the 2 stages of pp 2, 1f1b"],
        ),
        ({"pp": 2, "microbatches": 3}, ["batch.rows 8 is not a multiple of"]),
        (
            {"pp": 2, "microbatches": 4, "schedule": "zbv"},
            ["num_layers 2 is less than the 4 stages of pp 2, zbv"],
        ),
    ],
)
def test_every_violation_is_said_with_its_numbers(degrees, lines):
    """Table: what each impossible layout is refused for; all of it, in one go."""
    found = violations(Layout(**degrees), UNTIED, BATCH)
    assert len(found) == len(lines)
    for want, got in zip(lines, found, strict=True):
        assert want in got


def test_a_tied_head_cannot_be_cut_from_its_embedding():
    """A pipeline of a tied model is refused with what to set."""
    (line,) = violations(Layout(pp=2, microbatches=2), MODEL, BATCH)
    assert "model.tied" in line


def test_another_number_of_processes_is_said_as_the_product():
    """The whole equation stands in the message."""
    (line,) = violations(Layout(dp_shard=2, tp=2), UNTIED, BATCH, world=6)
    assert "dp_shard 2 * sp 1 * tp 2 * pp 1 = 4 processes, there are 6" in line


@settings(max_examples=25, deadline=None)
@given(LAYOUTS)
def test_the_nearest_layouts_are_possible(layout):
    """Law: a layout offered instead is possible, of the same world if one is; a possible layout is its own nearest."""
    offered = nearest(layout, UNTIED, BATCH)
    assert offered
    for other in offered:
        assert violations(other, UNTIED, BATCH) == []
    same_world = list(possible(layout, UNTIED, BATCH))
    assert bool(same_world) == (offered[0].world_size == layout.world_size)
    if not violations(layout, UNTIED, BATCH):
        assert offered[0] == layout


def test_one_error_holds_all_of_it(tmp_path):
    """A run with an impossible layout cannot be made, and one that stands in a file cannot be read: before any launch."""
    run = RunSpec(
        run="r",
        tokens_digest="0" * 64,
        tokens="tokens",
        steps=3,
        config=RunConfig(model=UNTIED, batch=BATCH),
        versions=no_versions(),
    )
    bad = Layout(tp=3, pp=2)
    with pytest.raises(SpecError) as refused:
        dataclasses.replace(run, layout=bad)
    said = str(refused.value)
    assert all(line in said for line in violations(bad, UNTIED, BATCH))
    assert said.count("; ") == 3
    assert "Nearest possible: " in said
    assert str(nearest(bad, UNTIED, BATCH)[0]) in said
    written = run_bytes(run).replace(b'"tp":1', b'"tp":3')
    (tmp_path / "run.json").write_bytes(written)
    with pytest.raises(SpecError, match=r"multiple of tp \* sp = 3 \* 1"):
        load_run(tmp_path)


def test_a_possible_layout_passes():
    """`demand` raises nothing for a layout without violations."""
    demand(Layout(dp_shard=2, tp=2), UNTIED, BATCH, world=4)
