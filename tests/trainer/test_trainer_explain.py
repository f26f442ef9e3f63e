"""Claims about `explain`: one fault per phase is put in, and the walk back ends at that phase and its input."""

import dataclasses

import numpy as np
import pytest
import torch
from trainer_accidents import run_program
from trainer_corpus import END, VOCAB, documents, make_run, record_id

from trainer import loop
from trainer.errors import SpecError
from trainer.explain import explain
from trainer.loop import fit
from trainer.optim import AdamW
from trainer.spec import BatchSpec, Layout, save_run
from trainer.tokens import write_tokens

STEPS = 48
POISON = 61
DDP = Layout(dp_replicate=2)


def _run(home, name, *, layout=None, steps=STEPS, every=8, poison=False):
    """A run over records that can be learned, one of them noise if wanted."""
    tokens = home / "tokens"
    if not tokens.exists():
        docs = documents(120)
        if poison:
            noise = np.random.default_rng(5).integers(0, END, 150)
            docs[POISON] = [*noise.tolist(), END]
        write_tokens(
            tokens, corpus_version="none", tokenizer_digest="00" * 32, vocab_size=VOCAB, end_of_text=END,
            records=[(i, record_id(i), "abc"[i % 3], doc) for i, doc in enumerate(docs)],
        )  # fmt: skip
    run = make_run(home, name, steps=steps, every=every, layout=layout, batch=BatchSpec(rows=8, length=32))  # fmt: skip
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, timeout_s=20))
    save_run(run, home / name)
    return run, home / name


def _losses(findings):
    return [found for found in findings if found.symptom == "loss spike"]


def _times(findings):
    return [found for found in findings if found.symptom == "slow step"]


def test_a_healthy_run_has_no_bad_loss(tmp_path):
    """Negative control: falling, noisy losses are no spike; a step can be asked for all the same."""
    run, folder = _run(tmp_path, "r")
    assert fit(run, folder) == 0
    assert _losses(explain(folder)) == []
    asked = explain(folder, step=30)
    assert [found.symptom for found in asked] == ["loss spike", "slow step"]
    assert all(found.step == 30 for found in asked)
    plan = loop.batch_plan(run, folder)
    assert set(asked[0].records) == {name.hex() for _, name in plan.records(29)}
    with pytest.raises(SpecError, match="no step 99"):
        explain(folder, step=99)
    # Records that the window does not commit to are not named.
    windows = (folder / "windows.jsonl").read_text()
    (folder / "windows.jsonl").write_text(windows.replace('"records_root":"', '"records_root":"0'))
    assert explain(folder, step=30)[0].records == ()


def test_local_a_poisoned_record_is_named(tmp_path):
    """A record of noise: the losses of the steps that read it are spikes, and its id is the first suspect."""
    run, folder = _run(tmp_path, "r", poison=True)
    assert fit(run, folder) == 0
    found = _losses(explain(folder))
    assert found
    plan = loop.batch_plan(run, folder)
    for finding in found:
        assert finding.phase == "local"
        assert finding.records[0] == record_id(POISON).hex()
        assert record_id(POISON) in {name for _, name in plan.records(finding.step - 1)}


def test_update_a_wrong_learning_rate_is_named(tmp_path):
    """One step with 300 times the planned rate: the spike after it is traced to it, not to its own batch."""
    run, folder = _run(tmp_path, "r")
    assert run_program(1, folder, "lr@30")[0] == [0]
    found = _losses(explain(folder))
    assert found[0].phase == "update"
    assert found[0].step in (31, 32)
    assert "step 30 was done with learning rate" in found[0].cause
    assert run.config.optim.lr > 0


def test_update_damaged_weights_are_told_from_a_bad_batch(tmp_path, monkeypatch):
    """Noise on the weights in step 30, at the planned rate: the loss stays up, so it was the state."""
    run, folder = _run(tmp_path, "r")
    real, steps = AdamW.step, []

    def step(optimizer):
        real(optimizer)
        steps.append(1)
        if len(steps) == 30:
            noise = torch.Generator().manual_seed(0)
            for parameter in optimizer.parameters.values():
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)

    monkeypatch.setattr(AdamW, "step", step)
    assert fit(run, folder) == 0
    found = _losses(explain(folder))
    assert (found[0].phase, found[0].step) == ("update", 31)
    assert "update of step 30" in found[0].cause


@pytest.mark.parametrize(
    ("fault", "phase", "rank"),
    [("slow@20/1", "local", 1), ("slow-net@20/0", "communicate", None)],
)
def test_a_slow_process_is_told_from_a_slow_network(tmp_path, fault, phase, rank):
    """A second more in one step: in one process's forward pass, or between the processes."""
    _, folder = _run(tmp_path, "r", layout=DDP, steps=30, every=30)
    assert run_program(2, folder, fault)[0] == [0, 0]
    found = [finding for finding in _times(explain(folder)) if finding.step == 20]
    assert [(finding.phase, finding.rank) for finding in found] == [(phase, rank)]
    assert any(line.startswith("communicate: ") for line in found[0].evidence)


def test_checkpoint_a_slow_disk_is_named(tmp_path):
    """One save that takes 2 s longer than the others."""
    _, folder = _run(tmp_path, "r", steps=30, every=4)
    assert run_program(1, folder, "slow-disk@4")[0] == [0]
    found = [finding for finding in _times(explain(folder)) if finding.phase == "checkpoint"]
    assert 16 in [finding.step for finding in found]
    assert all("saving" in finding.cause for finding in found)


@pytest.mark.parametrize(
    ("fault", "phase", "rank"),
    [("cut@1/1", "partition", 1), ("flip@6/1", "communicate", 1), ("disk@2/0", "checkpoint", None)],
)
def test_what_stopped_a_run_is_traced_to_its_phase(tmp_path, fault, phase, rank):
    """A wrong cut, a flipped weight, a full disk: the failed check, with the process."""
    _, folder = _run(tmp_path, "r", layout=DDP, steps=10, every=4)
    assert 0 not in run_program(2, folder, fault)[0]
    found = [finding for finding in explain(folder) if finding.symptom == "stopped"]
    assert [(finding.phase, finding.rank) for finding in found] == [(phase, rank)]


def test_a_refused_start_is_traced_to_the_partition(tmp_path):
    """A run that never began has an exit.json and nothing else."""
    run, folder = _run(tmp_path, "r", steps=3)
    (tmp_path / "tokens" / "tokens.json").write_bytes(b"{}")
    assert run_program(1, folder)[0] == [3]
    found = explain(folder)
    assert [(finding.symptom, finding.phase) for finding in found] == [("stopped", "partition")]
    assert "DataError" in found[0].cause
    assert run.run == "r"


def test_a_record_with_a_gap_is_said(tmp_path):
    """A phases.json that lacks an answer is a finding of its own."""
    import json

    run, folder = _run(tmp_path, "r", steps=3)
    assert fit(run, folder) == 0
    record = json.loads((folder / "phases.json").read_bytes())
    del record["phases"][1]["uncertainty"]
    (folder / "phases.json").write_text(json.dumps(record))
    assert [(found.symptom, found.cause) for found in explain(folder)] == [
        ("record", "phases.json: local.uncertainty: missing")
    ]
