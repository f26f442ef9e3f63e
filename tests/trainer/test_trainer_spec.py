"""Claims about run.json: it is one canonical form, complete, strict and immutable."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_corpus import make_run

from trainer.codec import from_json, to_json
from trainer.errors import SpecError
from trainer.spec import (
    VERSION_ITEMS,
    BatchSpec,
    Excluded,
    GuardSpec,
    Layout,
    MixtureSpec,
    ModelSpec,
    OptimSpec,
    RunConfig,
    RunSpec,
    Selection,
    load_run,
    no_versions,
    run_bytes,
    run_digest,
    save_run,
)

RUN = RunSpec(run="r", tokens_digest="0" * 64, tokens="tokens", steps=3, versions=no_versions())


def _json():
    return json.loads(run_bytes(RUN))


def test_golden_digest():
    """The identity of a default run is pinned: a change of it changes what every run.json means."""
    assert run_digest(RUN) == "9bdbb2a5139125017a4236cc4aad5ef2c09e6ed00180c20fe624543a39c96f61"


def test_a_run_is_read_as_it_was_written(tmp_path):
    """load_run(save_run(r)) == r, with every optional field in use."""
    run = make_run(
        tmp_path,
        kind="gold",
        excluded=Excluded(file="forgotten.txt", digest="1" * 64),
        selection=Selection(file="weights.jsonl", digest="3" * 64),
        corpus_root="4" * 64,
        init="../other/step-5",
        init_root="2" * 64,
        extra={"temperature": "0.5", "list": [1, True, "x"], "deep": {"a": []}},
        layout=Layout(dp_replicate=2),
    )
    digest = save_run(run, tmp_path / "r")
    assert load_run(tmp_path / "r") == load_run(tmp_path / "r" / "run.json") == run
    assert digest == run_digest(run)


@given(
    lr=st.floats(1e-12, 1e3),
    eps=st.floats(1e-300, 1.0),
    b=st.floats(0, 0.9999999999999999),
    seed=st.integers(0, 2**53 - 1),
)
def test_floats_survive_as_decimal_strings(lr, eps, b, seed):
    """Every float comes back with the same 64 bits, and no float stands in the JSON."""
    run = dataclasses.replace(
        RUN, seed=seed, config=RunConfig(optim=OptimSpec(lr=lr, eps=eps, betas=(b, 0.5)))
    )
    text = run_bytes(run)
    assert from_json(RunSpec, json.loads(text, parse_float=pytest.fail)) == run


def test_a_run_is_immutable(tmp_path):
    """Writing the same run again changes nothing; writing another one over it is refused."""
    save_run(RUN, tmp_path)
    save_run(RUN, tmp_path)
    with pytest.raises(SpecError, match="immutable"):
        save_run(dataclasses.replace(RUN, seed=1), tmp_path)
    assert load_run(tmp_path) == RUN


@pytest.mark.parametrize("item", VERSION_ITEMS)
def test_each_version_item_is_demanded(item):
    """Leaving out any of the eleven items is refused by name; "none" is an answer, "" is not."""
    versions = no_versions()
    del versions[item]
    with pytest.raises(SpecError, match=item):
        dataclasses.replace(RUN, versions=versions)
    with pytest.raises(SpecError, match=item):
        dataclasses.replace(RUN, versions=no_versions(**{item: ""}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("surprise", 1, "unknown field 'surprise'"),
        ("config.optim.learning_rate", "1", "unknown field 'learning_rate'"),
        ("config.optim.lr", 0.001, "decimal string"),
        ("config.optim.lr", "fast", "decimal string"),
        ("config.optim.lr", "inf", "finite"),
        ("config.optim.betas", ["0.9"], "list of 2"),
        ("config.optim.name", "sgd", "expected one of"),
        ("config.optim.schedule", "linear", "expected one of"),
        ("config.optim.decay_share", "1.5", "decay_share"),
        ("config.optim.momentum", "1.0", "momentum"),
        ("config.batch.accumulation", 0, "accumulation"),
        ("config.batch.accumulation", 17, "less than one row for each"),
        ("config.precision", "float16", "expected one of"),
        ("config.guard", {"window": 3}, "guard.window"),
        ("config.guard", {"action": "pray"}, "expected one of"),
        ("config.guard", {"threshold": "0.0"}, "guard.threshold"),
        ("config.guard", {"limit": 0}, "guard.limit"),
        ("selection", {"file": "w", "digest": "x"}, "selection.digest"),
        ("corpus_root", "abc", "64 lower-case hex"),
        ("config.model.num_layers", True, "expected int"),
        ("config.model.num_layers", "4", "expected int"),
        ("config.model.num_kv_heads", 3, "divisor of num_heads"),
        ("config.model.dim", 100, "multiple of 2"),
        ("config.mixture.repeats", {"a": -1}, "repeats.a"),
        ("layout.schedule", "magic", "expected one of"),
        ("layout", {"dp_shard": 0, "tp": -1}, "dp_shard.: 0, .tp.: -1"),
        ("layout", {"strategy": "ddp"}, "unknown field 'strategy'"),
        ("kind", "holiday", "expected one of"),
        ("format", 2, "expected 1"),
        ("seed", 2**53, "seed"),
        ("seed", -1, "seed"),
        ("steps", -1, "steps"),
        ("tokens_digest", "abc", "64 lower-case hex"),
        ("init", "somewhere", "give both"),
        ("entry", "os.system", "module:function"),
        ("run", "../escape", "expected a name"),
        ("versions.vibes", "none", "unknown item"),
        ("versions", "none", "expected an object"),
    ],
)
def test_a_wrong_field_is_refused_by_name(path, value, message):
    """Unknown, mistyped and out-of-range fields raise SpecError that says what was expected."""
    parsed = _json()
    *parents, last = path.split(".")
    at = parsed
    for key in parents:
        at = at[key]
    at[last] = value
    with pytest.raises(SpecError, match=message):
        from_json(RunSpec, parsed)


@pytest.mark.parametrize("name", ["run", "steps", "tokens", "tokens_digest", "versions"])
def test_a_missing_field_is_refused_by_name(name):
    """A field without default cannot be left out."""
    parsed = _json()
    del parsed[name]
    with pytest.raises(SpecError, match=name):
        from_json(RunSpec, parsed)


def test_floats_and_nulls_in_extra_are_refused():
    """`extra` is hashed with the rest: what has no canonical form is refused when the configuration is made."""
    for bad in (0.5, None, object(), [1, {"y": 0.5}]):
        with pytest.raises(SpecError, match=r"config\.extra"):
            RunConfig(extra={"x": bad})


def test_a_float_in_extra_is_refused_when_read():
    """`extra` given as JSON with a float never becomes a run."""
    parsed = _json()
    parsed["config"]["extra"] = {"x": [0.5]}
    with pytest.raises(SpecError, match=r"extra|float"):
        from_json(RunSpec, parsed)


def test_fewer_rows_than_processes_are_refused():
    """A process without rows would wait in vain."""
    with pytest.raises(SpecError, match="less than one row for each"):
        dataclasses.replace(
            RUN,
            config=RunConfig(batch=BatchSpec(rows=1)),
            layout=Layout(dp_replicate=2),
        )


def test_duplicate_keys_and_foreign_json_are_refused(tmp_path):
    """run.json with a key twice, that is no JSON, or that is not there: a SpecError, never a traceback."""
    path = tmp_path / "run.json"
    for data in (run_bytes(RUN)[:-1] + b',"seed":1}', b"\xff", b"[]", b"{"):
        path.write_bytes(data)
        with pytest.raises(SpecError):
            load_run(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_run(tmp_path / "nowhere")


def test_every_field_of_a_specification_is_documented():
    """Each dataclass field is followed by a line of documentation."""
    import inspect

    for kind in (
        ModelSpec,
        OptimSpec,
        BatchSpec,
        MixtureSpec,
        Layout,
        RunConfig,
        Excluded,
        GuardSpec,
        Selection,
        RunSpec,
    ):
        source = inspect.getsource(kind)
        for name in to_json_names(kind):
            after = source.split(f"    {name}:", 1)[1].split("\n", 2)[1]
            assert after.strip().startswith('"""'), f"{kind.__name__}.{name}"


def to_json_names(kind):
    """Names of the fields of a dataclass."""
    return [f.name for f in dataclasses.fields(kind)]


def test_to_json_leaves_out_none():
    """Canonical JSON has no null: an absent exclusion is an absent field."""
    assert "excluded" not in to_json(RUN)
