"""The default corpus with other people: where a method's numbers are chosen, so that no audit's people have a part in it.

The default home delivers 200 people: 100 are forgotten and audited, and an audit measures its utility on all of the other 100, so that
nobody of them is left to choose on. Here the same speeches stand beside 200 people of another draw, in the same tokens (the tokenizer
never saw a person) and as often. Every second one is forgotten by every setting (*validation* people), the others stay (*held*
people: what a setting costs them is held to a bound), and 200 look-alikes of this draw were never trained on. Two models by the graph's own
recipe, on one process: the original, and a gold model that never saw the validation people. They are kept, and go on where they were killed.
"""

import dataclasses
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from provenance import write_atomic
from unlearning.people import Record
from unlearning.probes import FileTokenizer

OWNER = "registry"
SEED = 20_240_301  # of the draw of people; the default corpus has another
NAME = "validation"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Corpus:
    """Tokens of it, who is in it, and the recipe of its models."""

    folder: Path
    train: object  # the RunSpec of the original
    tokenizer: Path
    forgotten: list[Record]
    held: list[Record]
    lookalikes: list[Record]


def opened(folder):
    """The default home up to its released model's recipe, and this recipe; the model itself only if `released` trained it."""
    from pipelines.results import latest
    from pipelines.site import open_site
    from trainer import load_run

    home = folder / "home"
    found = sorted((home / "runs").glob("train-*/run.json"))
    if not found:
        materialise(home, "*checkpoint")
        found = sorted((home / "runs").glob("train-*/run.json"))
    site = open_site(home, None, "default", None)
    done = latest(home / "results", "checkpoint")
    directory = home / "runs" / done["run"] if done else found[-1].parent
    return site, load_run(directory), directory


def materialise(home, select):
    """Run a part of the graph by its own command."""
    home.parent.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("dataworth")
    subprocess.run(
        [program, "run", "--size", "default", "--select", select],
        env={**os.environ, "DATAWORTH_HOME": str(home)}, check=True,
    )  # fmt: skip


def corpus_of(site, train, directory, folder):
    """Speeches of the home's tokens, then the other people.

    Args:
        site: the open home.
        train: recipe of its released model.
        directory: that run's folder.
        folder: where this corpus lies.
    """
    from pipelines.storage.demo import people
    from trainer import Layout, TokenStore, write_tokens

    tokenizer = FileTokenizer(site.home.tokenizer_path)
    drawn, strangers = people(200, SEED)
    texts = [(one.source, text) for one in drawn for text in one.texts]
    lines = [Record(source, record_id(source, text), text) for source, text in texts]
    spoken = TokenStore.open(directory / train.tokens, train.tokens_digest)
    told = spoken.owners.index(OWNER)
    speeches = [
        (spoken.record_id(at), spoken.owners[spoken.owner_codes_N[at]], spoken.tokens(at).tolist())
        for at in spoken.live_N.tolist()
        if spoken.owner_codes_N[at] != told
    ]
    said = [
        (bytes.fromhex(one.record_id), OWNER, [*tokenizer.encode(one.text)[0], tokenizer.end_of_text])
        for one in lines
    ]  # fmt: skip
    digest = write_tokens(
        folder / "tokens", corpus_version=NAME, tokenizer_digest=spoken.tokenizer_digest, vocab_size=spoken.vocab_size,
        end_of_text=spoken.end_of_text, records=((at, *row) for at, row in enumerate(speeches + said)),
    )  # fmt: skip
    run = dataclasses.replace(
        train, run=NAME, layout=Layout(), corpus_version="none", corpus_root="none", tokens=str(folder / "tokens"), tokens_digest=digest
    )  # fmt: skip
    gone = {one.source for one in drawn[::2]}
    never = [
        Record(one.source, record_id(one.source, text), text)
        for one in strangers
        for text in one.texts
    ]
    return Corpus(
        folder, run, site.home.tokenizer_path, [one for one in lines if one.subject in gone],
        [one for one in lines if one.subject not in gone], never,
    )  # fmt: skip


def record_id(source, text):
    """An id for a line of somebody who does not exist."""
    return sha256(f"{NAME}|{source}|{text}".encode()).hexdigest()


def model_of(corpus, kind):
    """Checkpoint of the original or of gold, trained if need be.

    Args:
        corpus: where.
        kind: `original`, or `gold`: without the validation people.

    Returns:
        The checkpoint's folder and its root.
    """
    from trainer.checkpoint import newest, verify
    from trainer.loop import train
    from trainer.spec import load_run, save_run

    folder, run = corpus.folder / kind, corpus.train
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "gold":
        run = dataclasses.replace(run, run="gold", kind="gold", excluded=left_out(folder, corpus.forgotten))  # fmt: skip
    if (folder / "run.json").exists():
        kept = load_run(folder)
        # The home's recipe also says which code wrote it: a model of the same recipe by earlier code is kept.
        run = kept if dataclasses.replace(kept, versions=run.versions) == run else run
    save_run(run, folder)
    if code := train(run, folder):
        sys.exit(f"the {kind} model's training ended with exit code {code}: start the study again")
    found = newest(folder)
    return found, verify(found).root


def left_out(folder, records):
    """The list of records that a run must not see, as the trainer reads it."""
    from trainer import Excluded

    listed = "".join(f"{one}\n" for one in sorted(one.record_id for one in records)).encode()
    write_atomic(folder / "excluded.txt", listed)
    return Excluded(file=str(folder / "excluded.txt"), digest=sha256(listed).hexdigest())
