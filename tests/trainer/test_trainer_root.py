"""Claims about proofs: one tensor is shown to be under a root without the others, and nothing else can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_corpus import make_run

from trainer.checkpoint import newest, read_tensors, verify
from trainer.errors import EXIT_REFUSED, AlteredCheckpointError, OtherModelError
from trainer.loop import fit
from trainer.root import check_proof, main, prove, tensor_bytes
from trainer.spec import save_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The checkpoint of a short run."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("root")
    run = make_run(home, steps=2, every=2)
    save_run(run, home / "r")
    assert fit(run, home / "r") == 0
    return newest(home / "r")


def test_every_tensor_is_proved_under_the_manifests_root(step):
    """Weights and moments alike; the proof has log2(n) hashes, and n is what the manifest says."""
    root, count = verify(step).root, verify(step).tensors
    tensors = dict(read_tensors(step))
    assert len(tensors) == count
    for name in [*list(tensors)[::7], "optim.step"]:
        proof, data = prove(step, name)
        assert data == tensor_bytes(tensors[name])
        check_proof(proof, root, data)
        check_proof(proof, root)
        assert (proof["root"], proof["size"]) == (root, count)
        assert len(proof["path"]) <= (count - 1).bit_length()


def test_nothing_else_is_proved(step):
    """Attacks: one bit of the tensor, another name, type, shape, leaf, path or root, fields too many or too few."""
    root = verify(step).root
    proof, data = prove(step, "model.norm.weight")
    other, _ = prove(step, "optim.step")
    flipped = bytearray(data)
    flipped[5] ^= 1
    swapped = "model.blocks.0.ffn_norm.weight"
    bad = [
        (proof, root, bytes(flipped)), (proof | {"name": swapped}, root, data), (proof | {"dtype": "int32"}, root, data),
        (proof | {"shape": [*proof["shape"], 1]}, root, data), (proof | {"leaf": other["leaf"]}, root, None),
        (proof | {"path": proof["path"][::-1]}, root, None), (proof | {"path": proof["path"][:-1]}, root, None),
        (proof | {"index": proof["index"] + 1}, root, None), (proof | {"size": 0}, root, None),
        (proof, "0" * 64, data), (proof | {"more": 1}, root, data), (proof | {"format": 2}, root, data),
        ({key: value for key, value in proof.items() if key != "path"}, root, data), (proof | {"path": 3}, root, None),
        (proof | {"leaf": "zz"}, root, None),
    ]  # fmt: skip
    for forged, trusted, content in bad:
        with pytest.raises(AlteredCheckpointError):
            check_proof(forged, trusted, content)
    with pytest.raises(OtherModelError, match="no tensor"):
        prove(step, "model.nothing")


def test_the_commands_prove_and_check(step, tmp_path, capsys):
    """`prove` prints the proof and writes the bytes; `check` says yes, or no with exit 3 in one line."""
    data, proof = tmp_path / "norm.bin", tmp_path / "proof.json"
    assert main(["prove", str(step), "model.norm.weight", "--bytes", str(data)]) == 0
    proof.write_text(capsys.readouterr().out)
    root = verify(step).root
    assert main(["check", str(proof), root, "--bytes", str(data)]) == 0
    assert "its bytes are under" in capsys.readouterr().out
    assert main(["check", str(proof), root]) == 0
    assert "the tensor of its leaf is under" in capsys.readouterr().out
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    for arguments in (
        ["check", str(proof), root, "--bytes", str(data)], ["check", str(proof), "1" * 64],
        ["check", str(tmp_path / "none"), root], ["prove", str(step), "model.nothing"],
        ["prove", str(tmp_path), "model.norm.weight"],
    ):  # fmt: skip
        assert main(arguments) == EXIT_REFUSED
        said = capsys.readouterr().err
        assert said.startswith("no: ")
        assert said.count("\n") == 1


def test_a_check_needs_no_torch(step, tmp_path):
    """Whoever checks a proof needs the standard library and provenance only."""
    proof, data = prove(step, "model.norm.weight")
    (tmp_path / "proof.json").write_text(json.dumps(proof))
    (tmp_path / "data").write_bytes(data)
    code = (
        "import sys; from trainer.root import main; code = main(sys.argv[1:]);"
        "print([m for m in ('torch', 'numpy') if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(tmp_path / "proof.json"), proof["root"], "--bytes", str(tmp_path / "data")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"
