"""The place in the user's code that a finding is about."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from harness.doctor.builds import FewBuilds
from harness.doctor.examine import examine
from harness.doctor.places import ABOUT, places_of
from harness.doctor.subject import Subject
from harness.plan.checks import catalogue
from harness.train import workloads
from harness.train.ranks import Ranks
from tests.doctor.faulty_steps import MeanOfWeightOne, OneSampleNorm, UpdatesInLoss
from tests.doctor.ranks import cell_for

RANKS = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))


def test_each_method_is_found_where_it_is_defined() -> None:
    few = FewBuilds(MeanOfWeightOne())
    few.build_model()
    places = {method: place.partition(":")[0] for method, place in places_of(few).items()}
    assert places == {
        "build_model": "Healthy.build_model (healthy.py",
        "datasets": "Healthy.datasets (healthy.py",
        "loss": "MeanOfWeightOne.loss (faulty_steps.py",
        "forward": "Net.forward (healthy.py",
    }


def test_a_model_of_the_library_is_looked_for_in_build_model() -> None:
    few = FewBuilds(OneSampleNorm())
    few.build_model()
    assert places_of(few)["forward"].startswith("OneSampleNorm.build_model (")


def test_what_the_harness_builds_has_no_place() -> None:
    assert places_of(workloads.build(replace(cell_for("single", 1), workload="mlp", model="small"))) == {}


def test_a_finding_has_its_place() -> None:
    workload = UpdatesInLoss()
    found = examine(Subject(cell_for("single", 1), workload, workload.datasets(), 0, RANKS)).facts["findings"]
    (place,) = [row["place"] for row in found]
    assert re.fullmatch(r"Net\.forward \(healthy\.py:\d+\), UpdatesInLoss\.loss \(faulty_steps\.py:\d+\)", place)


def test_every_check_is_in_the_catalogue() -> None:
    assert set(ABOUT) <= set(catalogue.CHECKS)
    assert {method for methods in ABOUT.values() for method in methods} == {
        "build_model",
        "datasets",
        "loss",
        "forward",
    }
