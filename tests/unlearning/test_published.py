"""TOFU's and LUME's aggregates against plain re-implementations of the published formulas on the same logits."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hmean, ks_2samp

from trainer.generate import generate
from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from unlearning import utility
from unlearning.answering import Answered, Question, answered, span, spoken, words_of
from unlearning.errors import ProbeError, RowsError
from unlearning.pilot.people import write_tokenizer
from unlearning.probes import FileTokenizer

WORDS = ("who", "wrote", "the", "red", "book", "anna", "ford", "ben", "holt", "in", "paris", "rome", "a", "poem")  # fmt: skip
SETS = ("forget10", "retain", "real_authors", "world_facts")


def some_questions(name, count, wrong):
    """Questions of random words; on kept sets of real facts there is no paraphrase."""
    generator = np.random.default_rng([len(name), count])

    def text(most):
        return " ".join(generator.choice(WORDS, generator.integers(2, most)))

    return [
        Question(
            f"{name}/{i}", name, text(7), text(9), text(9) if wrong == 5 else "", tuple(text(9) for _ in range(wrong))
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token per word."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    write_tokenizer(path, [" ".join(WORDS), "Question:\nAnswer:"])
    return FileTokenizer(path)


@pytest.fixture(scope="module")
def models(tokenizer):
    """Two models in float64 that know nothing, with logits far apart."""
    spec = ModelSpec(vocab_size=tokenizer.vocab_size, num_layers=2, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=32)  # fmt: skip
    made = []
    for seed in (3, 5):
        model = Transformer(spec)
        init_parameters(model, seed)
        with torch.no_grad():
            for matrix in model.parameters():
                if matrix.ndim == 2:
                    matrix.mul_(4)
        made.append(model.double().eval())
    return made


@pytest.fixture(scope="module")
def questions(models, tokenizer):
    """The four sets; every third answer begins with what the first model says, so that no ROUGE is 0 altogether."""
    made = {name: some_questions(name, 23 + i, 5 if i < 2 else 3) for i, name in enumerate(SETS)}
    for asked in made.values():
        for i, said in enumerate(spoken(models[0], tokenizer, asked)):
            if i % 2 == 0 and said:
                asked[i] = dataclasses.replace(asked[i], answer=" ".join([*said[:2], "anna"]))
    return made


def plain(model, tokenizer, question):
    """Losses from the model's logits one line at a time, and ROUGE-L by the textbook table."""

    def loss(answer):
        prompt = f"Question: {question.question}\nAnswer:"
        first = len(tokenizer.encode(prompt)[0])
        tokens = [*tokenizer.encode(f"{prompt} {answer}")[0], tokenizer.end_of_text]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]))[0].numpy()
        total = 0.0
        for t in range(first, len(tokens)):
            row = logits[t - 1]
            top = row.max()
            total -= row[tokens[t]] - top - math.log(np.exp(row - top).sum())
        return total / (len(tokens) - first), len(tokens) - first

    own, length = loss(question.answer)
    tokens, first = span(tokenizer, f"Question: {question.question}\nAnswer:", question.answer)
    (said,) = generate(model, [tokens[:first]], length + 8, tokenizer.end_of_text)
    a, b = question.answer.split(), tokenizer.decode(said).split()
    b = [w for w in b if w.isalnum()]
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i, j] = (
                table[i - 1, j - 1] + 1
                if a[i - 1] == b[j - 1]
                else max(table[i - 1, j], table[i, j - 1])
            )
    return {
        "gt": own, "para": loss(question.paraphrase or question.answer)[0],
        "perturb": [loss(w)[0] for w in question.wrong], "rouge": table[-1, -1] / len(a),
    }  # fmt: skip


def published(sets, forget, gold):
    """`aggregate_eval_stat.py` of locuslab/tofu, re-written: arrays over records, KS test, harmonic mean."""

    def ratio(rows):
        para = np.array([r["para"] for r in rows])
        return np.exp(np.array([r["perturb"] for r in rows]).mean(-1) - para)

    nine = []
    for name in SETS[1:]:
        rows = sets[name]
        true = np.exp(-np.array([r["gt"] for r in rows]))
        if name != "retain":
            false = np.exp(-np.array([r["perturb"] for r in rows]))
            true = true / np.concatenate([true[:, None], false], 1).sum(-1)
        nine += [true.mean(), np.mean([r["rouge"] for r in rows]), np.maximum(0, 1 - 1 / ratio(rows)).mean()]  # fmt: skip
    of_forget = np.minimum(ratio(forget), 1 / ratio(forget)).mean()
    test = ks_2samp(ratio(forget), ratio(gold))
    return nine, hmean(nine), of_forget, test


