"""``harness doctor FILE --links``: a run of the links alone, over a launcher that measures nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

import harness
from harness.errors import ExperimentError
from harness.launch.protocol import GroupStarted, Message, TrialStarted
from harness.plan.diagnostics import seconds_of_links
from harness.plan.inventory import Inventory
from harness.plan.trial import TrialResult, WorkerGroup
from harness.report import html
from harness.run import pipeline, prepare
from harness.run.console import ConsoleSink
from harness.run.doctor import run_links
from harness.run.request import Request, read_experiment
from tests.conftest import gpu_cluster, laptop
from tests.records import link_row, rank_row

Command = Callable[..., tuple[int, Path, str]]
FILE = """
name: linked
grid: {strategy: [single, ddp, fsdp], devices: [1, 2, 8], per_device_batch_size: 8}
exclude: [{strategy: fsdp, devices: 2}]
convergence: {epochs: 1, target: {metric: val_accuracy, at_least: 0.5}}
checkpoint: {every: 1}
throughput: {explain: false}
"""


class Measured:
    """Every placement has the same links; or every trial fails."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        yield GroupStarted((), ())
        devices = range(group.placement.devices)
        rows = [
            link_row("send_receive", source=source, target=target, size_bytes=size, time_s=seconds, link="NV12")
            for source in devices
            for target in range(source + 1, len(devices))
            for size, seconds in ((1024, 1.2345e-5), (2**30, 2.5e-3))
        ]
        for trial in group.trials:
            yield TrialStarted(trial.id)
            if self.outcome == "error":
                yield TrialResult(trial.id, "error", "RuntimeError on rank 0: broken")
                return
            found = tuple([*rows, link_row("all_reduce", time_s=2e-5)])
            ranks = tuple(rank_row(rank) for rank in devices)
            yield TrialResult(trial.id, "ok", links=found, steps_s=1.0, trial_s=1.0, ranks=ranks)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command on an inventory; return the exit code, the run folder and the output in 80 columns."""
    monkeypatch.setattr(html, "FIGURES", {})
    monkeypatch.setattr(pipeline, "start_ray", lambda *given: nullcontext())

    def run_it(
        inventory: Inventory, outcome: str = "ok", text: str = FILE, quiet: bool = True
    ) -> tuple[int, Path, str]:
        monkeypatch.setattr(prepare.cluster, "local_inventory", lambda: inventory)
        monkeypatch.setattr(pipeline, "launcher_for", lambda *given: Measured(outcome))
        (file := tmp_path / "linked.yaml").write_text(text)
        request = Request(file=file, output=tmp_path / "out")
        shown = io.StringIO()
        with ConsoleSink(Console(file=shown, width=80), quiet=quiet) as sink:
            code = run_links(request, read_experiment(request), sink)
        return code, next((tmp_path / "out" / "linked").iterdir()), shown.getvalue()

    return run_it


def test_each_placement_is_measured_for_a_minute_and_nothing_else_is(command: Command) -> None:
    code, folder, shown = command(gpu_cluster(), quiet=False)
    results = harness.load(folder)
    assert code == 0
    assert results.trials["purpose"].tolist() == ["links", "links"]
    assert sorted(results.trials["devices"]) == [2, 8]
    settings = results.experiment.throughput
    assert settings and seconds_of_links(settings, "cuda") == 60.0
    written = (folder / "tables" / "links.csv").read_text().splitlines()
    assert len(written) == 1 + 2 * (1 + 28) and (folder / "tables" / "collectives.csv").is_file()
    assert "Links and collectives" in shown and "send and receive" in shown and "NV12" in shown
    matrix = shown[shown.index("Links between devices") : shown.index("Trials: ")]
    assert max(map(len, matrix.splitlines())) <= 80
    assert matrix.count("429") == 2 + 56  # GB/s, in both directions
    for devices in (2, 8):  # short labels, and nothing is said of cells
        assert f" ddp x{devices} · block 0 · links  measured in 1.0 s\n" in shown
    assert "Asked: " not in shown and "Together: 2 trials" in shown and "What to do next" in shown
    assert "Numbers in brackets" not in shown and "Numbers in brackets" not in (folder / "report.html").read_text()


def test_a_placement_that_cannot_be_measured_fails_and_a_file_without_one_is_refused(
    command: Command,
) -> None:
    code, folder, _ = command(laptop(), "error")
    assert code == 1
    assert harness.load(folder).trials["outcome"].tolist() == ["error"]
    with pytest.raises(ExperimentError, match=r"no cell of .*linked.yaml that can run here has links; allowed: ddp"):
        command(laptop(), text="name: linked\ngrid: {per_device_batch_size: 8}\n")
