"""A killed audit: what was finished is not measured again, and the published bytes are those of an audit nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from trainer.spec import save_run
from unlearning.audit import audit
from unlearning.errors import RowsError
from unlearning.rows import read_rows

FILES = ("plan.json", "rows.parquet", "audit.json", "result.json")


def spec_of(study):
    """An audit of gold with a few secondary attacks."""
    repertoire = {"asked": ["prefix"], "bits": [8], "candidates": 20}
    extra = study.audit_extra(
        attacks={"fine_tune_steps": [10, 11, 12], "repertoire": repertoire}, resamples=200
    )
    return study.run_spec(
        "audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0
    )


def progress(directory):
    """Lines of progress.jsonl that are whole."""
    path = directory / "progress.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.fixture(scope="module")
def undisturbed(study, tmp_path_factory):
    """The folder of an audit that nobody killed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    audit(spec_of(study), directory)
    assert not list(directory.glob("rows.part-*"))
    return directory


def test_kill_nine_in_the_middle_costs_nothing_that_was_finished(study, undisturbed, tmp_path):
    """SIGKILL after some measurements; a second start repeats none of them and publishes the same bytes."""
    spec = spec_of(study)
    save_run(spec, tmp_path)
    command = [sys.executable, "-m", "trainer", "--run", str(tmp_path / "run.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    limit = time.monotonic() + 120
    while len(progress(tmp_path)) < 4 and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = progress(tmp_path)
    parts = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("rows.part-*.parquet")}
    assert 4 <= len(before) <= len(parts)
    assert not (tmp_path / "rows.parquet").exists()
    audit(spec, tmp_path)
    after = progress(tmp_path)
    numbers = [line["step"] for line in after]
    assert after[: len(before)] == before
    assert sorted(set(numbers)) == numbers
    # A part whose line the kill prevented is not measured again either.
    assert len(numbers) >= len(progress(undisturbed)) - 1
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert not list(tmp_path.glob("rows.part-*"))


def interrupted(study, directory, monkeypatch, after=3):
    """An audit that stops with an error after some parts."""
    from unlearning import measuring

    written = []

    def stop(path, table):
        if len(written) == after:
            raise OSError("expected: the disk is full")
        written.append(path)
        original(path, table)

    original = measuring.write_rows
    monkeypatch.setattr(measuring, "write_rows", stop)
    with pytest.raises(OSError, match="disk is full"):
        audit(spec_of(study), directory)
    monkeypatch.undo()
    return written


def test_parts_of_other_records_are_not_taken(study, undisturbed, tmp_path, monkeypatch):
    """If a record changed between kill and resume, every part is measured again."""
    written = interrupted(study, tmp_path, monkeypatch)
    for part in written:  # what a part of other records would look like: another tag
        part.rename(part.with_name(part.name.replace("rows.part-", "rows.part-0")))
    audit(spec_of(study), tmp_path)
    assert [line["step"] for line in progress(tmp_path)] == [
        1, 2, 3, *(line["step"] for line in progress(undisturbed)),
    ]  # fmt: skip
    assert (tmp_path / "audit.json").read_bytes() == (undisturbed / "audit.json").read_bytes()


def test_a_damaged_part_is_refused(study, tmp_path, monkeypatch):
    """A part with other columns is an error, never silently empty."""
    import pyarrow.parquet as pq

    first, *_ = interrupted(study, tmp_path, monkeypatch)
    pq.write_table(read_rows(first).drop_columns(["value"]), first)
    with pytest.raises(RowsError, match="columns"):
        audit(spec_of(study), tmp_path)
