"""``harness list``: every name, without torch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from harness.cli.commands import app
from harness.cli.listing import rows_of
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.doctor_checks import LOOKS_AT
from harness.config.strategy_traits import BUILTIN_TRAITS


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("workloads", [*BUILTIN_WORKLOADS, "package.module:ClassName", "cifar10"]),
        ("models", [*BUILTIN_WORKLOADS, "resnet8", "resnet152", "gpt2"]),
        ("strategies", [*BUILTIN_TRAITS, "bucket_cap_mb", *(traits.summary for traits in BUILTIN_TRAITS.values())]),
        ("checks", [*LOOKS_AT]),
    ],
)
def test_every_name_is_listed(what: str, expected: list[str]) -> None:
    result = CliRunner().invoke(app, ["list", what], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert not [name for name in expected if name not in result.output]
    assert all(traits.summary for traits in BUILTIN_TRAITS.values())


def test_an_unknown_list_offers_the_nearest() -> None:
    result = CliRunner().invoke(app, ["list", "Models"])
    assert result.exit_code == 2 and "did you mean 'models'?" in result.stderr
    assert {"workloads", "models", "strategies", "checks"} == set(rows_of())
