"""Next-token training whose loss jumps at chosen steps, for one process and for the children of multi-process tests."""

from trainer.inputs import batch_plan
from trainer.loop import fit
from trainer.objective import LanguageModelling


class Spiky(LanguageModelling):
    """The loss times `factor` on the batches of some steps, counted from 0."""

    def __init__(self, plan, steps, factor=50.0):
        super().__init__(plan)
        self.steps, self.factor, self.asked = frozenset(steps), factor, []

    def batch(self, step, rank, world):
        """The batch; remembers the step."""
        self.step = step
        self.asked.append(step)
        return super().batch(step, rank, world)

    def loss(self, model, batch, totals_K):
        """The loss, spoiled on purpose."""
        loss = super().loss(model, batch, totals_K)
        return loss * (self.factor if self.step in self.steps else 1.0)


def fit_spiky(run, directory, steps, factor=50.0):
    """`fit` with spikes; returns exit code and the steps whose batches were asked for."""
    objective = Spiky(batch_plan(run, directory), steps, factor)
    return fit(run, directory, objective=objective), objective.asked
