r"""A method's loss on the tokens of answers, as TOFU's code has it: the question is context and is not pushed.

::

    Question: Who wrote it?\nAnswer: | Jane Doe wrote it. <|endoftext|>
                                      └ pushed

The methods' own entry (`methods.objective:run`) knows numbers and second halves of texts; a study of questions with written answers
knows where each answer begins. Losses, batches and retain term are those of `MethodObjective`.

`config.extra` of a run: `{"answers": file, "tokenizer": file, "method": name, "forget_records": n}`; the file is JSON lines of `prompt` and
`answer`, made-up people only, since it is not sealed.

Source: locuslab/tofu `dataloader.py` (labels of the question are -100).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from unlearning.answering import span
from unlearning.errors import PlanError
from unlearning.methods.forget_retain import Forgotten
from unlearning.methods.objective import MethodObjective, idk_answers, steps_left
from unlearning.methods.settings import settings_of
from unlearning.probes import FileTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.spec import RunSpec

ENTRY = "unlearning.practice.forgetting:run"
_KEYS = {"answers", "tokenizer", "method", "forget_records"}


def run(run: RunSpec, directory: Path) -> int:
    """Entry of a training run.

    Args:
        run: specification; `init` is the original model.
        directory: the run's folder, from which the files' paths start.

    Returns:
        Exit code of the loop.

    Raises:
        PlanError: without an original model, or with other settings than these.
    """
    from trainer.inputs import batch_plan, initial_model
    from trainer.loop import fit

    extra = run.config.extra
    if set(extra) != _KEYS:
        raise PlanError(f"expected the settings {sorted(_KEYS)}, got {sorted(extra)}")
    if run.init == "none":
        raise PlanError("expected the original model as the run's init, got 'none'")
    tokenizer, length = FileTokenizer(directory / extra["tokenizer"]), run.config.batch.length
    forgotten = pushed_answers(directory / extra["answers"], tokenizer, length)
    method = extra["method"]
    preferred = idk_answers(forgotten, tokenizer, length) if method == "dpo" else []
    objective = MethodObjective(
        batch_plan(run, directory), forgotten, initial_model(run, directory).eval(), method, settings_of(method, {}), preferred=preferred,
        forget_records=extra["forget_records"], steps=steps_left(run, directory), folder=directory,
    )  # fmt: skip
    return fit(run, directory, objective=objective)


def pushed_answers(file: Path, tokenizer: FileTokenizer, length: int) -> list[Forgotten]:
    """Records of which only the answer is pushed.

    Args:
        file: JSON lines of `prompt` and `answer`.
        tokenizer: the run's tokenizer.
        length: tokens in a row; what is longer loses its end.

    Returns:
        One entry per line whose answer begins inside the row.

    Raises:
        ProbeError: for an answer without a token of its own.
    """
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tokens, first = span(tokenizer, row["prompt"], row["answer"])
        if first < length:
            found.append(Forgotten(tuple(tokens[:length]), first))
    return found
