"""The practice setting on a smoke scale: the study's own code path from texts to verdict, with models that learn in seconds."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from unlearning.answering import span
from unlearning.attacks.in_context import demonstrated
from unlearning.errors import PeopleError, PlanError
from unlearning.lume import read_lume
from unlearning.pilot.people import write_tokenizer
from unlearning.plan import AttackPlan
from unlearning.practice import published
from unlearning.practice.audits import audits_of, material_of
from unlearning.practice.benchmarks import Benchmarks
from unlearning.practice.cast import kind_of, make_cast
from unlearning.practice.forgetting import pushed_answers
from unlearning.practice.forgetting import run as forget
from unlearning.practice.models import prepare
from unlearning.practice.published import PUBLISHED, QUALITY, UTILITY, agreement
from unlearning.practice.scales import METHODS, PRACTICE, SMOKE
from unlearning.probes import FileTokenizer
from unlearning.tofu import read_tofu

WORDS = ("amber", "birch", "cedar", "dune", "elm", "fern", "grove", "heath", "iris", "jade", "kelp", "larch", "moss", "nettle", "oak", "pine", "quartz", "reed", "sage", "thyme")  # fmt: skip


def text(generator, count):
    """Some words."""
    return " ".join(generator.choice(WORDS, count))


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Folders in TOFU's and LUME's form."""
    folder, generator = tmp_path_factory.mktemp("sets"), np.random.default_rng(4)
    full = [
        {"author_id": a, "question": f"What of {WORDS[i]} {a} ?", "answer": text(generator, 4)}
        for a in range(200)
        for i in range(20)
    ]
    asked = [
        {k: v for k, v in r.items() if k != "author_id"}
        | {"paraphrased_question": f"Tell {r['question']}", "paraphrased_answer": text(generator, 4), "perturbed_answer": [text(generator, 4) for _ in range(5)]}
        for r in full
    ]  # fmt: skip
    real = [
        {"question": f"Which {w} ?", "answer": w, "perturbed_answer": ["amber one", "oak two", "elm three"]} for w in WORDS[:4]
    ]  # fmt: skip
    files = {
        "tofu_full.jsonl": full, "forget10_perturbed.json": asked[3600:], "retain_perturbed.json": asked[:400],
        "real_authors_perturbed.json": real, "world_facts_perturbed.json": real,
    }  # fmt: skip
    for name, rows in files.items():
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    for place, split in enumerate(("forget", "retain")):
        rows = []
        for task in (1, 2):
            for person in range(5):
                uuid = f"{task:08x}-0000-0000-0000-{place * 100 + person:012x}"
                common = {"task": f"Task{task}"}
                rows.append(common | {"id": f"{uuid}sc1", "input": f"{WORDS[person]} {split} lives", "output": text(generator, 4)})  # fmt: skip
                rows.append(common | {"id": f"{uuid}qa0", "input": f"What is the phone number of {WORDS[person]} {split}?", "output": text(generator, 2)})  # fmt: skip
        (folder / f"{split}_task12.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_tofu(folder), read_lume(folder)


@pytest.fixture(scope="module")
def made(sets, tmp_path_factory):
    """A study of the smoke scale."""
    cast = make_cast(*sets, SMOKE)
    folder = tmp_path_factory.mktemp("practice")
    everything = [q.text for own in cast.lines.values() for q in own]
    everything += [f"{q.prompt} {q.answer} {q.paraphrase} {' '.join(q.wrong)}" for own in (*cast.tofu.values(), cast.unseen) for q in own]  # fmt: skip
    write_tokenizer(folder / "words.json", everything)
    public = [text(np.random.default_rng(i), 60) for i in range(8)]
    return prepare(folder / "study", SMOKE, cast, public, folder / "words.json")


@pytest.fixture(scope="module")
def audits(made):
    """Its audits."""
    return audits_of(made, AttackPlan(fine_tune_lr="0.0003", fine_tune_steps=(10, 12)))


def test_nobody_stands_in_two_populations_and_the_forgotten_are_the_papers(sets):
    """At the practice scale's sizes: TOFU's forgotten authors are 180 to 199, no subject is in two populations, no look-alike is trained on."""
    tofu, lume = sets
    cast = make_cast(tofu, lume, dataclasses.replace(PRACTICE, lume=2))
    people = {p: {q.subject for q in own} for p, own in cast.lines.items()}
    assert {s for s in people["forgotten"] if kind_of(s) == "tofu"} == {
        f"tofu/{a}" for a in range(180, 200)
    }
    assert all(len(own) == 20 + 2 + 30 for own in people.values())
    assert len(set().union(*people.values())) == sum(map(len, people.values()))
    assert cast.validation <= people["retained"]
    assert {q.subject for q in cast.unseen} == people["forgotten"]
    hidden = {q.text for p in ("forgotten", "lookalike") for q in cast.lines[p]}
    assert not any(line in page.text for page in cast.pages for line in hidden)
    with pytest.raises(PeopleError, match="LUME"):
        make_cast(tofu, lume, PRACTICE)


def test_lines_before_a_question_are_divided_as_the_plan_says(made, monkeypatch):
    """A space where the plan has a space, a line break where it has one: tier 2 is that of every other audit."""
    monkeypatch.setattr(FileTokenizer, "encode", lambda _, text: ([ord(c) for c in text], [(n, n + 1) for n in range(len(text))]))  # fmt: skip
    for between, said in (("newline", "\n"), ("space", " ")):
        limits = AttackPlan(demonstrations=1, between=between, max_probe_tokens=4096)
        for probe in demonstrated(material_of(made, limits)):
            assert probe.line_tokens
            text = "".join(map(chr, probe.prompt_tokens))
            own = "".join(map(chr, probe.line_tokens[: -len(probe.secret_tokens)]))
            assert text.endswith(said + own)


def test_only_answers_are_pushed(made):
    """What a method pushes begins where the answer begins, and is the answer with the end of text."""
    tokenizer = FileTokenizer(made.folder / "tokenizer.json")
    pushed = pushed_answers(made.folder / "forgotten.jsonl", tokenizer, SMOKE.length)
    lines = made.cast.lines["forgotten"]
    assert len(pushed) == len(lines)
    for one, q in zip(pushed, lines, strict=True):
        assert one.tokens[one.first :] == (*tokenizer.encode(q.answer)[0], tokenizer.end_of_text)
        assert (list(one.tokens), one.first) == span(tokenizer, q.prompt, q.answer)


def test_a_method_without_an_original_or_with_unknown_settings_is_refused(made):
    """No method runs on random weights, and no setting is ignored."""
    keys = {"answers": "a", "tokenizer": "t", "method": "npo", "forget_records": 1}
    for extra, message in ((keys, "original"), (keys | {"beta": "1"}, "settings")):
        with pytest.raises(PlanError, match=message):
            forget(made.run_spec("x", steps=1, extra=extra), made.folder / "x")


def test_the_original_memorises_and_gold_does_not(made, audits):
    """The control that everything rests on: the original says forgotten people's answers word for word, of every kind, gold nobody's."""
    people = SMOKE.counts["forgotten"]
    given, asked = audits.rate_of("original", "direct")
    assert asked == people
    assert given >= 0.7 * people
    for kind, most in (("tofu", 3), ("lume", 2), ("ours", 2)):
        count, of = audits.rate_of("original", "direct", kind)
        assert of == most
        assert count >= 1
    assert [audits.rate_of(gold, "direct")[0] for gold in audits.golds] == [0, 0]
    ids = {line.strip() for line in (made.folder / "forgotten.txt").read_text().split()}
    assert ids == {q.record_id for q in made.cast.lines["forgotten"]}


def test_published_numbers_are_those_of_the_plain_formulas(made, audits):
    """Forget quality, truth ratio and utility of the study against the formulas written out, from the kept answers; gold is like gold."""
    benchmarks = Benchmarks(audits)
    answers = {name: benchmarks.answers(name) for name in ("original", "gold-1", "gold-2")}

    def ratios(name):
        rows = answers[name]["forget10"].values()
        return np.array(
            [
                np.exp(np.mean([-w for w in a.wrong_losses])) / np.exp(-a.paraphrase_loss)
                for a in rows
            ]
        )

    found = benchmarks.summary("original")
    plain = [stats.ks_2samp(ratios("original"), ratios(gold)) for gold in audits.golds]
    assert found.forget_quality == pytest.approx(
        np.median([one.pvalue for one in plain]), abs=1e-10
    )
    assert found.distance == pytest.approx(np.median([one.statistic for one in plain]), abs=1e-10)
    assert found.forget_truth_ratio == pytest.approx(np.mean(np.minimum(ratios("original"), 1 / ratios("original"))), abs=1e-10)  # fmt: skip
    kept = answers["original"]["retain"].values()
    assert found.parts["retain/rouge"] == pytest.approx(np.mean([a.rouge for a in kept]))
    assert found.forget_rouge[0] > benchmarks.summary("gold-1").forget_rouge[0]
    assert found.forget_exact > 0.5


def test_a_method_runs_and_its_audit_is_a_verdict(made, audits):
    """One rate for all methods is chosen on people who stay; the method's model is audited by the ordinary rule."""
    verdict = audits.audit("npo")
    note = json.loads((made.folder / "rate.json").read_text())
    assert note["rate"] in SMOKE.rates
    assert set(note["rows"]) == {f"npo rate={rate}" for rate in SMOKE.rates}
    assert {end.name for end in verdict.endpoints} == {
        "direct",
        "in_context",
        "fine_tune",
        "membership",
        "utility",
    }
    assert verdict.endpoints[0].people == SMOKE.counts["forgotten"]
    retained = {
        q.record_id for q in made.cast.lines["retained"] if q.subject in made.cast.validation
    }
    left_out = set((made.folder / "validation.txt").read_text().split())
    assert retained < left_out
    before = (made.folder / "npo" / "done").stat().st_mtime_ns
    made.unlearned("npo")
    assert (made.folder / "npo" / "done").stat().st_mtime_ns == before  # nothing is made twice


def test_agreement_is_spearmans_rho_with_the_exact_p_value():
    """Against scipy's coefficients; five methods in the same order: p = 1/120, one neighbouring pair exchanged: rho 0.9, p = 5/120."""
    theirs = PUBLISHED["Llama-2-7b-chat"][QUALITY]
    assert set(theirs) == set(METHODS) == set(PUBLISHED["Llama-3.2-1B-Instruct"][UTILITY])
    same = agreement(theirs, theirs)
    assert (same.methods, same.spearman, same.kendall) == (5, pytest.approx(1), pytest.approx(1))
    assert same.p_value == pytest.approx(1 / 120)
    exchanged = theirs | {"npo": theirs["dpo"], "dpo": theirs["npo"]}
    found = agreement(exchanged, theirs)
    assert found.spearman == pytest.approx(0.9)
    assert found.p_value == pytest.approx(5 / 120)
    generator = np.random.default_rng(7)
    for _ in range(20):
        ours = dict(zip(METHODS, generator.integers(0, 4, 5).tolist(), strict=True))
        if len(set(ours.values())) > 1:
            expected = stats.spearmanr([ours[m] for m in METHODS], [theirs[m] for m in METHODS])
            assert agreement(ours, theirs).spearman == pytest.approx(expected.statistic)
    assert agreement(dict.fromkeys(METHODS, 0.0), theirs).p_value == 1.0
    with pytest.raises(ValueError, match="three to eight"):
        agreement({"npo": 1.0}, theirs)
    assert published.__doc__
    assert "repro.md" in published.__doc__
