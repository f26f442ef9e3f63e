"""Claims about the spike guard: what a spike is, what happens to it, and that every process and every resume agree."""

import json
import math
import shutil
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import make_run
from trainer_processes import run_processes
from trainer_spikes import fit_spiky

from trainer.checkpoint import newest, read_tensors, verify
from trainer.errors import EXIT_DONE, EXIT_NUMERICAL, NumericalError
from trainer.guard import EVENTS_FILE, SpikeGuard, spike_limit
from trainer.loop import fit
from trainer.mesh import Mesh
from trainer.metrics import read_lines
from trainer.spec import GuardSpec, Layout, save_run

STEPS, EVERY = 16, 5


def _guard(action="skip", **changes):
    return GuardSpec(**({"window": 4, "threshold": 8.0, "action": action} | changes))


def _start(home, name, guard, **fields):
    run = make_run(home, name, **({"steps": STEPS, "every": EVERY, "guard": guard} | fields))
    save_run(run, home / name)
    return run, home / name


def _model_root(checkpoint):
    return {
        n: t.numpy().tobytes() for n, t in read_tensors(checkpoint) if not n.startswith("guard.")
    }


def test_the_limit_is_median_plus_robust_deviations():
    """Closed form: of 1, 2, 3, 4, 100 the median is 3 and the MAD 1; one wild loss moves neither."""
    assert spike_limit([1, 2, 3, 4, 100], 5.0) == pytest.approx(3 + 5 * 1.4826)
    assert spike_limit([2.0] * 9, 10.0) == pytest.approx(2 + 10 * 0.002)  # no spread: a thousandth


@settings(deadline=None)
@given(
    losses=st.lists(st.floats(0.1, 10), min_size=4, max_size=30),
    wild=st.floats(10, 1e30),
    threshold=st.floats(1, 20),
)
def test_the_limit_is_robust(losses, wild, threshold):
    """Law: a single outlier cannot raise the limit above what the largest other losses span, however wild it is."""
    spread = max(losses) - min(losses)
    limit = spike_limit([*losses, wild], threshold)
    bound = max(losses) + threshold * max(1.4826 * spread, 1e-3 * max(losses))
    assert limit <= bound * (1 + 1e-12)
    assert limit >= statistics.median(losses) * (1 - 1e-12) or limit >= min(losses)


def test_a_normal_loss_is_rarely_a_spike():
    """Calibration: of 20,000 normal losses compared with windows of 50, threshold 3 refuses 0.135 % +- what 4 SE allow."""
    rng = torch.Generator().manual_seed(0)
    window = torch.randn(400, 50, generator=rng, dtype=torch.float64)
    limits = torch.tensor([spike_limit((row + 100).tolist(), 3.0) for row in window]) - 100
    share = torch.special.ndtr(-limits).mean().item()
    # The limit itself varies with its window, so the share lies above the 0.00135 of a known median and deviation.
    assert 0.00135 < share < 0.01


def test_it_sleeps_until_its_window_is_full_and_refuses_what_is_not_finite():
    """The first W losses pass whatever they are, then a jump is refused; NaN and infinity always are."""
    guard = SpikeGuard(_guard(), Mesh())
    assert [guard.accept(x, 1.0) for x in (9.0, 1.0, 5.0, 2.0)] == [True] * 4
    assert not guard.accept(500.0, 1.0)
    assert guard.accept(3.0, 1.0)
    fresh = SpikeGuard(_guard(), Mesh())
    assert not fresh.accept(math.nan, 1.0)
    assert not fresh.accept(1.0, math.inf)
    assert (fresh.num_accepted, fresh.num_spikes) == (0, 2)
    assert fresh.accept(1e9, 1.0)