def test_our_numbers_on_the_same_logits_are_the_published_ones(models, tokenizer, questions):
    """Nine numbers, model utility, truth ratio and forget quality agree with the plain formulas to 1e-10."""
    unlearned, gold = models
    ours = {name: answered(unlearned, tokenizer, questions[name]) for name in SETS}
    theirs = {name: [plain(unlearned, tokenizer, q) for q in questions[name]] for name in SETS}
    of_gold = answered(gold, tokenizer, questions["forget10"])
    plain_gold = [plain(gold, tokenizer, q) for q in questions["forget10"]]
    nine, harmonic, of_forget, test = published(theirs, theirs["forget10"], plain_gold)
    found = utility.model_utility({name: ours[name] for name in SETS[1:]})
    assert np.abs(np.array(list(found.parts.values())) - nine).max() < 1e-10
    assert min(nine) > 0
    assert abs(found.utility - harmonic) < 1e-10
    assert abs(utility.truth_ratio(ours["forget10"], forgotten=True) - of_forget) < 1e-10
    quality = utility.forget_quality(ours["forget10"], of_gold)
    assert abs(quality.d - test.statistic) < 1e-10
    assert abs(quality.p_value - test.pvalue) < 1e-10
    assert quality.p_value < 1.0  # or the test would say nothing


def test_the_papers_truth_ratio_is_the_arithmetic_mean(models, tokenizer, questions):
    """Equation 1 of the paper, mean of probabilities, to 1e-10; it is never below the geometric one."""
    ours = answered(models[0], tokenizer, questions["forget10"])
    arithmetic = utility.log_truth_ratios(ours, "arithmetic")
    geometric = utility.log_truth_ratios(ours)
    for q in questions["forget10"]:
        row = plain(models[0], tokenizer, q)
        ratio = np.mean([math.exp(-w) for w in row["perturb"]]) / math.exp(-row["para"])
        assert abs(arithmetic[q.record_id] - math.log(ratio)) < 1e-10
        assert arithmetic[q.record_id] >= geometric[q.record_id] - 1e-12


def test_answers_do_not_depend_on_what_else_is_asked(models, tokenizer, questions):
    """Batches change nothing: each question alone gives what all together give, whatever the order."""
    chosen = questions["retain"][:7]
    together = answered(models[0], tokenizer, chosen[::-1])
    for q in chosen:
        alone = dataclasses.astuple(answered(models[0], tokenizer, [q])[q.record_id])
        assert np.allclose(np.hstack(alone), np.hstack(dataclasses.astuple(together[q.record_id])), atol=1e-12)  # fmt: skip


def test_a_model_that_says_the_answer_is_exact(models, tokenizer, questions):
    """What the model says by itself is, as an answer, exact with ROUGE 1; another first word is not."""
    several = [dataclasses.replace(q, record_id="a") for q in questions["retain"]]
    asked, said = next(
        (q, words) for q, words in zip(several, spoken(models[0], tokenizer, several), strict=True) if len(words) > 2
    )  # fmt: skip
    right = dataclasses.replace(asked, answer=" ".join(said[:3]))
    found = answered(models[0], tokenizer, [right])["a"]
    assert (found.exact, found.rouge) == (1.0, 1.0)
    other = next(w for w in WORDS if w != said[0])
    wrong = dataclasses.replace(asked, answer=" ".join([other, *said[1:3]]))
    assert answered(models[0], tokenizer, [wrong])["a"].exact == 0.0


def test_a_completion_is_asked_without_the_form_of_a_question(tokenizer):
    """The prompt of a completion is the text's beginning; its answer is what stands behind it."""
    asked = Question("a", "a", "anna ford wrote", "the red book", completion=True)
    tokens, first = span(tokenizer, asked.prompt, asked.answer)
    assert tokenizer.decode(tokens[:first]) == "anna ford wrote"
    assert tokenizer.decode(tokens[first:]) == "the red book"
    assert asked.text == "anna ford wrote the red book"


def test_questions_that_cannot_be_told_apart_are_refused(models, tokenizer):
    """The same id twice, an answer without a word or without a token: errors, not positions."""
    asked = Question("a", "a", "who", "anna")
    for bad in ([asked, asked], [dataclasses.replace(asked, answer=".")], [dataclasses.replace(asked, answer="")]):  # fmt: skip
        with pytest.raises(ProbeError):
            answered(models[0], tokenizer, bad)


LOSSES = st.floats(0.0, 60.0)
ROW = st.builds(Answered, LOSSES, LOSSES, st.lists(LOSSES, min_size=3, max_size=3).map(tuple), st.floats(0, 1), st.sampled_from([0.0, 1.0]))  # fmt: skip
ANSWERS = st.dictionaries(st.text("abc", min_size=1), ROW, min_size=1, max_size=6)


