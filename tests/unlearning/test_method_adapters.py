"""Low-rank adapters under any loss: what moves, how far in rank, by which gradient, and that a resumed run is an uninterrupted one."""

import dataclasses
import shutil

import pytest
import torch
from forgetting_runs import MIXED, objective_of

from trainer.checkpoint import load_model, read_tensors
from trainer.errors import SpecError
from trainer.layout import Layout
from trainer.manifest import verify
from trainer.model import Transformer, init_parameters
from trainer.spec import OptimSpec
from trainer.step import train_step
from unlearning.errors import PlanError
from unlearning.methods import ascent, edits, npo, objective
from unlearning.methods.adapters import AdapterOptimizer, demand_possible
from unlearning.methods.forget_retain import ForgetConfig
from unlearning.methods.settings import Lora, lora_of

LORA = Lora(rank=2, alpha=6.0, targets=("wq", "w2"))
OPTIM = OptimSpec(lr=1e-2, warmup_steps=0, weight_decay=0.0)


def adapted(folder, method):
    """A method's objective, its model in float64, and an optimiser of adapters on it."""
    task, model = objective_of(folder, method)
    return task, model, AdapterOptimizer(model, LORA, OPTIM, seed=4)


def take(task, model, optimizer, steps, first=0):
    """Some steps of training."""
    for step in range(first, first + steps):
        batch = task.batch(step, 0, 1)
        train_step(model, optimizer, task, batch, task.counts(batch), precision="float64")


def rank_of(delta):
    """Number of singular values above rounding."""
    values = torch.linalg.svdvals(delta.double())
    return int((values > 1e-10 * values[0]).sum()) if values[0] > 0 else 0


@pytest.mark.parametrize("method", ["npo", "graddiff", "rmu"])
def test_only_the_adapted_matrices_move_and_by_at_most_the_rank(records_only, method):
    """After three steps: other weights bit-equal, each delta of rank <= 2 and some of exactly 2."""
    task, model, optimizer = adapted(records_only.folder, method)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    take(task, model, optimizer, 3)
    ranks = {}
    for name, tensor in model.state_dict().items():
        if name.split(".")[-2] in LORA.targets:
            ranks[name] = rank_of(tensor - before[name])
        else:
            assert torch.equal(tensor, before[name]), name
    assert len(ranks) == 4
    assert max(ranks.values()) == 2


def test_training_all_weights_has_a_larger_rank(records_only):
    """Negative control: without adapters the same steps move a matrix by more than rank 2."""
    task, model = objective_of(records_only.folder, "npo")
    before = model.blocks["0"].attention.wq.weight.detach().clone()
    take(task, model, torch.optim.AdamW(model.parameters(), lr=1e-2), 3)
    assert rank_of(model.blocks["0"].attention.wq.weight.detach() - before) > 2


@pytest.mark.parametrize("method", ["npo", "graddiff", "rmu"])
def test_gradients_are_those_of_the_plain_formula(records_only, method):
    """Autograd through W0 + (alpha / r) B A, in float64 and with B away from zero, gives the same to 1e-10."""
    task, model, optimizer = adapted(records_only.folder, method)
    original = {name: matrix.detach().clone() for name, matrix in optimizer.matrices.items()}
    take(task, model, optimizer, 2)
    batch = task.batch(2, 0, 1)
    totals = task.counts(batch)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in optimizer.parameters.items()}
    weights = {
        n: w0 + 6.0 / 2 * leaves[f"{n}.lora_b"] @ leaves[f"{n}.lora_a"]
        for n, w0 in original.items()
    }

    def called(*parts, **options):
        return torch.func.functional_call(model, weights, parts, options)

    task.loss(called, batch, totals).backward()
    optimizer.zero_grad()
    task.loss(model, batch, totals).backward()
    optimizer.project()
    seen = 0
    for name, parameter in optimizer.parameters.items():
        plain = leaves[name].grad
        if plain is None or not plain.any():  # above the layer that rmu moves
            assert not parameter.grad.any() if parameter.grad is not None else True
            continue
        seen += 1
        torch.testing.assert_close(parameter.grad, plain, rtol=1e-10, atol=1e-14)
    assert seen >= 4


def lora_run(made, tmp_path, **changes):
    """A run of four steps from an untrained original, with a checkpoint after two."""
    from trainer.loop import train

    directory = tmp_path / "original"
    if not directory.exists():
        directory.mkdir()
        assert train(made.run_spec("original", steps=1), directory) == 0
    original = directory / "step-1"
    extra = made_extra(made) | changes.pop("extra", {})
    values = {
        "steps": 4, "rows": 4, "excluded": made.excluded(), "init": str(original), "init_root": verify(original).root,
        "optim": {"lr": 0.01, "warmup_steps": 0, "weight_decay": 0.0}, "entry": "unlearning.methods.npo:run",
    }  # fmt: skip
    run = made.run_spec("lora", kind="unlearn", extra=extra, **(values | changes))
    return dataclasses.replace(run, config=dataclasses.replace(run.config, checkpoint_every=2))