def test_more_spikes_than_the_limit_end_the_run():
    """NumericalError names the number; refused losses never enter the window."""
    guard = SpikeGuard(_guard(limit=2), Mesh())
    for _ in range(4):
        guard.accept(1.0, 1.0)
    before = guard.losses_W.clone()
    assert not guard.accept(7.0, 1.0)
    assert not guard.accept(7.0, 1.0)
    assert torch.equal(guard.losses_W, before)
    with pytest.raises(NumericalError, match="spike number 3, the guard allows 2"):
        guard.accept(7.0, 1.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One corpus for all runs."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def skipped(home):
    """A run that skips the bad batch of step 9: its folder."""
    run, directory = _start(home, "skip-50", _guard())
    code, asked = fit_spiky(run, directory, [8])
    assert (code, asked) == (EXIT_DONE, list(range(STEPS)))
    return directory


@pytest.fixture(scope="module")
def rolled_back(home):
    """A run that goes back from step 9 to step 5: its folder."""
    run, directory = _start(home, "back", _guard("rollback"))
    assert fit_spiky(run, directory, [8])[0] == EXIT_DONE
    return directory


def test_without_a_spike_the_guard_changes_no_bit(home):
    """Weights and moments of a guarded run are those of an unguarded one; there is no events.jsonl."""
    roots = []
    for name, guard in (("guarded", _guard()), ("plain", None)):
        run, directory = _start(home, name, guard)
        assert fit(run, directory) == EXIT_DONE
        roots.append(_model_root(newest(directory)))
        assert not (directory / EVENTS_FILE).exists()
        assert ("spikes" in json.loads((directory / "result.json").read_bytes())) is bool(guard)
    assert roots[0] == roots[1]


def test_a_skipped_step_leaves_no_trace_but_its_event(home, skipped):
    """Skip: the weights do not depend on how bad the batch was, the event says what happened, every step stands once."""
    run, other = _start(home, "skip-nan", _guard())
    assert fit_spiky(run, other, [8], math.nan)[0] == EXIT_DONE
    for directory in (skipped, other):
        (event,) = read_lines(directory / EVENTS_FILE)
        assert (event["step"], event["first_void"]) == (9, 9)
        assert (event["action"], event["restored"]) == ("skip", "none")
        lines = read_lines(directory / "progress.jsonl")
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert repr(lines[8]["loss"]) == event["loss"]
        assert not float(event["loss"]) <= float(event["limit"])
        assert json.loads((directory / "result.json").read_bytes())["spikes"] == 1
    assert _model_root(newest(skipped)) == _model_root(newest(other))


def test_without_the_guard_the_bad_batch_is_seen(home, skipped):
    """Negative control: the same batch trained on gives other weights than leaving it out."""
    run, directory = _start(home, "unguarded", None)
    assert fit_spiky(run, directory, [8])[0] == EXIT_DONE
    assert _model_root(newest(directory)) != _model_root(newest(skipped))


def test_a_rollback_undoes_the_steps_since_the_checkpoint(home, rolled_back):
    """Rollback at step 9 with checkpoint 5: the end is that of a run which refuses steps 6 to 9, to the bit."""
    (event,) = read_lines(rolled_back / EVENTS_FILE)
    assert (event["step"], event["first_void"], event["restored"]) == (9, 6, "step-5")
    run, other = _start(home, "void", _guard(limit=99))
    assert fit_spiky(run, other, [5, 6, 7, 8], math.nan)[0] == EXIT_DONE
    assert _model_root(newest(rolled_back)) == _model_root(newest(other))


def test_before_the_first_checkpoint_a_rollback_is_a_skip(home, skipped):
    """There is nothing to go back to: the event says so, and the update is left out."""
    run, directory = _start(home, "early", _guard("rollback"), every=50)
    assert fit_spiky(run, directory, [8])[0] == EXIT_DONE
    (event,) = read_lines(directory / EVENTS_FILE)
    assert (event["first_void"], event["restored"], event["action"]) == (9, "none", "rollback")
    assert _model_root(newest(directory)) == _model_root(newest(skipped))


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_resumed_run_decides_as_an_uninterrupted_one(home, tmp_path, action):
    """Spikes at steps 9 and 13: resuming from each checkpoint gives the same root, events, windows and result."""
    run, directory = _start(home, f"resume-{action}", _guard(action), keep=9)
    assert fit_spiky(run, directory, [8, 12])[0] == EXIT_DONE
    assert len(read_lines(directory / EVENTS_FILE)) == 2
    for kept in ((), (5,), (5, 10), (5, 10, 15)):
        again = tmp_path / f"{len(kept)}"
        shutil.copytree(directory, again)
        for step in {5, 10, 15, STEPS} - set(kept):
            shutil.rmtree(again / f"step-{step}")
        assert fit_spiky(run, again, [8, 12])[0] == EXIT_DONE
        assert verify(newest(again)).root == verify(newest(directory)).root
        for name in (EVENTS_FILE, "windows.jsonl", "result.json"):
            assert (again / name).read_bytes() == (directory / name).read_bytes()


def test_a_run_of_spikes_stops_with_its_last_checkpoint(home):
    """Every batch after step 10 is bad: exit 4 after the allowed number, with the reason and the events in place."""
    run, directory = _start(home, "lost", _guard(limit=3))
    assert fit_spiky(run, directory, range(10, 99), math.nan)[0] == EXIT_NUMERICAL
    assert newest(directory).name == "step-10"
    assert len(read_lines(directory / EVENTS_FILE)) == 3
    assert "the guard allows 3" in json.loads((directory / "exit.json").read_bytes())["reason"]


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_two_processes_agree(home, rolled_back, axis):
    """Two processes roll back together at the steps of one process and end near its weights."""
    name = f"two-{axis}"
    run, directory = _start(home, name, _guard("rollback"), layout=Layout(**{axis: 2}))
    answers = run_processes(2, home / f"{name}.group", fit_spiky, run, directory, [8])
    assert answers == [(EXIT_DONE, list(range(STEPS)))] * 2
    (event,), (single,) = (read_lines(d / EVENTS_FILE) for d in (directory, rolled_back))
    same = ("step", "first_void", "restored", "action")
    assert [event[key] for key in same] == [single[key] for key in same]
    ours, theirs = (dict(read_tensors(newest(d))) for d in (directory, rolled_back))
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-4, msg=key)


class _Voters(Mesh):
    """A mesh in which another process votes for a spike."""

    def sum(self, values):
        """The sum with the other's vote."""
        return values + 1


def test_one_vote_is_enough():
    """A process that saw no spike refuses too when another saw one: nobody waits alone in the next collective."""
    assert not SpikeGuard(_guard(), _Voters()).accept(1.0, 1.0)
    assert SpikeGuard(_guard(), Mesh()).accept(1.0, 1.0)
