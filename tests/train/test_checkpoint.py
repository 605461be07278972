"""Checkpoints on disk: whole or not there, without pickles; what they say of their training, and what is refused."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import RunFolderError, WorkloadError
from harness.plan.cell import Cell
from harness.train import checkpoint
from harness.train.checkpoint import State, Trained, cell_of, check_code, own_code, trained_facts, trained_of


def state(number: float) -> State:
    tied = torch.full((4, 2), number)
    model = {"weight": tied, "tied.weight": tied, "steps": torch.tensor(3), "view": tied.t()}
    return State(model, {"weight/momentum_buffer": tied + 1}, {"rank0.cpu": torch.get_rng_state()}, {"a": [1, None]})


def test_a_checkpoint_of_safetensors_and_json_reads_back(tmp_path: Path) -> None:
    here = checkpoint.write(tmp_path, 2, state(0.5), {"rows": [{"loss": 0.1}]})
    back = checkpoint.read(tmp_path, 2)
    assert back is not None
    for name, tensor in state(0.5).model.items():
        assert torch.equal(back.model[name], tensor)
    assert torch.equal(back.optimizer["weight/momentum_buffer"], torch.full((4, 2), 1.5))
    assert torch.equal(back.rng["rank0.cpu"], torch.get_rng_state())
    assert back.values == {"a": [1, None], "rows": [{"loss": 0.1}]}
    tensors = {f"{name}.safetensors" for name in ("model", "optimizer", "rng")}
    assert {path.name for path in here.iterdir()} == {*tensors, "state.json"}
    json.loads((here / "state.json").read_text())


def test_the_newest_two_stay(tmp_path: Path) -> None:
    for epoch in (1, 2, 9, 10):
        checkpoint.write(tmp_path, epoch, state(float(epoch)), {})
    assert checkpoint.epochs(tmp_path) == [10, 9] and checkpoint.epochs(tmp_path / "none") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-10", "epoch-9"]


def test_a_torn_checkpoint_does_not_count_and_is_written_anew(tmp_path: Path) -> None:
    for epoch in (1, 2):
        checkpoint.write(tmp_path, epoch, state(float(epoch)), {})
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.epochs(tmp_path) == [2, 1]
    for part in ("model.safetensors", "state.json"):
        path = tmp_path / "epoch-2" / part
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert checkpoint.read(tmp_path, 2) is None
        path.write_bytes(whole)
    assert checkpoint.read(tmp_path, 2) is not None
    for text in ("[]", "1", "[" * 100_000):
        (tmp_path / "epoch-2" / "state.json").write_text(text)
        assert checkpoint.read(tmp_path, 2) is None
    assert checkpoint.read(tmp_path, 1) is not None
    (tmp_path / "epoch-2" / "rng.safetensors").unlink()
    assert checkpoint.read(tmp_path, 2) is None
    checkpoint.write(tmp_path, 2, state(4.0), {})
    assert not (tmp_path / "partial").exists()
    back = checkpoint.read(tmp_path, 2)
    assert back is not None
    assert float(back.model["weight"][0, 0]) == 4.0


CELL = Cell("mlp", "digits", "small", "ddp", "cpu", 8, 1, "strong", 8, 64, workload_options={"sizes": (1, 2)})
FACTS = trained_facts(CELL, 3)


def trained_by(workload: str) -> Trained:
    return trained_of({"trained": trained_facts(replace(CELL, workload=workload), 0)}, "here")


MODULES = {"own_net": "import own_net.layers", "own_net.layers": "", "own_parts": "", "own_file": "import own_parts"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package that re-exports its class, and a module that imports another, all loaded."""
    (tmp_path / "own_net").mkdir()
    (tmp_path / "own_net" / "__init__.py").write_text("from own_net.layers import Mine\n")
    (tmp_path / "own_net" / "layers.py").write_text("class Mine: ...\n")
    (tmp_path / "own_parts.py").write_text("WIDTH = 8\n")
    (tmp_path / "own_file.py").write_text("import own_parts\nimport own_net\n")
    (tmp_path / "own_unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_file")
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_modules_that_were_imported_from_its_folder_are_compared(home: Path) -> None:
    assert own_code("own_file").keys() == MODULES.keys()
    trained = trained_by("own_file:Mine")
    without = trained.model_copy(update={"code": {"own_parts": own_code("own_file")["own_parts"]}})
    with pytest.raises(WorkloadError, match=r"own_file.py: is not the code"):
        check_code(without, home / "own.yaml")
    check_code(trained, home / "own.yaml")
    (home / "own_unused.py").write_text("changed = True\n")
    check_code(trained, home / "own.yaml")
    (home / "own_parts.py").write_text("WIDTH = 9\n")
    with pytest.raises(WorkloadError, match=r"own_parts.py: is not the code that the checkpoint was trained with"):
        check_code(trained, home / "own.yaml")
    (home / "own_parts.py").unlink()
    with pytest.raises(WorkloadError, match=r"the module own_parts, which the checkpoint .* is not beside it"):
        check_code(trained, home / "own.yaml")


def test_of_an_installed_package_its_own_modules_are_compared(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.train.checkpoint.INSTALLED", (home.name,))
    assert own_code("own_net").keys() == {"own_net", "own_net.layers"}


def test_a_class_may_be_named_where_it_is_re_exported(home: Path) -> None:
    trained = trained_by("own_net:Mine")
    check_code(trained, home / "own.yaml")
    (home / "own_net" / "layers.py").write_text("class Mine: changed = True\n")
    with pytest.raises(WorkloadError, match=r"layers.py: is not the code"):
        check_code(trained, home / "own.yaml")


@pytest.mark.parametrize(("devices", "batch", "accumulation", "part"), [(8, 64, 1, 8), (8, 64, 2, 4), (2, 5, 1, 3)])
def test_a_device_has_no_more_samples_than_in_training(devices: int, batch: int, accumulation: int, part: int) -> None:
    options = {"accumulation": accumulation}
    cell = replace(CELL, devices=devices, global_batch_size=batch, per_device_batch_size=None, training=options)
    found = cell_of(trained_of({"trained": trained_facts(cell, 3)}, "here"), "cpu")
    assert (found.devices, found.global_batch_size, found.per_device_batch_size) == (1, part, part)
    assert (found.workload, found.data, found.model, found.precision) == ("mlp", "digits", "small", "fp32")
    assert list(found.workload_options.items()) == [("sizes", (1, 2))]


@pytest.mark.parametrize(
    ("facts", "place"),
    [
        ([], "trained: "),
        ({name: value for name, value in FACTS.items() if name != "workload"}, "trained.workload: "),
        ({**FACTS, "workload_options": ["download"]}, "trained.workload_options: "),
        ({**FACTS, "global_batch_size": 0}, "trained.global_batch_size: "),
        ({**FACTS, "precision": "fp4"}, "trained.precision: "),
        ({**FACTS, "seed": "1"}, "trained.seed: "),
        ({**FACTS, "code": {"a": 1}}, "trained.code"),
    ],
)
def test_what_is_not_as_it_was_written_is_bad_input(facts: Any, place: str) -> None:
    with pytest.raises(RunFolderError, match=f"^here: state.json is not as it was written: {place}"):
        trained_of({"trained": facts}, "here")
