"""Utility calls that a sampler needs for a given error, on pyDVL's own games, against pyDVL's PermutationSampler.

Both run in the peers' environment on the same game objects; a call is counted in the game itself. The
error is the mean absolute error over players, averaged over 20 seeds; a sampler has reached the target at
the first number of calls from which that average stays below the peer's own at its budget (3,000 to 8,000 calls).
"""

import json
import os
import subprocess
import sys

import numpy as np
from figures import HERE, ROOT, record

PEERS = ROOT / ".venv-pydvl" / "bin" / "python"
SEEDS = 20
# Its AirportGame can't be made (shapes (9,) and (8,) in its table), and its MinimumSpanningTreeGame's values of 200
# don't add up to V(all) = 0.
GAMES = ["shoes", "voting", "weights"]
SAMPLERS = ["antithetic", "stratified", "regression", "permutation", "reuse"]


def measure(name):  # noqa: C901 - one script, run elsewhere
    """In the peers' environment: traces of error over calls, for every sampler and seed."""
    import warnings

    warnings.simplefilter("ignore")
    import pydvl
    from pydvl.utils.status import Status
    from pydvl.valuation import ShapleyValuation
    from pydvl.valuation.games import (
        AsymmetricVotingGame,
        ShoesGame,
        SymmetricVotingGame,
    )
    from pydvl.valuation.samplers import PermutationSampler
    from pydvl.valuation.stopping import StoppingCriterion
    from pydvl.valuation.types import Sample

    from valuation.samplers import Sampler, draw, log_shapley
    from valuation.semivalues import Memo
    from valuation.stopping import Tally

    game, budget = {
        "shoes": lambda: (ShoesGame(3, 5), 4000),
        "voting": lambda: (SymmetricVotingGame(12), 4000),
        "weights": lambda: (AsymmetricVotingGame(), 8000),
    }[name]()
    truth_n = np.asarray(game.shapley_values().values, dtype=float).ravel()
    game.u._training_data = game.data
    calls = 0
    score = game.u.score

    def counted(x):
        nonlocal calls
        calls += 1
        return score(x)

    game.u.score = counted

    class Watch(StoppingCriterion):
        """Write down calls and error at every look."""

        def __init__(self):
            super().__init__()
            self.trace = []

        def _check(self, result):
            values_n = np.empty(len(truth_n))
            values_n[result.indices] = result.values
            self.trace.append((calls, float(np.abs(values_n - truth_n).mean())))
            self._converged[:] = calls >= budget
            return Status.Converged if calls >= budget else Status.Pending

        def completion(self):
            return 0.0

    def utility(masks):
        """V of bitmasks on the peer's game; nobody has 0 by the peer's rule, uncounted there and counted here."""
        return [
            float(game.u(Sample(None, np.array([i for i in range(len(truth_n)) if m >> i & 1]))))
            for m in masks
        ]

    traces = {}
    for seed in range(SEEDS):
        calls = 0
        watch = Watch()
        ShapleyValuation(game.u, PermutationSampler(seed=seed), watch, progress=False).fit(
            game.data
        )
        traces.setdefault("peer", []).append(watch.trace)
        for sampler in SAMPLERS:
            memo, rng, trace = Memo(utility), np.random.default_rng(seed), []
            tally, guess_n, count = Tally.empty(len(truth_n)), None, 1
            logs = log_shapley(len(truth_n))
            if sampler in ("regression", "reuse"):
                count = 4
            if sampler == "stratified" and len(truth_n) > 60:
                continue
            if sampler == "regression":
                pilot = max(8, len(truth_n))
                guess_n = draw(Sampler(name=sampler), memo, pilot, logs, rng).rows_Dn.mean(axis=0)
            idle = 0
            while memo.calls < budget and idle < 300:
                before = memo.calls
                made = draw(Sampler(name=sampler), memo, count, logs, rng, guess_n)
                tally = tally + Tally.of(made.rows_Dn)
                trace.append((memo.calls, float(np.abs(tally.mean_n - truth_n).mean())))
                idle = idle + 1 if memo.calls == before else 0
            traces.setdefault(sampler, []).append(trace)
    print(json.dumps({"version": pydvl.__version__, "budget": budget, "traces": traces}))  # noqa: T201  # fmt: skip


def reached(traces, target):
    """First number of calls from which the mean error over seeds stays below the target; infinite if never."""
    top = min(trace[-1][0] for trace in traces)
    grid = np.unique(np.geomspace(4, top, 400).astype(int))
    errors = []
    for trace in traces:
        at, error = np.array(trace).T
        place = np.searchsorted(at, grid, side="right") - 1
        errors.append(np.where(place >= 0, error[np.maximum(place, 0)], error[0] + 1))
    above = np.flatnonzero(np.mean(errors, axis=0) > target)
    return float(
        grid[0] if not len(above) else grid[above[-1] + 1] if above[-1] + 1 < len(grid) else np.inf
    )


def main():
    """One line: the geometric mean over games of our default sampler's calls over the peer's."""
    ours, table = {}, []
    for name in GAMES:
        run = subprocess.run(
            [PEERS, __file__, "measure", name], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        told = json.loads(run.stdout.splitlines()[-1])
        # The peer's last look within its budget; looks come after whole orders.
        ends = [
            [error for calls, error in trace if calls <= told["budget"]][-1]
            for trace in told["traces"].pop("peer")
        ]
        need = {which: reached(traces, np.mean(ends)) for which, traces in told["traces"].items()}
        need = {"peer": told["budget"]} | need
        ours[name] = need["stratified"] / need["peer"]
        table.append(f"{name} " + " ".join(f"{which} {calls:.0f}" for which, calls in need.items()))
        print(table[-1], flush=True)  # noqa: T201 - this program's output
    ratio = float(np.exp(np.mean(np.log(list(ours.values())))))
    record(
        "bench.jsonl", "valuation.owners.semivalue_calls", packages=("numpy",), kind="requirement", seeds=list(range(SEEDS)), n=SEEDS,
        what="utility calls to the error that the peer has at its budget, stratified (the default up to 64 players) / pydvl's PermutationSampler, geometric mean of 3 games", unit="1",
        ours=ratio, peer=1.0, ratio=ratio, better="lower", spread=[min(ours.values()), max(ours.values())], peer_name="pydvl",
        peer_version=told["version"], bar="ratio <= 0.7", holds=ratio <= 0.7, note="calls per sampler: " + "; ".join(table) + "; inf = not within the budget. The metric was changed from 2 % and 10 % of the largest value, which the peer did not reach",
        command="python tests/benchmarks/bench_semivalues.py",
    )  # fmt: skip


if __name__ == "__main__":
    measure(sys.argv[2]) if sys.argv[1:2] == ["measure"] else main()