@given(ANSWERS, st.floats(-5, 5))
def test_truth_ratios_do_not_see_a_shift_of_all_losses(answers, shift):
    """A model that finds all answers equally less likely keeps its truth ratios and option probabilities."""
    moved = {
        n: dataclasses.replace(
            a, loss=a.loss + shift, paraphrase_loss=a.paraphrase_loss + shift, wrong_losses=tuple(w + shift for w in a.wrong_losses)
        )
        for n, a in answers.items()
    }  # fmt: skip
    for forgotten in (True, False):
        for mean in ("geometric", "arithmetic"):
            before = utility.truth_ratio(answers, forgotten=forgotten, mean=mean)
            assert 0.0 <= before <= 1.0
            assert math.isclose(before, utility.truth_ratio(moved, forgotten=forgotten, mean=mean), abs_tol=1e-9)  # fmt: skip
    assert math.isclose(utility.option_probability(answers), utility.option_probability(moved), abs_tol=1e-9)  # fmt: skip


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1), min_size=1, max_size=9))
def test_a_harmonic_mean_is_no_more_than_the_smallest_times_the_count(values):
    """Bounds of a harmonic mean; one zero makes it zero, as in scipy."""
    found = utility.harmonic(values)
    assert found <= max(values) * (1 + 1e-12)
    assert found <= len(values) * min(values) * (1 + 1e-12)
    assert math.isclose(found, float(hmean(values)), abs_tol=1e-12)


def test_records_are_matched_by_id(models, tokenizer, questions):
    """Forget quality does not depend on the order of records, and refuses other records."""
    ours = answered(models[0], tokenizer, questions["forget10"])
    gold = answered(models[1], tokenizer, questions["forget10"])
    turned = dict(reversed(gold.items()))
    assert utility.forget_quality(ours, turned) == utility.forget_quality(ours, gold)
    assert utility.forget_quality(gold, gold).p_value == 1.0
    with pytest.raises(RowsError, match="same records"):
        utility.forget_quality(ours, dict(list(gold.items())[1:]))


def splits(forget, retain):
    """Both splits of one task with that ROUGE and exactness."""
    row = Answered(1.0, 1.0, (), 0.0, 0.0)
    return {
        "forget": {"a": dataclasses.replace(row, rouge=forget, exact=forget)},
        "retain": {"b": dataclasses.replace(row, rouge=retain, exact=retain)},
    }


def test_lumes_score_is_the_harmonic_mean_with_forgotten_numbers_turned_round():
    """By hand: forget 0.25 → 0.75, retain 0.5, AUC 0.6 → 0.8, MMLU 0.4."""
    given_sets = {"Task1": splits(0.25, 0.5), "Task2": splits(0.25, 0.5)}
    found = utility.lume_score(given_sets, given_sets, 0.6, 0.4)
    by_hand = [0.75, 0.5] * 4 + [0.8, 0.4]
    assert math.isclose(found.score, float(hmean(by_hand)), rel_tol=1e-12)
    assert sorted(found.parts.values()) == pytest.approx(sorted(by_hand))
    assert utility.lume_score(given_sets, given_sets, 0.6).score == pytest.approx(float(hmean(by_hand[:-1])))  # fmt: skip
    assert utility.lume_score(given_sets, given_sets, 0.4).parts == pytest.approx(
        utility.lume_score(given_sets, given_sets, 0.6).parts
    )


def test_one_useless_part_makes_lumes_score_zero():
    """Membership told perfectly, or a forgotten set still known by heart: 0."""
    good, known = {"Task1": splits(0.0, 1.0)}, {"Task1": splits(1.0, 1.0)}
    assert utility.lume_score(good, good, 0.5).score == 1.0
    assert utility.lume_score(good, good, 1.0).score == 0.0
    assert utility.lume_score(known, good, 0.5).score == 0.0


def test_sets_that_do_not_fit_are_refused():
    """Missing sets, empty ones, rows without wrong answers, numbers outside their range."""
    row = {"a": Answered(1.0, 1.0, (), 0.0, 0.0)}
    task = {"Task1": splits(0.1, 0.9)}
    for work in (
        lambda: utility.model_utility({"retain": row}),
        lambda: utility.model_utility({"retain": {}, "real_authors": row, "world_facts": row}),
        lambda: utility.option_probability(row),
        lambda: utility.log_truth_ratios(row, "harmonic"),
        lambda: utility.lume_score(task, {"Task2": task["Task1"]}, 0.5),
        lambda: utility.lume_score({}, {}, 0.5),
        lambda: utility.lume_score(task, task, 1.5),
        lambda: utility.lume_score({"Task1": {"forget": row}}, task, 0.5),
        lambda: utility.harmonic([]),
        lambda: utility.harmonic([1.0, -0.1]),
    ):
        with pytest.raises(RowsError):
            work()


def test_words_are_lower_case_letters_and_digits():
    """ROUGE's tokens without stemming."""
    assert words_of("Anna's 1st Book, (Rome).") == ["anna", "s", "1st", "book", "rome"]
