"""Whole audits of tiny trained models: identity controls, secrecy of the files, refusals."""

import json
import re
import shutil

import pytest

from provenance.canonical import jcs
from trainer.checkpoint import load_model, newest
from trainer.model import Transformer, init_parameters
from unlearning.audit import audit, read_inputs, run
from unlearning.endpoints import Status
from unlearning.errors import PeopleError, PlanError
from unlearning.rows import labels_of, read_rows
from unlearning.verdict import contradictions, verdict_from_rows


def start(study, directory, **extra):
    """Run an audit of the study in a folder; returns the verdict."""
    spec = study.run_spec(
        "audit",
        kind="attack",
        entry="unlearning.audit:run",
        extra=study.audit_extra(**extra),
        steps=0,
    )
    return audit(spec, directory)


def models_of(study, unlearned, *gold):
    """The `models` setting with these folders."""
    chosen = {
        "original": str(study.models["original"]),
        "unlearned": str(study.models.get(unlearned, unlearned)),
    }
    return chosen | ({"gold": [str(study.models[g]) for g in gold]} if gold else {})


@pytest.fixture(scope="module")
def audited(study, tmp_path_factory):
    """The folder of an audit of gold as the unlearned model, against two gold models."""
    directory = tmp_path_factory.mktemp("audited")
    assert start(study, directory).status is Status.INCONCLUSIVE
    return directory


def test_auditing_gold_as_unlearned_is_open_where_the_original_hardly_leaks(audited):
    """A retrained model: all controls hold, every endpoint but tier 2 passes; the third gold seed and the models' lineage are missing, and nothing else.

    These people's lines were never trained side by side, so that after others' lines the original gives nobody away either. Where tier 2
    has power, gold passes: A6 in `test_pilot`.
    """
    audit_json = json.loads((audited / "audit.json").read_bytes())
    assert audit_json["verdict"] == "INCONCLUSIVE"
    assert all(c["holds"] for c in audit_json["controls"])
    rates = {e["name"]: e for e in audit_json["endpoints"]}
    status = {name: e["status"] for name, e in rates.items()}
    assert status.pop("in_context") == "INCONCLUSIVE"
    assert set(status.values()) == {"PASS"}
    assert {t: rates[t]["has_power"] for t in ("direct", "in_context", "fine_tune")} == {
        "direct": True, "in_context": False, "fine_tune": True,
    }  # fmt: skip
    tier, golds, *lineage = audit_json["reasons"]
    assert lineage == [f"lineage not checked: {one}" for one in audit_json["unchecked"]]
    assert (
        len(lineage) == 3
    )  # no ledger was named, and neither the original nor gold has a run file here
    assert "so this tier proves nothing" in tier
    assert golds.startswith("2 gold models seen, 3 distinct ones needed")
    assert rates["direct"]["original"] == "1.000000"
    assert rates["fine_tune"]["original"] == "1.000000"
    assert {rates[t]["unlearned"] for t in ("direct", "in_context", "fine_tune")} == {"0.000000"}


def test_auditing_gold_against_one_seed_is_not_a_pass_and_not_a_fail(study, tmp_path):
    """With one gold seed even the gold model itself is INCONCLUSIVE."""
    verdict = start(study, tmp_path, models=models_of(study, "gold", "gold"))
    assert verdict.status is Status.INCONCLUSIVE


def test_the_same_gold_twice_is_one_seed(study, tmp_path):
    """Naming the same weights twice does not make two seeds."""
    verdict = start(study, tmp_path, models=models_of(study, "gold", "gold", "gold"))
    assert verdict.status is Status.INCONCLUSIVE


def test_auditing_the_original_as_unlearned_fails(study, tmp_path):
    """Identity control A6: the original itself is FAIL in tiers 1 and 3."""
    verdict = start(study, tmp_path, models=models_of(study, "original", "gold"))
    assert verdict.status is Status.FAIL
    assert {r.split(":")[0] for r in verdict.reasons} >= {"direct", "fine_tune"}


