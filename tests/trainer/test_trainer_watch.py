"""Claims about replicas and agreement: found by the slice that they hold, whatever the layout."""

import pytest
import torch
from trainer_processes import run_processes
from trainer_replicas import hybrid, refused

from trainer.mesh import Mesh
from trainer.root import state_root
from trainer.watch import agreed, check_replicas


@pytest.mark.parametrize(
    ("flip", "named"),
    [
        ((-1, ""), None),
        ((3, "cut"), "rank 3 holds other numbers than its replicas in cut"),
        ((0, "whole"), "rank 0 holds other numbers than its replicas in whole"),
        ((2, "stage0"), "rank 2 holds other numbers than its replicas in stage0"),
        ((2, "alone"), "rank 2 holds other numbers than its replicas in alone"),
    ],
)
def test_a_replica_that_differs_is_named_in_ahybrid_layout(tmp_path, flip, named):
    """2 x 2: slices are compared with the same slice only, stages with their own; all processes say the same."""
    answers = run_processes(4, tmp_path / "group", hybrid, flip)
    assert len({said for said, _, _ in answers}) == 1
    said = answers[0][0]
    assert (named in said) if named else not said
    if named is None:
        whole = {
            "cut": torch.arange(12.0).reshape(4, 3), "whole": torch.ones(2), "stage0": torch.zeros(1),
            "stage1": torch.zeros(1),
        }  # fmt: skip
        assert {root for _, root, _ in answers} == {state_root(whole)}


def test_what_one_process_refuses_all_refuse(tmp_path):
    """The lowest rank's words are everyone's; without a refusal each keeps its own result."""
    assert run_processes(3, tmp_path / "a", refused, ()) == [0, 1, 2]
    assert run_processes(3, tmp_path / "b", refused, (2, 1)) == ["bad on 1"] * 3


def test_one_process_agrees_with_itself():
    """Without a group nothing is exchanged."""
    assert agreed(Mesh(), lambda: 5) == 5
    check_replicas({"w": torch.zeros(1)}, Mesh(), "step 1")
