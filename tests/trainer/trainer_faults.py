"""What others got wrong about layouts, on purpose: each makes one training differ, and the parity tests must see it.

A fault patches the trainer in a child process, which ends with its job.
"""

import torch
from torch.nn import functional

from trainer import partition, pipeline, sequence
from trainer.data import IGNORE
from trainer.objective import LanguageModelling, label_count


def shift_labels_after_the_cut():
    """Labels are the next tokens of a part, so that the last label of each part is lost."""
    right = sequence.cut_positions

    def wrong(rows, mesh):
        tokens, labels, positions, documents = right(rows, mesh)
        shifted = functional.pad(tokens[:, 1:], (0, 1), value=IGNORE)
        return tokens, torch.where(labels == IGNORE, IGNORE, shifted), positions, documents

    sequence.cut_positions = wrong


def sum_gradients_twice():
    """Gradients that FSDP has added up are added up again; those of copies too."""
    right = partition.reduce_gradients

    def wrong(parameters, loss, mesh):
        parameters = list(parameters)
        axis = "dp_replicate" if mesh.layout.dp_replicate > 1 else "dp_shard"
        partition._add_up([p.grad for p in parameters], mesh.group(axis))
        return right(parameters, loss, mesh)

    from trainer import step

    step.reduce_gradients = wrong


def average_gradients():
    """Copies average, as DDP does by default, what is already divided by the global count."""
    right = partition._add_up

    def wrong(grads, group):
        right(grads, group)
        for grad in grads:
            grad.div_(torch.distributed.get_world_size(group))

    partition._add_up = wrong


def forget_positions():
    """Every part of a row counts its positions from 0."""
    right = sequence.cut_positions

    def wrong(rows, mesh):
        tokens, labels, positions, documents = right(rows, mesh)
        return tokens, labels, torch.arange(tokens.shape[1]).expand_as(positions), documents

    sequence.cut_positions = wrong


def forget_documents():
    """A packed row is one document."""
    sequence.PADDING = 0
    right = sequence.cut_positions

    def wrong(rows, mesh):
        tokens, labels, positions, documents = right(rows, mesh)
        return tokens, labels, positions, torch.zeros_like(documents)

    sequence.cut_positions = wrong


def drop_the_weights_of_the_loss():
    """A mean of the parts' own means, whatever the number of their labels."""

    def wrong(self, logits, labels, totals):
        mean = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        parts = self.mesh.layout.batch_degree * self.mesh.layout.sp * self.mesh.layout.microbatches
        return mean / parts if label_count(labels) else 0 * logits.sum()

    LanguageModelling.loss_of_logits = wrong


def scale_by_the_sequence_degree():
    """The loss of a part is multiplied by the number of parts."""
    right = LanguageModelling.loss_of_logits

    def wrong(self, logits, labels, totals):
        return right(self, logits, labels, totals) * self.mesh.layout.sp

    LanguageModelling.loss_of_logits = wrong


def scale_by_the_microbatches():
    """A pipeline divides what is already divided by the global count."""
    right = pipeline.Pipeline._build

    def wrong(self, tokens):
        schedule = right(self, tokens)
        schedule.scale_grads = True
        return schedule

    pipeline.Pipeline._build = wrong


def count_copies_as_slices():
    """The norm counts a slice once for every process that has it."""
    partition._slices = lambda _: 1


def forget_what_tensor_parallelism_does_not_cut():
    """Norms keep the gradients of their own positions."""
    partition._SUMMED = ("dp_replicate",)


FAULTS = {
    function.__name__: function
    for function in (
        shift_labels_after_the_cut,
        sum_gradients_twice,
        average_gradients,
        forget_positions,
        forget_documents,
        drop_the_weights_of_the_loss,
        scale_by_the_sequence_degree,
        scale_by_the_microbatches,
        count_copies_as_slices,
        forget_what_tensor_parallelism_does_not_cut,
    )
}
