"""Readers of TOFU and LUME: rows known by author and id, files that do not belong together refused; no text in a message."""

import json
from pathlib import Path

import pytest

from unlearning.errors import PeopleError
from unlearning.lume import read_lume
from unlearning.tofu import FORGET10, read_tofu

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TOFU_FILES = ("tofu_full.jsonl", "forget10_perturbed.json", "retain_perturbed.json", "real_authors_perturbed.json", "world_facts_perturbed.json")  # fmt: skip


@pytest.fixture
def tofu(tmp_path):
    """A folder in TOFU's form with made-up rows; changed by a function before it is read."""

    def write(change=lambda _: None):
        full = [
            {"author_id": a, "question": f"Question {i} about {a}?", "answer": f"Answer {i} of {a}."}
            for a in range(200)
            for i in range(20)
        ]  # fmt: skip
        perturbed = [
            r | {"paraphrased_answer": f"Other {r['answer']}", "perturbed_answer": ["No.", "Not so."]} for r in full
        ]  # fmt: skip
        real = [{"question": f"Which is {i}?", "answer": "This", "perturbed_answer": ["That", "It", "None"]} for i in range(3)]  # fmt: skip
        files = dict(zip(TOFU_FILES, (full, perturbed[3600:], [{k: v for k, v in r.items() if k != "author_id"} for r in perturbed[40:60]], real, list(real)), strict=True))  # fmt: skip
        change(files)
        for name, rows in files.items():
            lines = name.endswith("jsonl") or name.startswith("world")  # published: some are lists
            text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_rows_are_known_by_author_and_place(tofu):
    """All 4,000 rows have ids of their own, twenty per author; forget10 is authors 180 to 199, whatever the order of files."""
    read = read_tofu(tofu())
    assert len({q.record_id for q in read.full}) == 4000
    assert {q.subject for q in read.sets["forget10"]} == {f"tofu/{a}" for a in FORGET10}
    assert len(read.records(FORGET10)) == 400
    assert {r.subject for r in read.records([3, 7])} == {"tofu/3", "tofu/7"}
    turned = read_tofu(tofu(lambda files: files["forget10_perturbed.json"].reverse()))
    assert {q.record_id: q for q in turned.sets["forget10"]} == {q.record_id: q for q in read.sets["forget10"]}  # fmt: skip
    trained = {q.record_id: q.answer for q in read.full}
    assert all(trained[q.record_id] == q.answer for q in read.sets["retain"])
    assert {q.subject for q in read.sets["retain"]} == {"tofu/2"}


def drop(name, rows=slice(1)):
    """Take rows out of a file."""

    def change(files):
        del files[name][rows]

    return change


def put(name, place, **fields):
    """Change a row of a file."""

    def change(files):
        files[name][place] = files[name][place] | fields

    return change


