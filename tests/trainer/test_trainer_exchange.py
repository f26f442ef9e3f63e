"""Claims about what processes send each other: there and back is where it was, and gradients travel the same way."""

import pytest
from trainer_exchanges import WORLD, answers_of_one
from trainer_processes import run_processes


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The claims as seen by each of three processes."""
    return run_processes(WORLD, tmp_path_factory.mktemp("exchange") / "group", answers_of_one)


@pytest.mark.parametrize(
    "claim",
    [
        "exchange", "and back", "its gradient", "gather", "scatter", "gather's gradient adds up",
        "uneven there and back", "uneven gradient", "dispatch", "loss", "its slices of the gradient",
    ],
)  # fmt: skip
def test_what_is_sent_arrives(answers, claim):
    """Law, on three processes: exchange and its inverse, sums, uneven and empty parcels, and the loss over slices."""
    assert [answer[claim] for answer in answers] == [True] * WORLD


def test_every_claim_is_tested(answers):
    """No answer is left unread."""
    assert len(answers[0]) == 11