def test_no_gold_is_invalid(study, tmp_path):
    """A16: without gold the audit runs, shows what it found and is INVALID."""
    verdict = start(study, tmp_path, models=models_of(study, "gold"))
    assert verdict.status is Status.INVALID
    assert json.loads((tmp_path / "result.json").read_bytes())["verdict"] == "INVALID"


def test_too_hot_an_attack_is_invalid(study, tmp_path):
    """A15: a fine-tuning attack that wipes the original's memory proves nothing."""
    verdict = start(study, tmp_path, attacks={"fine_tune_lr": "0.05"})
    assert verdict.status is Status.INVALID
    assert "too hot" in verdict.reasons[0]


def test_a_model_that_memorised_nothing_is_invalid(study, tmp_path):
    """If the original learned no secret, nothing can be forgotten."""
    untrained = study.folder / "untrained"
    if not untrained.exists():
        study.train("untrained", steps=1)
    models = models_of(study, "gold", "gold") | {"original": str(newest(untrained))}
    verdict = start(study, tmp_path, models=models)
    assert verdict.status is Status.INVALID
    assert verdict.reasons[0].startswith("memorised nothing: an audit says nothing")
    assert "original leaks" in verdict.reasons[1]


def test_what_the_original_memorised_is_told_first(study, tmp_path):
    """Forgotten people were shown as often as the order says, come out and rank first; strangers were never shown and do neither."""
    from trainer.spec import save_run

    shutil.copytree(study.models["original"], tmp_path / "original" / "step-800")
    save_run(study.run_spec("original"), tmp_path / "original")
    models = models_of(study, "gold", "gold2") | {"original": str(tmp_path / "original")}
    (tmp_path / "audit").mkdir()
    start(study, tmp_path / "audit", models=models)
    body = json.loads((tmp_path / "audit" / "audit.json").read_bytes())
    found = body["description"]["memorisation"]
    assert found["memory"] == "enough"
    assert len(found["people"]) == 16
    never, *shown = found["groups"]
    assert (never["first"], never["people"], never["given_away"]) == (0, 16, 0)
    assert sum(group["people"] for group in shown) == 64 + 16
    # 800 steps of 256 tokens over 320 records; the number stands in three of a person's four.
    times = [person["times"] for person in found["people"]]
    assert max(times) - min(times) <= 3
    assert min(times) % 3 == 0 or max(times) % 3 == 0
    assert float(found["p_rank"]) == pytest.approx(2.0**-16, abs=1e-6)
    assert float(shown[-1]["exposure"]) > 4.9
    assert float(never["exposure"]) < 3


def test_a_ruined_model_fails_on_utility(study, tmp_path):
    """A14: a nearly untrained model leaks nothing and is FAIL, not PASS."""
    ruined = study.folder / "untrained"
    if not ruined.exists():
        study.train("untrained", steps=1)
    verdict = start(study, tmp_path, models=models_of(study, str(newest(ruined)), "gold"))
    assert verdict.status is Status.FAIL
    assert any(r.startswith("utility") for r in verdict.reasons)


def test_rows_repeat_the_verdict(audited):
    """The published rows and plan give the published verdict, to the last digit."""
    audit_json = json.loads((audited / "audit.json").read_bytes())
    rows = read_rows(audited / "rows.parquet")
    assert contradictions(audit_json, rows) == []
    plan = json.loads((audited / "plan.json").read_bytes())
    assert verdict_from_rows(rows, plan).to_json()["endpoints"] == audit_json["endpoints"]
    assert audit_json["plan"] == plan
    assert audit_json["rows"]["count"] == rows.num_rows


def test_an_audit_repeats_itself_bit_for_bit(study, audited, tmp_path):
    """The same run gives the same rows, plan and verdict."""
    start(study, tmp_path)
    for name in ("plan.json", "audit.json", "result.json", "rows.parquet"):
        assert (tmp_path / name).read_bytes() == (audited / name).read_bytes(), name


