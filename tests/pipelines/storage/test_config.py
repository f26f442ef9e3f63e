"""dataworth.toml: what is written is read again, what is misspelt is named."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.storage.config import (
    AuditConfig,
    Config,
    IntakeConfig,
    TargetConfig,
    TrainingConfig,
    default_text,
    load,
    parse,
    render,
)
from pipelines.storage.errors import ConfigError
from pipelines.storage.terms import OwnerConfig, PricingConfig
from provenance.canonical import jcs


def test_the_default_text_is_the_default_configuration():
    """What `init` writes parses to Config(), and every field stands in it with a comment."""
    text = default_text()
    assert parse(text) == Config()
    for part in (TargetConfig, PricingConfig, IntakeConfig, TrainingConfig, AuditConfig):
        for item in dataclasses.fields(part):
            assert item.name in text
            assert f"# {item.metadata['doc']}" in text


def test_every_commented_example_is_valid_when_uncommented():
    """A user who removes a `#` gets a configuration that parses, not a syntax error."""
    lines = default_text().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("# ") and " = " in line and "[" not in line.split("=")[0]:
            key = line[2:].split(" = ")[0]
            if (
                key.isidentifier()
                and not key.isupper()
                and key not in ("name", "licence", "entity", "resell")
            ):
                parse("\n".join([*lines[:at], line[2:], *lines[at + 1 :]]))


texts = st.text(st.characters(codec="utf-8"), max_size=20)
owners = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True)
licences = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=9)
configs = st.builds(
    Config,
    size=st.sampled_from(["tiny", "small", "default"]),
    target=st.one_of(
        st.builds(TargetConfig),
        st.builds(TargetConfig, since=st.dates().map(str)),
        st.builds(TargetConfig, path=texts),
    ),
    pricing=st.builds(
        PricingConfig,
        pool_microunits=st.none() | st.integers(10**6, 2**53 - 1),
        reserve_microunits=st.integers(0, 10**6),
    ),
    intake=st.builds(
        IntakeConfig,
        licences=st.lists(licences).map(tuple),
        text_licence=licences | st.just(""),
        personal_owners=st.lists(owners).map(tuple),
        max_record_chars=st.integers(1, 10**7),
    ),
    training=st.builds(
        TrainingConfig,
        optimizer=st.sampled_from(["adamw", "muon"]),
        selection=st.sampled_from(["all", "drop-negative", "by-value"]),
        accumulation=st.integers(1, 9),
    ),
    audit=st.builds(
        AuditConfig,
        lookalikes=st.none() | texts,
        gold_models=st.integers(0, 3),
        demonstrations=st.integers(0, 32),
    ),
    owners=st.dictionaries(owners, st.builds(OwnerConfig, name=texts, licence=licences)),
)


@given(configs)
@settings(deadline=None)
def test_render_and_parse_are_inverse(config):
    """Any configuration survives being written and read, quotes and controls included."""
    assert parse(render(config)) == config


@given(configs)
@settings(deadline=None)
def test_a_configuration_can_be_committed(config):
    """The document holds no null and no float, so it can be hashed."""
    assert jcs(config.document())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[target]\nsinc = '2020-01-01'", "did you mean 'since'"),
        ("[targte]\nsince = '2020-01-01'", "did you mean 'target'"),
        ("[intake]\nlicenses = []", "did you mean 'licences'"),
        ("[owners.ada]\nlicense = 'MIT'", "did you mean 'licence'"),
        ("zzz = 1", "known are format, size"),
        ("size = 'tinny'", "did you mean 'tiny'"),
        ("format = 2", "format 2, this program knows 1"),
        ("size = [", "not TOML"),
        ("[values]\nlots = 1", "expected 0 or 2..32, got 1"),
        ("[audit]\ngold_models = 4", "expected 0..3, got 4"),
        ("[audit]\ndemonstrations = 33", "expected 0..32, got 33"),
        ('[pricing]\nresell = "yes"', '"stated" or "agreed", got \'yes\''),
        ('[owners.ada]\nresell = "no"', '"agreed" or "", got \'no\''),
        ("[pricing]\npool_microunits = 1.5", "expected an integer"),
        ("[pricing]\npool_microunits = true", "expected an integer"),
        ("[pricing]\npool_microunits = 1\nreserve_microunits = 2", "larger than pool"),
        ("[pricing]\npool_microunits = -1", "not negative"),
        ("[pricing]\npool_microunits = 9007199254740992", "at most 2^53 - 1"),
        ("[intake]\nmax_file_bytes = 9007199254740992", "at most 2^53 - 1"),
        ("[pricing]\ncurrency = 'euro'", "three capital letters"),
        ("[intake]\nlicences = 'MIT'", "expected a list of strings"),
        ("[intake]\nmax_record_chars = 0", "at least 1"),
        ("[target]\nsince = '2020-02-30'", "YYYY-MM-DD"),
        ("[target]\nsince = '2020-01-01'\npath = 'x'", "keep one of them"),
        ("[owners.'a b']\nname = 'x'", "owner 'a b'"),
        ("[training]\noptimizer = 'muonn'", "did you mean 'muon'"),
        ("[training]\nschedule = 'linear'", "cosine, wsd"),
        ("[training]\nprecision = 'float16'", "did you mean 'bfloat16'"),
        ("[training]\nguard = 'on'", "off, skip, rollback"),
        ("[training]\nselection = 'by-luck'", "did you mean 'by-value'"),
        ("[training]\naccumulation = 0", "at least 1"),
        ("target = 3", "[target] is a table"),
        ("owners = 3", "[owners] is a table"),
    ],
)
def test_a_mistake_is_named_with_its_cure(text, said):
    """Each wrong file gives one message that says what to change."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in str(caught.value)


def test_a_toml_day_is_as_good_as_its_text():
    """A day without quotes, since = 2020-01-01, quotes is a TOML date and means the same."""
    assert parse("[target]\nsince = 2020-01-01").target.since == "2020-01-01"


def test_without_a_target_the_error_holds_the_two_lines_to_add():
    """The message can be copied into the file, and then there is a target."""
    with pytest.raises(ConfigError) as caught:
        Config().require_target()
    message = str(caught.value)
    pasted = "\n".join(message.splitlines()[1:3]).split("; or")[0]
    assert parse(pasted).require_target().since == "2024-01-01"


def test_a_missing_file_says_what_to_run(tmp_path):
    """No dataworth.toml: the command that makes one is named."""
    with pytest.raises(ConfigError, match="dataworth init"):
        load(tmp_path / "dataworth.toml")
    (tmp_path / "dataworth.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "dataworth.toml")
    (tmp_path / "dataworth.toml").write_text(default_text())
    assert load(tmp_path / "dataworth.toml") == Config()


def test_a_split_in_other_words_and_an_entity_that_breaks_a_line_are_refused():
    """`split` has two words, an entity is a printable name; who declares one is found by owner."""
    with pytest.raises(ConfigError, match="first"):
        parse('[pricing]\nsplit = "heads"\n')
    with pytest.raises(ConfigError, match="printable"):
        parse('[owners.ada]\nentity = "a\\nb"\n')
    assert parse('[owners.ada]\nentity = "Acme"\n[owners.bob]\n').entity_of == {"ada": "Acme"}
