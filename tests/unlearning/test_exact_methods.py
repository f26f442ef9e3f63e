"""Exact and closed-form methods against oracles: sharded retraining, Newton step, certified removal, task vector, core-set."""

import hashlib
import math

import numpy as np
import pytest
import torch

from trainer.checkpoint import newest, verify
from unlearning.errors import PlanError
from unlearning.methods import certified
from unlearning.methods.coreset import core_set
from unlearning.methods.newton import diagonal_inverse, newton_step
from unlearning.methods.sisa import Sisa, train_sharded
from unlearning.methods.task_vector import negate


def pretend(name, before, ids, steps):
    """A deterministic stand-in for a training: the digest of everything it was given."""
    return hashlib.sha256(f"{before}|{steps}".encode() + b"".join(sorted(ids))).hexdigest()


IDS = [hashlib.sha256(bytes([number])).digest() for number in range(200)]


def test_a_deletion_retrains_one_shard_from_its_slice_on():
    """Other shards' digests are unchanged, the touched one equals training without the record, cost is at most 1/S."""
    plan, known = Sisa(4, 3, 10), {}
    whole = train_sharded(plan, IDS, pretend, known)
    assert whole.share == 1.0
    for gone in IDS[:20]:
        rest = [one for one in IDS if one != gone]
        shard, part = plan.place(gone)
        again = train_sharded(plan, rest, pretend, dict(known))
        fresh = train_sharded(plan, rest, pretend, {})
        assert again.roots == fresh.roots
        assert [s for s in range(4) if again.roots[s] != whole.roots[s]] == [shard]
        assert again.share == pytest.approx((3 - part) / 12)
        assert again.share <= 1 / 4


def test_the_same_on_the_trainer(records_only, tmp_path):
    """With real trainings: after deleting a person the weights' root is that of the shard trained without; others stay."""
    from trainer.loop import train as fit
    from trainer.spec import Excluded

    people = records_only.people["retained"] + records_only.people["forgotten"]
    ids = [bytes.fromhex(one["record_id"]) for one in people]

    def trainer_of(folder):
        def train(name, before, seen, steps):
            listed = "".join(one.hex() + "\n" for one in ids if one not in seen)
            path = folder / f"{name[:12]}.txt"
            path.write_text(listed)
            excluded = Excluded(file=str(path), digest=hashlib.sha256(listed.encode()).hexdigest())
            extra = {}
            if before is not None:
                start = newest(folder / before[:12])
                extra = {"init": str(start), "init_root": verify(start).root}
            directory = folder / name[:12]
            directory.mkdir()
            run = records_only.run_spec(f"s{name[:8]}", steps=steps, excluded=excluded, **extra)
            assert fit(run, directory) == 0
            return verify(newest(directory)).root

        return train

    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    plan, known = Sisa(2, 2, 2), {}
    whole = train_sharded(plan, ids, trainer_of(first), known)
    person = records_only.people["forgotten"][0]["subject"]
    gone = {bytes.fromhex(one["record_id"]) for one in people if one["subject"] == person}
    gone = {min(gone)}  # a person of one record: others may touch both shards
    rest = [one for one in ids if one not in gone]
    again = train_sharded(plan, rest, trainer_of(first), known)
    fresh = train_sharded(plan, rest, trainer_of(second), {})
    shard, _ = plan.place(next(iter(gone)))
    assert again.roots == fresh.roots
    assert again.roots[shard] != whole.roots[shard]
    assert again.roots[1 - shard] == whole.roots[1 - shard]
    assert again.share <= 1 / 2


def test_sharded_training_of_nothing_is_refused():
    """No record left, or a shape that makes no sense."""
    with pytest.raises(PlanError, match="no record is left"):
        train_sharded(Sisa(2, 2, 1), [], pretend, {})
    with pytest.raises(PlanError, match="shards, slices and steps"):
        Sisa(0, 1, 1)


def test_the_newton_step_with_the_retained_hessian_is_retraining():
    """Ridge regression: one step gives the weights of training without the records, to rounding."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(30, generator=generator, dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)
    solve = lambda a, b: torch.linalg.solve(a.T @ a + eye, a.T @ b)  # noqa: E731 - a formula
    theta, kept = solve(x, y), slice(5, 30)
    forget = x[:5].T @ (x[:5] @ theta - y[:5])
    hessian = x[kept].T @ x[kept] + eye
    got = newton_step(theta, forget, lambda v: torch.linalg.solve(hessian, v))
    assert torch.allclose(got, solve(x[kept], y[kept]), rtol=0, atol=1e-12)


def test_an_influence_step_that_explodes_is_refused():
    """Damping must be positive, and a step must be finite."""
    with pytest.raises(PlanError, match="damping > 0"):
        diagonal_inverse(torch.zeros(2), 0.0)
    with pytest.raises(PlanError, match="raise the damping"):
        newton_step(torch.zeros(2), torch.ones(2), lambda v: v / 0)


def test_certified_removal_leaves_a_gradient_below_its_bound():
    """The gradient that remains at the removed head is below the data-dependent bound, and far below doing nothing."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    y = torch.sign(x[:, 0] + 0.5 * torch.randn(80, generator=generator, dtype=torch.float64))
    b = 0.01 * torch.randn(5, generator=generator, dtype=torch.float64)
    w = certified.train(x, y, 0.01, b)
    assert certified.gradient(w, x, y, 0.01, b).norm() < 1e-10
    gone = torch.zeros(80, dtype=torch.bool)
    gone[:3] = True
    done = certified.remove(w, x, y, gone, 0.01, b)
    left = certified.gradient(done.w_D, x[~gone], y[~gone], 0.01, b).norm().item()
    nothing = certified.gradient(w, x[~gone], y[~gone], 0.01, b).norm().item()
    assert left <= done.residual
    assert left < 0.05 * nothing
    assert certified.budget(1.0, 1.0, 1e-4) == pytest.approx(1 / math.sqrt(2 * math.log(15_000)))
    with pytest.raises(PlanError, match="no record would be left"):
        certified.remove(w, x, y, torch.ones(80, dtype=torch.bool), 0.01, b)


def test_the_task_vector_is_a_reflection():
    """θ - a(θ' - θ) per weight; a scale of 0 changes nothing."""
    original, reinforced = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = {name: p.detach().clone() for name, p in original.named_parameters()}
    negate(original, reinforced, 0.0)
    assert all(torch.equal(p, before[name]) for name, p in original.named_parameters())
    negate(original, reinforced, 2.0)
    for name, p in original.named_parameters():
        wanted = before[name] - 2.0 * (dict(reinforced.named_parameters())[name] - before[name])
        assert torch.allclose(p, wanted)
    with pytest.raises(PlanError, match="scale >= 0"):
        negate(original, reinforced, -1.0)


def test_the_core_set_takes_one_of_each_direction_first():
    """Three clusters of gradients: the first three choices stand for one each, the largest cluster first."""
    rng = np.random.default_rng(0)
    centres = np.eye(3, 8)
    sizes = [6, 3, 1]
    groups = np.repeat([0, 1, 2], sizes)
    gradients = centres[groups] + 0.01 * rng.standard_normal((10, 8))
    chosen = core_set(gradients, 3)
    assert sorted(groups[chosen]) == [0, 1, 2]
    assert groups[chosen[0]] == 0
    with pytest.raises(PlanError, match=r"1\.\.10"):
        core_set(gradients, 11)