def test_no_file_holds_a_name_a_number_or_a_text(study, audited, capfd):
    """Every byte of every file of an audit is searched for what was sealed; the planted control is found."""
    records = study.people["forgotten"]
    names = {" ".join(r["text"].split()[:2]) for r in records if "works as" in r["text"]}
    numbers = {m.group() for r in records if (m := re.search(r"\d{6}", r["text"]))}
    wanted = [r["text"] for r in records] + sorted(names) + [r["subject"] for r in records]
    assert len(names) == len(numbers) == 16

    def found(blobs):
        return [w for w in wanted for b in blobs if w.encode() in b] + [
            n
            for n in numbers
            for b in blobs
            if re.search(rb"(?<![\d.a-f])" + n.encode() + rb"(?![\da-f])", b)
        ]

    files = [p.read_bytes() for p in audited.iterdir()]
    columns = [
        str(read_rows(audited / "rows.parquet").drop_columns(["value"]).to_pylist()).encode()
    ]
    assert found([" ".join(wanted).encode(), (study.folder / "retained.jsonl").read_bytes()])
    assert found(files + columns) == []
    assert "".join(capfd.readouterr()).count("person-") == 0


def test_subject_ids_do_not_follow_the_people(study, audited):
    """Ids are opaque: their order in the table is not the order of the people in the sealed file."""
    rows = read_rows(audited / "rows.parquet").to_pylist()
    ids = {r["subject_id"] for r in rows}
    assert len(ids) == 64 + 16 + 16
    assert all(re.fullmatch(r"[0-9a-f]{32}", i) for i in ids)


