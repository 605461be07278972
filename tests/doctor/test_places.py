"""The place in the user's code that a finding is about."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.config.doctor_checks import LOOKS_AT
from harness.doctor import state
from harness.doctor.examine import CHECKS, PLACED, Method, examine, methods_of, place_of
from harness.doctor.subject import Case, FewBuilds
from harness.train import workloads
from tests.doctor import faulty_steps as faulty
from tests.doctor.healthy import CLASSES, Healthy, Net
from tests.doctor.ranks import cell_for, subject_of

pytestmark = pytest.mark.usefixtures("no_timed_checks")


def methods(workload: Any) -> dict[str, Method]:
    few = FewBuilds(workload)
    few.build_model()
    return methods_of(few)


def test_each_method_is_found_where_it_is_defined() -> None:
    found = methods(faulty.MeanOfWeightOne()).items()
    assert methods(faulty.SetsOnRankOne())["forward of last"].name == "SetsOnRankOne.Head.forward"
    names = {"build_model": "Healthy.build_model", "datasets": "Healthy.datasets", "forward": "Net.forward"}
    expected = {name: f"{where} (healthy.py" for name, where in names.items()}
    expected["loss"] = "MeanOfWeightOne.loss (faulty_steps.py"
    assert {name: method.at(method.first).partition(":")[0] for name, method in found} == expected


def test_a_model_of_the_library_is_looked_for_in_build_model_and_one_of_the_harness_nowhere() -> None:
    assert methods(faulty.OneSampleNorm())["forward"].name == "OneSampleNorm.build_model"
    assert methods_of(workloads.build(replace(cell_for("single", 1), workload="mlp", model="small"))) == {}


def test_a_finding_has_its_place() -> None:
    found = examine(subject_of(faulty.UpdatesInLoss())).facts["findings"]
    (place,) = [row["place"] for row in found]
    assert place == f"UpdatesInLoss.loss (faulty_steps.py:{number_of('parameter.data.sub_(0.001 * gradient)')})"


def number_of(text: str) -> int:
    """Return the number of the line of faulty_steps.py with this text, which is there once."""
    lines = Path(faulty.__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return number


@pytest.mark.parametrize(
    ("check", "workload", "text"),
    [
        ("train mode", faulty.EvaluatesInLoss, "        model.eval()"),
        ("memory growth", faulty.KeepsItsGraphs, "self.history.append(total)"),
        ("data sharding", faulty.SamplerInASubset, "list(DistributedSampler(data, num_replicas=4, rank=1))"),
        ("gradient scaling", faulty.ScaledByWorldSize, "total * (dist.get_world_size() if"),
        ("slow rank", faulty.LogsOnOneRank, "dist.get_rank() == 1:"),
        ("threads", faulty.ChangesThreads, "torch.set_num_threads(2)"),
        ("loss weight", faulty.MeanOfWeightOne, "return cross_entropy(model(x), y), torch.tensor(1.0)"),
    ],
)
def test_the_line_that_looks_like_the_cause_is_the_place(check: str, workload: type[Any], text: str) -> None:
    assert place_of(check, methods(workload())).endswith(f"(faulty_steps.py:{number_of(text)})")


def test_without_a_single_line_the_place_is_that_of_each_method() -> None:
    lines = ("def loss(self):\n", "    self.kept.append(1)  # .append(2)\n", "    # .append(3)\n", "    return 1\n")
    loss = Method("Mine.loss", "mine.py", 10, lines)
    forward = Method("Net.forward", "mine.py", 3, ("def forward(self): ...\n",))
    assert place_of("memory growth", {"loss": loss, "forward": forward}) == "Mine.loss (mine.py:11)"
    twice = loss._replace(lines=(*lines, "    self.kept.append(4)\n"))
    both = place_of("memory growth", {"loss": twice, "forward": forward})
    assert both == "Mine.loss (mine.py:10), Net.forward (mine.py:3)"
    assert place_of("divergence", {"loss": loss}) == "Mine.loss (mine.py:10)"
    assert place_of("links", {"loss": loss}) == ""


class Head(nn.Linear):
    """Counts what it sees, and has a mask that nothing moves."""

    def __init__(self) -> None:
        super().__init__(16, CLASSES)
        self.seen, self.mask = 0, torch.ones(CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return super().forward(x) * self.mask


class WithHead(Healthy):
    def build_model(self) -> nn.Module:
        model = Net()
        model.last = nn.Sequential(Head())  # type: ignore[assignment]
        return model


@pytest.mark.parametrize(
    ("check", "parts", "place"),
    [
        ("state in forward", ["last.0.seen"], "self.seen += len(x)"),
        ("state in forward", ["last.0.unused.other[3]"], "self.seen += len(x)"),
        ("memory growth", [], "self.seen += len(x)"),  # the only line of any module that looks like it
        ("device placement", ["last.0"], "def forward(self, x: torch.Tensor)"),
        ("parameter updates", ["last.0.unused.weight"], "def forward(self, x: torch.Tensor)"),
    ],
)
def test_a_fault_in_an_inner_module_has_its_place(check: str, parts: list[str], place: str) -> None:
    number = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if place in line)
    assert place_of(check, methods(WithHead()), parts) == f"Head.forward (test_places.py:{number})"


def test_a_part_of_the_model_itself_has_the_place_of_its_forward() -> None:
    found = methods(WithHead())
    for check, parts in (("device placement", ["the model"]), ("parameter updates", ["first.weight", "lasting"])):
        assert place_of(check, found, parts).startswith("Net.forward (healthy.py"), check
    assert "Head" not in place_of("data sharding", found, ["last.0"])


def test_findings_name_the_inner_module() -> None:
    subject = subject_of(WithHead())
    found = {row["check"]: row.get("place", "") for row in examine(subject).facts["findings"]}
    assert set(found) == {"device placement", "parameter updates"}
    assert all(place.startswith("Head.forward (test_places.py:") for place in found.values()), found
    (written,) = state.judge([{"last.0.seen": False}], Case(cell_for("dp", 2)))
    assert written.parts == ("last.0.seen",) and "parts" not in written.row()


def test_places_are_those_of_findings() -> None:
    assert all(check.about for check in CHECKS if check.clue) and set(PLACED) <= set(LOOKS_AT)
    about = {*chain(*(check.about for check in PLACED.values()))}
    assert about == {
        "build_model",
        "datasets",
        "loss",
        "forward",
        "metrics",
        "evaluate",
    }
