"""What three processes send each other, with the answers to every claim: importable by the children of the test."""

import torch
from torch import distributed as dist

from trainer.dispatch import Dispatch, send
from trainer.likelihood import cross_entropy_sum
from trainer.sequence import exchange
from trainer.tensor import gather, scatter

WORLD = 3
IGNORE = -100


def _numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def answers_of_one():
    """Every claim as a flag, computed by one of three processes."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found = {}

    whole = _numbers(2, 2 * WORLD, 4 * WORLD, 5)  # heads and positions of all
    part = whole.chunk(WORLD, 2)[rank].clone().requires_grad_()
    heads = exchange(part, group, 1, 2)
    found["exchange"] = torch.equal(heads, whole.chunk(WORLD, 1)[rank])
    back = exchange(heads, group, 2, 1)
    found["and back"] = torch.equal(back, part)
    weights = _numbers(*whole.shape, seed=1)
    (heads * weights.chunk(WORLD, 1)[rank]).sum().backward()
    found["its gradient"] = torch.equal(part.grad, weights.chunk(WORLD, 2)[rank])

    rows = _numbers(2, 2 * WORLD, 4)
    own = rows.chunk(WORLD, 1)[rank].clone().requires_grad_()
    found["gather"] = torch.equal(gather(own, group), rows)
    given = [_numbers(2, 2 * WORLD, 4, seed=k).requires_grad_() for k in range(WORLD)]
    added = scatter(given[rank], group)
    total = torch.stack(given).sum(0).chunk(WORLD, 1)[rank]
    found["scatter"] = torch.allclose(added, total, rtol=0, atol=1e-14)
    (gather(own, group) * weights[:, :, :4, 0][:, : 2 * WORLD]).sum().backward()
    want = WORLD * weights[:, :, :4, 0][:, : 2 * WORLD].chunk(WORLD, 1)[rank]
    found["gather's gradient adds up"] = torch.allclose(own.grad, want, rtol=1e-14)

    # Process r sends r + k - 1 rows to process k: none from 0 to 0, nothing to 1 but one from 1...
    sent = [max(0, rank + k - 1) for k in range(WORLD)]
    arrived = [max(0, k + rank - 1) for k in range(WORLD)]
    mine = (100.0 * rank + torch.arange(sum(sent), dtype=torch.float64))[:, None].requires_grad_()
    home = send(send(mine, sent, arrived, group), arrived, sent, group)
    found["uneven there and back"] = torch.equal(home, mine)
    home.sum().backward()
    found["uneven gradient"] = torch.equal(mine.grad, torch.ones_like(mine))

    # Experts that add their number: what comes back says where a row has been.
    load = torch.tensor(
        [rank, 0, 2, 0, 0, 1]
    )  # of 6 experts, 2 per process; those of process 1 are half idle
    tokens = _numbers(int(load.sum()), 4, seed=rank)

    def experts(rows_RD, load_e):
        number = torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64)
        return rows_RD + number.repeat_interleave(load_e)[:, None]

    been = Dispatch(group)(tokens, load, experts)
    number = torch.arange(6.0, dtype=torch.float64).repeat_interleave(load)[:, None]
    found["dispatch"] = torch.equal(been, tokens + number)

    logits = (
        _numbers(2, 5, 4 * WORLD) * 30
    )  # large enough to overflow a naive sum of exponentials of float32
    labels = torch.randint(0, 4 * WORLD, (2, 5), generator=torch.Generator().manual_seed(3))
    labels[0, 1] = labels[1, 4] = IGNORE
    reference = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        reference.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    expected.backward()
    slice_ = logits.chunk(WORLD, 2)[rank].clone().requires_grad_()
    loss = cross_entropy_sum(slice_, labels, group)
    loss.backward()
    found["loss"] = torch.allclose(loss, expected, rtol=1e-14)
    wanted = reference.grad.chunk(WORLD, 2)[rank]
    found["its slices of the gradient"] = torch.allclose(slice_.grad, wanted, rtol=0, atol=1e-14)
    return found