def test_progress_counts_every_measurement(audited):
    """progress.jsonl has one line per model and measurement, in order."""
    lines = [json.loads(line) for line in (audited / "progress.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 23))
    assert {line["of"] for line in lines} == {22}
    assert (lines[0]["model"], lines[0]["attack"]) == ("original", "memorised")
    assert {line["attack"] for line in lines} == {
        "memorised",
        "direct",
        "in_context",
        "fine_tune",
        "membership",
        "utility",
    }


def test_a_plan_cannot_be_changed_after_the_first_look(study, audited, tmp_path):
    """A folder with a plan refuses another one; the same plan may run again."""
    (tmp_path / "plan.json").write_bytes((audited / "plan.json").read_bytes())
    with pytest.raises(PlanError, match="fixed before the first look"):
        start(study, tmp_path, margin="0.14")
    assert not (tmp_path / "rows.parquet").exists()


def test_the_plan_is_written_before_any_model_is_opened(study, tmp_path, monkeypatch):
    """If opening the first model fails, the plan already stands and no row does."""

    def refuse(*_):
        raise PlanError("expected no model to be opened yet")

    monkeypatch.setattr("trainer.checkpoint.load_model", refuse)
    with pytest.raises(PlanError, match="opened yet"):
        start(study, tmp_path)
    assert (tmp_path / "plan.json").exists()
    assert not (tmp_path / "rows.parquet").exists()


def test_subgroups_are_registered_before_any_model_is_asked(study, tmp_path, monkeypatch):
    """Asked for, every forgotten record is labelled and the plan names each label of enough people: here, of sixteen, half is enough."""

    def inputs(**extra):
        extra = study.audit_extra(**extra)
        return read_inputs(study.run_spec("audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0), tmp_path)  # fmt: skip

    plain = inputs()
    assert plain.plan.subgroups == ()
    monkeypatch.setattr("unlearning.subgroups.MIN_PEOPLE", 3)
    derived = inputs(derived_subgroups=True)
    held = {}
    for record in derived.forgotten:
        for label in labels_of(record.group):
            held.setdefault(label, set()).add(record.subject)
    assert {"name/rare", "name/common"} <= set(held)
    assert set(derived.plan.subgroups) == {label for label, people in held.items() if 3 <= len(people) < 16}  # fmt: skip
    assert derived.plan.digest != plain.plan.digest


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"surprise": 1}, PlanError, "unknown"),
        ({"retained": "path"}, PlanError, "retained as"),
        ({"margin": "0.9"}, PlanError, "margin"),
        ({"subgroups": ["minors"]}, PlanError, "minors"),
        ({"models": {"original": "x"}}, PlanError, "original, unlearned and gold"),
        ({"models": {"original": "nowhere", "unlearned": "nowhere"}}, PlanError, "no checkpoint"),
        ({"sealed": {"file": "nowhere", "key_file": "nowhere"}}, PeopleError, "cannot read"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(study, tmp_path, change, error, match):
    """A run with wrong settings raises one clear error and leaves no file."""
    with pytest.raises(error, match=match):
        start(study, tmp_path, **change)
    assert list(tmp_path.iterdir()) == []


def test_forgotten_people_among_the_retained_are_refused(study, tmp_path):
    """Fine-tuning on the forgotten records would be no harmless attack and no sealed audit."""
    lines = "".join(json.dumps(r) + "\n" for r in study.people["forgotten"][:4])
    (tmp_path / "mixed.jsonl").write_text(lines + (study.folder / "retained.jsonl").read_text())
    with pytest.raises(PeopleError, match="different people"):
        start(study, tmp_path / "mixed.jsonl", retained={"file": str(tmp_path / "mixed.jsonl")})


def test_the_entry_runs_from_a_run_file(study, tmp_path):
    """`trainer.__main__` starts the audit from run.json, relative paths included, and refusals give exit code 3."""
    from trainer.__main__ import main
    from trainer.spec import save_run

    extra = study.audit_extra(models=models_of(study, "gold", "gold"))
    for name in ("tokenizer.json", "key", "forgotten.sealed"):
        (tmp_path / name).write_bytes((study.folder / name).read_bytes())
    extra |= {
        "tokenizer": "tokenizer.json",
        "sealed": {"file": "forgotten.sealed", "key_file": "key"},
    }
    spec = study.run_spec(
        "audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0
    )
    save_run(spec, tmp_path)
    assert main(["--run", str(tmp_path / "run.json")]) == 0
    assert json.loads((tmp_path / "result.json").read_bytes())["verdict"] == "INCONCLUSIVE"
    refused = tmp_path / "refused"
    save_run(study.run_spec("refused", entry="unlearning.audit:run", extra={}, steps=0), refused)
    assert main(["--run", str(refused / "run.json")]) == 3


def test_published_json_is_canonical(audited):
    """plan.json, audit.json and result.json are RFC 8785 bytes without floats, ready to be hashed into a ledger."""
    for name in ("plan.json", "audit.json", "result.json"):
        data = (audited / name).read_bytes()
        assert jcs(json.loads(data)) == data


def test_entry_returns_zero_whatever_the_verdict(study, tmp_path):
    """FAIL is a result, not an error."""
    extra = study.audit_extra(models=models_of(study, "original", "gold"))
    assert run(study.run_spec("audit", extra=extra, steps=0), tmp_path) == 0
    assert json.loads((tmp_path / "result.json").read_bytes())["verdict"] == "FAIL"


def test_checkpoints_of_another_shape_are_refused(study, tmp_path):
    """A checkpoint that is not of the run's model shape gives the trainer's error, not a verdict."""
    import dataclasses

    from trainer.errors import CheckpointError

    spec = study.run_spec("audit", extra=study.audit_extra(), steps=0)
    smaller = dataclasses.replace(spec.config.model, num_layers=1)
    with pytest.raises(CheckpointError):
        audit(
            dataclasses.replace(spec, config=dataclasses.replace(spec.config, model=smaller)),
            tmp_path,
        )


def test_gold_really_never_saw_the_forgotten(study):
    """The gold run's windows commit to none of the forgotten records (the study's own control)."""
    model = load_model(study.models["gold"], study.model_spec())
    fresh = Transformer(study.model_spec())
    init_parameters(fresh, 0)
    assert any((a != b).any() for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    windows = (study.folder / "gold-run" / "windows.jsonl").read_text().splitlines()
    assert json.loads(windows[0])["records"] == 64 * 4