def made_extra(made):
    """Settings of the run: sealed records, tokenizer, adapters of rank 2."""
    sealed = {"file": str(made.folder / "forgotten.sealed"), "key_file": str(made.folder / "key")}
    return {
        "sealed": sealed, "tokenizer": str(made.folder / "tokenizer.json"), "forget_records": 4,
        "lora": {"rank": 2, "alpha": "4"},
    }  # fmt: skip


def test_a_run_ends_with_an_ordinary_checkpoint_and_resumes_to_the_same_bits(
    records_only, tmp_path
):
    """Adapters and moments stand beside the weights; losing the last checkpoint changes no bit; the model loads as any other."""
    run, folder = lora_run(records_only, tmp_path), tmp_path / "run"
    folder.mkdir()
    assert npo.run(run, folder) == 0
    root = verify(folder / "step-4").root
    tensors = dict(read_tensors(folder / "step-4"))
    assert tensors["optim.blocks.0.attention.wq.weight.lora_b"].any()
    assert "optim.blocks.0.attention.wq.weight.lora_a.exp_avg" in tensors
    assert not any("lora" in name for name in tensors if name.startswith("model."))
    model = load_model(folder / "step-4", run.config.model, root)
    before = load_model(tmp_path / "original" / "step-1", run.config.model)
    assert torch.equal(model.embed.weight, before.embed.weight)
    assert not torch.equal(model.blocks["0"].ffn.w1.weight, before.blocks["0"].ffn.w1.weight)
    shutil.rmtree(folder / "step-4")
    (folder / "result.json").unlink()
    assert npo.run(run, folder) == 0
    assert verify(folder / "step-4").root == root


@pytest.mark.parametrize(("entry", "extra"), [(ascent.run, {}), (objective.run, {"method": "rmu"})])
def test_the_other_entries_take_adapters_too(records_only, tmp_path, entry, extra):
    """Gradient ascent's own entry and the general one: no adapter, no change of embedding."""
    run, folder = lora_run(records_only, tmp_path, steps=1, extra=extra), tmp_path / "run"
    folder.mkdir()
    assert entry(run, folder) == 0
    tensors = dict(read_tensors(folder / "step-1"))
    original = dict(read_tensors(tmp_path / "original" / "step-1"))
    assert "optim.blocks.1.ffn.w2.weight.lora_a" in tensors
    assert torch.equal(tensors["model.embed.weight"], original["model.embed.weight"])


def test_what_adapters_cannot_do_is_refused_by_name(records_only, tmp_path):
    """A matrix cut twice, experts, Muon, an edit, a rank above a matrix, and settings that make no sense."""
    run = lora_run(records_only, tmp_path)
    with pytest.raises(SpecError, match=r"cut once: expected tp or .* of 1, got dp_shard=2 tp=2"):
        demand_possible(dataclasses.replace(run, layout=Layout(dp_shard=2, tp=2)))
    config = dataclasses.replace(run.config, optim=dataclasses.replace(OPTIM, name="muon"))
    with pytest.raises(PlanError, match="expected the optimiser adamw"):
        demand_possible(dataclasses.replace(run, config=config))
    mixed = dataclasses.replace(run, config=dataclasses.replace(run.config, model=MIXED))
    with pytest.raises(PlanError, match="without experts"):
        demand_possible(mixed)
    edit = lora_run(records_only, tmp_path, extra={"method": "newton"})
    with pytest.raises(PlanError, match="newton changes all weights at once"):
        edits.run(edit, tmp_path)
    model = Transformer(run.config.model)
    init_parameters(model, 1)
    with pytest.raises(PlanError, match="rank of at most 24"):
        AdapterOptimizer(model, Lora(rank=25), OPTIM, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "integer >= 0"),
        ({"rank": "8"}, "integer >= 0"),
        ({"rank": 2, "alpha": "0"}, "alpha > 0"),
        ({"rank": 2, "alpha": "x"}, "decimal string"),
        ({"rank": 2, "targets": []}, "expected targets"),
        ({"rank": 2, "targets": "wq"}, "as a list"),
        ({"rank": 2, "targets": ["embed"]}, "expected targets"),
        ({"size": 2}, "expected rank, alpha and targets"),
    ],
)
def test_settings_of_adapters_are_checked(changes, message):
    """Out of range, of another type, or unknown: refused when the run's settings are read."""
    with pytest.raises(PlanError, match=message):
        lora_of(changes)
    with pytest.raises(PlanError, match=message):
        ForgetConfig.from_extra({"sealed": {}, "tokenizer": "t", "lora": changes})


def test_without_adapters_nothing_is_different():
    """Rank 0 is the default, and an empty mapping asks for it."""
    assert lora_of({}) == Lora() == lora_of({"rank": 0})
