"""One influence method of a peer, in the peers' own environment, on a shared input.

    .venv-peers/bin/python tests/benchmarks/peer_influence.py METHOD JOB_FOLDER OUTPUT.npz

The folder holds `input.npz` (train_NT, query_QT: rows of one length, the last token ends the text; weights by name),
`spec.json` and `hf/`, the same model in Hugging Face's format. The loss of a text is the sum over its predicted tokens. All but
bergson get this project's `Transformer`, which is plain torch and faster than Hugging Face's.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from metering import metered
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trainer.model import Transformer  # noqa: E402
from trainer.shape import ModelSpec  # noqa: E402

TRAK_DIM = 1024


def load(folder):
    """Model, training rows, query rows."""
    with np.load(folder / "input.npz") as file:
        arrays = {name: file[name] for name in file.files}
    model = Transformer(ModelSpec(**json.loads((folder / "spec.json").read_text())))
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(torch.from_numpy(arrays["final/" + name]))
    return model, torch.from_numpy(arrays["train_NT"]), torch.from_numpy(arrays["query_QT"])


def summed_loss(logits_BTV, tokens_BT):
    """Sum of the negative log-likelihoods of all tokens but the first."""
    return functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="sum"
    )


def loaders(*sets, batch=32):
    """Unshuffled loaders of single-tensor batches."""
    return [
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(s), batch_size=batch)
        for s in sets
    ]


def kronfluence(strategy):
    """Scores of kronfluence's `strategy` (ekfac, kfac, identity), empirical labels as ours."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Language(Task):
        """Summed next-token loss for both sides."""

        def compute_train_loss(self, batch, model, sample=False):  # noqa: ARG002, FBT002 - the peer's signature
            return summed_loss(model(batch[0]), batch[0])

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    def compute(model, train, query):
        task = Language()
        with tempfile.TemporaryDirectory() as folder:
            model = prepare_model(model, task)
            analyzer = Analyzer("peer", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
            data = [torch.utils.data.TensorDataset(x) for x in (train, query)]
            factors = FactorArguments(strategy=strategy, use_empirical_fisher=True)
            analyzer.fit_all_factors("f", data[0], per_device_batch_size=32, factor_args=factors)
            analyzer.compute_pairwise_scores(
                "s", "f", data[1], data[0], per_device_query_batch_size=len(query), per_device_train_batch_size=32,
                score_args=ScoreArguments(damping_factor=None),
            )  # fmt: skip
            return analyzer.load_pairwise_scores("s")["all_modules"].numpy()

    return compute


def dattri_dot(model, train, query):
    """Dattri's gradient dot product, with its defaults (it projects to 512 numbers)."""
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask

    def loss(params, batch):
        tokens = batch[0] if isinstance(batch, list | tuple) else batch
        rows = tokens.reshape(-1, train.shape[1])
        return summed_loss(torch.func.functional_call(model, params, (rows,)), rows)

    weights = {name: p.detach() for name, p in model.named_parameters()}
    task = AttributionTask(loss_func=loss, model=model, checkpoints=[weights])
    attributor = TracInAttributor(task, weight_list=torch.ones(1), normalized_grad=False)
    return attributor.attribute(*loaders(train, query)).detach().numpy().T


def traker(model, train, query, ridge=1e-6):
    """Traker's TRAK of one model; its own default ridge is 0, which k > n doesn't allow."""
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput

    class Language(AbstractModelOutput):
        """Summed next-token loss as output, so that Q = 1."""

        def __init__(self):
            super().__init__()

        @staticmethod
        def get_output(model, weights, buffers, tokens):
            rows = tokens[None]
            return -summed_loss(
                torch.func.functional_call(model, (weights, buffers), (rows,)), rows
            )

        def get_out_to_loss_grad(self, model, weights, buffers, batch):  # noqa: ARG002
            return torch.ones(len(batch[0]), 1)

    with tempfile.TemporaryDirectory() as folder:
        trak = TRAKer(
            model=model.eval(), task=Language(), train_set_size=len(train), device="cpu", proj_dim=TRAK_DIM,
            use_half_precision=False, lambda_reg=ridge, save_dir=folder, logging_level=40,
        )  # fmt: skip
        weights = model.state_dict()
        trak.load_checkpoint(weights, model_id=0)
        for (batch,) in loaders(train)[0]:
            trak.featurize(batch=[batch], num_samples=len(batch))
        trak.finalize_features()
        trak.start_scoring_checkpoint("q", weights, model_id=0, num_targets=len(query))
        for (batch,) in loaders(query)[0]:
            trak.score(batch=[batch], num_samples=len(batch))
        return np.array(trak.finalize_scores("q")).T


def bergson(folder, train, query):
    """Cosine of bergson's stored gradients, unprojected, on the model in Hugging Face's form."""
    from bergson import GradientProcessor, collect_gradients, load_gradients
    from bergson.config import IndexConfig
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    stored = []
    with tempfile.TemporaryDirectory() as place:
        for name, rows in (("train", train), ("query", query)):
            ids = rows.tolist()
            data = Dataset.from_dict(
                {"input_ids": ids, "labels": ids, "length": [len(r) for r in ids]}
            )
            config = IndexConfig(run_path=f"{place}/{name}", projection_dim=0)
            collect_gradients(
                model=model, data=data, processor=GradientProcessor(projection_dim=None), cfg=config,
                batches=[list(range(i, min(i + 32, len(ids)))) for i in range(0, len(ids), 32)],
            )  # fmt: skip
            found = load_gradients(config.partial_run_path)
            stored.append(np.array(found, dtype=np.float32))
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in stored]
    return unit[1] @ unit[0].T


METHODS = {
    "kronfluence_ekfac": kronfluence("ekfac"),
    "kronfluence_kfac": kronfluence("kfac"),
    "kronfluence_identity": kronfluence("identity"),
    "dattri_dot": dattri_dot,
    "traker": traker,
    "traker_tuned": partial(traker, ridge=1e-2),  # the best of 1e-6, 1e-4 and 1e-2 on peps
    "bergson_cosine": bergson,
}

if __name__ == "__main__":
    method, job, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    model, train, query = load(job)
    if method.startswith("bergson"):
        import bergson as _  # noqa: F401 - its import takes longer than its work and stands outside the meter

        model = job
    with metered() as meter:
        scores = METHODS[method](model, train, query)
    np.savez(output, scores_QN=np.asarray(scores, dtype=np.float64), **meter)
