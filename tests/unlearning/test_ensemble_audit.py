"""An audit of ensembles: the lens of each constituent is measured, what has no meaning for a mean is said, and nothing else is written."""

import json

import numpy as np
import pytest

from trainer.checkpoint import load_model, verify
from unlearning.audit import audit
from unlearning.engineering import FILE
from unlearning.ensemble import UNDEFINED, Constituent, write_ensemble
from unlearning.findings import Findings
from unlearning.people import read_sealed
from unlearning.probes import FileTokenizer, trained_probes
from unlearning.rows import opaque_id, read_rows
from unlearning.scoring import score_probes

QUESTIONS = 24


@pytest.fixture(scope="module")
def audited(study, tmp_path_factory):
    """Means of two trained models: one that knows the people and one that doesn't; two gold ones, in both orders."""
    folder = tmp_path_factory.mktemp("ensembles")
    made = {}
    for name, parts in (
        ("original", ("original", "gold")),
        ("gold", ("gold", "gold2")),
        ("gold2", ("gold2", "gold")),
    ):
        listed = [Constituent(place, str(study.models[part]), verify(study.models[part]).root) for place, part in enumerate(parts)]  # fmt: skip
        write_ensemble(folder / name, listed)
        made[name] = str(folder / name)
    models = {"original": made["original"], "unlearned": made["original"], "gold": [made["gold"], made["gold2"]]}  # fmt: skip
    extra = study.audit_extra(
        models=models, attacks={"fine_tune_steps": [1]}, resamples=100, engineering={"questions": QUESTIONS, "targets": 1, "others": 4}
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("audit")
    run = study.run_spec("audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0)
    audit(run, directory)
    return directory


def test_the_last_layer_says_what_the_constituent_says(study, audited):
    """Oracle: each constituent alone, asked the same questions, has the last layer's mean log-probability; who knows and who doesn't is seen apart."""
    report = json.loads((audited / "audit.json").read_text())
    found = {(one.role, one.digest): one for one in Findings(read_rows(audited / FILE), report["plan"]["gold"][0]).lens()}  # fmt: skip
    assert [role for role, _ in found] == ["original", "unlearned", "gold", "gold"]
    records, key = read_sealed(study.audit_extra()["sealed"])
    asked = {(row["subject_id"], row["probe"]) for row in read_rows(audited / FILE).to_pylist()}
    everything = trained_probes(records, FileTokenizer(study.folder / "tokenizer.json"))
    probes = [one for one in everything if (opaque_id(key, one.subject_id), one.phrasing) in asked]
    assert len(probes) == QUESTIONS

    def alone(name):
        model = load_model(study.models[name], study.model_spec()).eval()
        return -score_probes(model, probes).loss_N.mean()

    own = {name: alone(name) for name in ("original", "gold", "gold2")}
    original, unlearned, first, second = found.values()
    for one, parts in (
        (original, ("original", "gold")),
        (first, ("gold", "gold2")),
        (second, ("gold2", "gold")),
    ):
        assert one.mean_CL.shape == (2, 2)
        assert one.questions == QUESTIONS
        np.testing.assert_allclose(one.mean_CL[:, -1], [own[part] for part in parts], atol=1e-4)
    np.testing.assert_array_equal(original.mean_CL, unlearned.mean_CL)
    assert original.mean_CL[0, -1] > original.mean_CL[1, -1] + 0.5


def test_nothing_that_has_no_meaning_is_measured_and_the_audit_says_so(audited):
    """The file holds lens rows only; audit.json names every measure that a mean has not, with its reason."""
    attacks = {row["attack"].split("/")[0] for row in read_rows(audited / FILE).to_pylist()}
    assert attacks == {"lens"}
    report = json.loads((audited / "audit.json").read_text())
    assert report["undefined"] == [{"what": what, "reason": why} for what, why in UNDEFINED.items()]
    assert report["engineering"]["file"] == FILE
    assert not list(audited.glob("rows.part-*"))


def test_an_audit_of_one_model_has_nothing_undefined(study, tmp_path):
    """Negative control: no word of it where the models are ordinary, and no lens of constituents."""
    extra = study.audit_extra(attacks={"fine_tune_steps": [1]}, resamples=100)
    audit(study.run_spec("audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0), tmp_path)  # fmt: skip
    assert "undefined" not in json.loads((tmp_path / "audit.json").read_text())
