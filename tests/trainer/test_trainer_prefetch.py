"""Claims about the prefetcher: it makes the same batches earlier, and only those."""

import threading

import numpy as np
import pytest
from trainer_corpus import write_corpus

from trainer.data import BatchPlan, TokenStore
from trainer.errors import DataError
from trainer.objective import LanguageModelling
from trainer.prefetch import Prefetcher
from trainer.spec import BatchSpec


@pytest.fixture
def prefetcher():
    """Makes prefetchers and ends them."""
    made = []

    def make(plan, steps=None):
        made.append(Prefetcher(plan, steps))
        return made[-1]

    yield make
    for one in made:
        one.close()


class _Watched:
    """A plan that remembers which thread asked for which step."""

    def __init__(self, fail_at=None):
        self.asked, self.done, self.fail_at = [], threading.Event(), fail_at

    def batch(self, step):
        """The step itself."""
        self.asked.append((step, threading.current_thread() is threading.main_thread()))
        if step == self.fail_at:
            raise DataError(f"no step {step}")
        if step:
            self.done.set()
        return step


def test_batches_are_those_of_the_plan_in_any_order(tmp_path, prefetcher):
    """Forwards, back, and twice: the same arrays and segments as without a thread."""
    store = TokenStore.open(tmp_path, write_corpus(tmp_path))
    spec = BatchSpec(rows=3, length=40)
    plan, ahead = BatchPlan(store, 5, spec), prefetcher(BatchPlan(store, 5, spec))
    for step in (0, 1, 2, 3, 9, 10, 2, 2, 3, 60):
        want, got = plan.batch(step), ahead.batch(step)
        assert np.array_equal(got.tokens_BT, want.tokens_BT)
        assert got.segments == want.segments
    objective = LanguageModelling(plan, prefetcher=ahead)
    assert objective.records(4) == plan.records(4)


def test_the_next_batch_is_made_while_this_one_is_used(prefetcher):
    """After step 0 is given out, a thread makes step 1 without being asked; asking for it costs no second one."""
    plan = _Watched()
    ahead = prefetcher(plan)
    assert ahead.batch(0) == 0
    assert plan.done.wait(10)
    assert plan.asked == [(0, True), (1, False)]
    assert ahead.batch(1) == 1
    assert [step for step, main in plan.asked if main] == [0]


def test_nothing_is_made_beyond_the_end(prefetcher):
    """The last step of a run foresees nothing."""
    plan = _Watched()
    ahead = prefetcher(plan, steps=2)
    assert [ahead.batch(0), ahead.batch(1)] == [0, 1]
    ahead.close()
    assert sorted(step for step, _ in plan.asked) == [0, 1]


def test_an_error_is_raised_at_its_own_step(prefetcher):
    """A batch that can't be made fails where it is used, not a step earlier."""
    ahead = prefetcher(_Watched(fail_at=1))
    assert ahead.batch(0) == 0
    with pytest.raises(DataError, match="no step 1"):
        ahead.batch(1)