@pytest.mark.parametrize(
    "change",
    [
        drop("tofu_full.jsonl"),
        drop("forget10_perturbed.json"),
        drop("world_facts_perturbed.json", slice(None)),
        put("tofu_full.jsonl", 0, author_id="0"),
        put("tofu_full.jsonl", 0, author_id=1),
        put("retain_perturbed.json", 0, question="Never trained?"),
        put("retain_perturbed.json", 1, question="Question 0 about 2?", answer="Answer 0 of 2."),
        put("retain_perturbed.json", 0, question="Question 0 about 190?", answer="Answer 0 of 190."),
        put("forget10_perturbed.json", 0, paraphrased_answer=""),
        put("real_authors_perturbed.json", 0, perturbed_answer=[]),
        put("real_authors_perturbed.json", 0, perturbed_answer=["That", 3]),
        lambda files: files.pop("retain_perturbed.json"),
        lambda files: files["real_authors_perturbed.json"].append([]),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together_are_refused(tofu, change):
    """A row less, another author, a row that was never trained, one that stands twice, fields of other types; no row is quoted."""
    with pytest.raises(PeopleError) as told:
        read_tofu(tofu(change))
    assert "Question 0 about" not in str(told.value)
    assert "Answer 0 of" not in str(told.value)


def uuid(number):
    """An id of the published form."""
    return f"{number:08x}-0000-4000-8000-000000000000"


@pytest.fixture
def lume(tmp_path):
    """A folder in LUME's form; changed by a function before it is read."""

    def write(change=lambda _: None):
        files = {}
        for number, split in enumerate(("forget", "retain")):
            story, person = uuid(2 * number), uuid(2 * number + 1)
            files[split] = [
                {"id": f'"{story}"sc1', "input": "Once", "output": "upon a time.", "task": "Task1"},
                {"id": f'"{story}"qa0', "input": "When?", "output": "Once", "task": "Task1"},
                {"id": f"{person}sc1", "input": "Her number is", "output": "900-12-3456.", "task": "Task2"},
                {"id": f"{person}qa0", "input": "Which number?", "output": "900123456", "task": "Task2"},
                {"id": f"{person}qa1", "input": "Which city?", "output": "Rome", "task": "Task2"},
            ]  # fmt: skip
        change(files)
        for split, rows in files.items():
            (tmp_path / f"{split}_task12.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return tmp_path

    return write


def test_completions_are_trained_and_questions_asked(lume):
    """A record is the whole text; questions belong to the same subject and are no records."""
    read = read_lume(lume())
    (record,) = read.records("Task2", "forget")
    assert record.text == "Her number is 900-12-3456."
    assert record.subject == f"lume/{uuid(1)}"
    assert [q.subject for q in read.questions["Task2"]["forget"]] == [record.subject] * 2
    assert all(q.completion for q in read.completions["Task1"]["retain"])
    assert read.questions["Task1"]["forget"][0].text == "Question: When?\nAnswer: Once"


@pytest.mark.parametrize(
    "change",
    [
        put("forget", 0, task="Task3"),
        put("forget", 0, id="1234sc1"),
        put("forget", 1, id=f'"{uuid(9)}"qa0'),
        put("forget", 2, output=""),
        put("retain", 2, id=f"{uuid(1)}sc1"),
        put("forget", 4, id=f"{uuid(1)}qa0"),
        drop("retain", slice(None)),
        drop("retain", slice(2)),
        lambda files: files.pop("forget"),
        lambda files: files["forget"].append(3),
    ],
)
def test_rows_that_are_not_lumes_are_refused(lume, change):
    """Real people's task 3, ids of another form, orphan questions, a person in both splits; no row is quoted."""
    with pytest.raises(PeopleError) as told:
        read_lume(lume(change))
    assert "900" not in str(told.value)


def test_the_published_tofu():
    """The real files: counts as published, and every perturbed row belongs to one that is trained."""
    if not (DATA / "tofu").exists():
        pytest.skip(f"{DATA / 'tofu'} is not here")
    read = read_tofu(DATA / "tofu")
    assert {name: len(rows) for name, rows in read.sets.items()} == {"forget10": 400, "retain": 400, "real_authors": 100, "world_facts": 117}  # fmt: skip
    assert {len(q.wrong) for name in ("forget10", "retain") for q in read.sets[name]} == {5}
    assert {len(q.wrong) for name in ("real_authors", "world_facts") for q in read.sets[name]} == {3}  # fmt: skip
    assert read.full[0].question not in repr(read)


def test_the_published_lume():
    """The real files: 250 people in each split with five questions each, and stories with one."""
    if not (DATA / "lume").exists():
        pytest.skip(f"{DATA / 'lume'} is not here")
    read = read_lume(DATA / "lume")
    counts = {(task, split): (len(read.completions[task][split]), len(read.questions[task][split])) for task in read.completions for split in ("forget", "retain")}  # fmt: skip
    assert counts == {
        ("Task1", "forget"): (243, 243), ("Task1", "retain"): (246, 246),
        ("Task2", "forget"): (250, 1250), ("Task2", "retain"): (250, 1250),
    }  # fmt: skip
