"""All routes give the same products, and the rule takes the one that is cheapest on a CPU."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from valuation_models import LENGTH, jacobian, tiny_model, token_set

from trainer.data import pack
from valuation.capture import Capture, Groups, MatrixSite
from valuation.errors import GradientError
from valuation.gradients import Segments, captured_pass
from valuation.routes import choose_route, formed_dots, ghost_dots, route_costs


def watched(model, tokens):
    capture, batch = Capture(model), pack(tokens.records, LENGTH)
    captured_pass(model, batch, capture)
    return capture, Segments.of(batch).groups()


@pytest.mark.parametrize("tied", [True, False])
def test_ghost_with_cross_terms_equals_formed_gradients(tied):
    """Per matrix, the sum over all pairs of uses is the product of the formed gradients, to 1e-10."""
    model, rng = tiny_model(tied=tied), np.random.default_rng(1)
    (left, gl), (right, gr) = (watched(model, token_set(rng, n)) for n in (4, 6))
    for name, shape in left.shapes.items():
        if len(shape) == 1:
            continue
        want = left.gradients(name, gl).flatten(1) @ right.gradients(name, gr).flatten(1).T
        got = sum(
            ghost_dots(s, gl, t, gr) for s in left.sites_of(name) for t in right.sites_of(name)
        )
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=name)
        if tied and name == "embed.weight":  # negative control: without the cross terms it is wrong
            own = sum(
                ghost_dots(s, gl, t, gr)
                for s in left.sites_of(name)
                for t in right.sites_of(name)
                if type(s) is type(t)
            )
            assert (own - want).abs().max() > 1e-3


@pytest.mark.parametrize("num_queries", [1, 5])
def test_formed_dots_equal_the_whole_jacobian(num_queries):
    """Whichever route the rule takes per parameter, the sum is J_q J^T."""
    model, rng = tiny_model(tied=False), np.random.default_rng(2)
    train, queries = token_set(rng, 5), token_set(rng, num_queries)
    capture, groups = watched(model, train)
    query_capture, query_groups = watched(model, queries)
    left = {name: query_capture.gradients(name, query_groups) for name in capture.shapes}
    want = jacobian(model, queries) @ jacobian(model, train).T
    torch.testing.assert_close(formed_dots(capture, groups, left), want, rtol=1e-10, atol=1e-10)


def test_the_rule_knows_the_cases():
    """One direction: vector. Many: materialise. Ghost only for texts much shorter than the layer is wide."""
    wide = {"inputs": 256, "outputs": 1024}
    assert choose_route(left=1, right=32, tokens=128, formed=True, **wide) == "vector"
    assert choose_route(left=24, right=32, tokens=128, formed=True, **wide) == "materialise"
    assert choose_route(left=32, right=32, tokens=128, **wide) == "materialise"
    assert choose_route(left=32, right=32, tokens=4, **wide) == "ghost"
    assert (
        choose_route(
            left=8, right=8, tokens=32, inputs=50_000, outputs=64, lookup=True, formed=True
        )
        == "vector"
    )
    assert (
        choose_route(left=64, right=8, tokens=512, inputs=64, outputs=64, lookup=True, formed=True)
        == "materialise"
    )


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(128, 128, 512), (2, 256, 256)])
def test_the_rule_agrees_with_the_clock(tokens, inputs, outputs):
    """Where two routes differ by more than four times in products, the one that is taken is the faster on this CPU."""
    num, noise = 16, torch.Generator().manual_seed(0)

    def side():
        site = MatrixSite(
            "w", nn.Linear(1, 1), torch.randn(num, tokens, inputs, generator=noise),
            torch.randn(num, tokens, outputs, generator=noise),
        )  # fmt: skip
        group_P = torch.arange(num).repeat_interleave(tokens)
        return site, Groups(
            np.arange(num), np.full(num, tokens), torch.arange(num * tokens), group_P
        )

    (left, gl), (right, gr) = side(), side()
    routes = {
        "ghost": lambda: ghost_dots(left, gl, right, gr),
        "materialise": lambda: left.gradients(gl).flatten(1) @ right.gradients(gr).flatten(1).T,
    }
    torch.testing.assert_close(
        routes["ghost"]().float(), routes["materialise"](), rtol=1e-3, atol=1e-2
    )
    costs = route_costs(left=num, right=num, tokens=tokens, inputs=inputs, outputs=outputs)
    chosen = choose_route(left=num, right=num, tokens=tokens, inputs=inputs, outputs=outputs)
    other = "ghost" if chosen == "materialise" else "materialise"
    assert costs[other] > 4 * costs[chosen]
    best = {}
    for name in (chosen, other):
        times = []
        for _ in range(5):
            start = time.process_time()
            routes[name]()
            times.append(time.process_time() - start)
        best[name] = min(times)
    assert best[chosen] < best[other]


def test_ghost_refuses_what_has_no_ghost_form():
    """A gain has no pairwise form here, and is not scored zero."""
    model = tiny_model()
    capture, groups = watched(model, token_set(np.random.default_rng(0), 2))
    (site,) = capture.sites_of("norm.weight")
    with pytest.raises(GradientError, match="materialise"):
        ghost_dots(site, groups, site, groups)
