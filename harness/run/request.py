"""The request of a command line and the experiment in its file. Imports neither torch, ray nor pandas.

What is wrong with a file by itself is reported before these are imported, which takes seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.axes import options_in
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.experiment import Experiment
from harness.config.load import load_experiment, parse_experiment
from harness.config.script import UNUSED_SECTIONS, ScriptExperiment
from harness.config.sections import Improve
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import SECTION, PlainValue, as_axis
from harness.config.yaml_source import dump, parse_mapping, parse_value
from harness.errors import Collected, ExperimentError, HarnessError, RunFolderError
from harness.launch.ray.session import in_job, is_lost_with_job
from harness.plan.inventory import Inventory
from harness.system.uri import below, is_uri, problem_of, run_in
from harness.system.user_code import module_file

AUTO = Path("auto")
"""The value of --resume that means the newest unfinished run of the file; a folder of this name is ./auto."""
SUBMIT_VARIABLE = "HARNESS_SUBMIT"
"""Set by a batch script that starts a cluster and ends it: the words that submit the script, before its arguments."""


@dataclass(frozen=True)
class Request:
    """The arguments of a command. ``resume``: a run folder, AUTO, or None for a new run.

    ``like``: the run that the time is estimated from; None: the newest with its cells. ``output``: the local folder of
    run folders. ``store``: the URI to which they are sent, or None; a run that is resumed may be there alone.
    ``content``: the experiment as YAML if it is in no file; ``file`` then stands for it in messages, and its folder is
    that of relative paths and of the user's own modules. ``improve``: the time of ``--improve`` in seconds, which
    replaces that of the file. ``bases``: whether bases that the file does not name are measured.
    """

    file: Path
    content: str | None = None
    address: str | None = None
    assumed: Inventory | None = None
    dry_run: bool = False
    resume: Path | None = None
    add_blocks: int = 0
    output: Path = Path("results")
    store: str | None = None
    like: Path | None = None
    only: dict[str, PlainValue] = field(default_factory=dict)
    no_user_code: bool = False
    preflight: bool = True
    inline: bool = False
    links: bool = False
    quiet: bool = False
    verbose: bool = False
    memory: bool = False
    improve: float | None = None
    bases: bool = True

    @property
    def home(self) -> Path:
        """The folder of relative paths in the experiment, and of the user's own modules."""
        return self.file.resolve().parent

    def source_text(self) -> str:
        """Return the experiment as the user gave it."""
        return self.file.read_text(encoding="utf-8") if self.content is None else self.content

    def inside(self, content: Mapping[str, object], source: str, **options: Any) -> tuple[Request, Experiment]:
        """Return the request and the experiment of a further run, whose content is in no file, with these options."""
        text = dump(content, flow=None, width=100)
        experiment = parse_experiment(parse_mapping(text, source=source), source=source, home=self.home)
        same = {name: getattr(self, name) for name in ("file", "address", "no_user_code", "inline")}
        return Request(content=text, preflight=False, **same, **options), experiment

    @property
    def plans_only(self) -> bool:
        """Whether nothing is started: a dry run, or a cluster that is only assumed."""
        return self.dry_run or self.assumed is not None

    @property
    def resumable(self) -> bool:
        """Whether an interrupted run can be resumed."""
        return not (self.inline or self.links)


class Places(NamedTuple):
    """Where runs are: the local folder of run folders, the URI to which they are sent, and the run to resume."""

    output: Path
    store: str | None
    resume: Path | None


def places_of(
    output: str | None, local: str | os.PathLike[str] | None, resume: str | None, *, absolute: bool = False
) -> Places:
    """Return the places of --output, --local and --resume; raises ExperimentError.

    The run of ``--resume URI`` is then resumed in its local folder, <local>/<experiment>/<time>-<id>.
    """
    here = Path.absolute if absolute else Path
    given = {"--output": output, "--resume": resume}
    uris = {option: text for option, text in given.items() if text is not None and is_uri(text)}
    for option, text in uris.items():
        if problem := problem_of(text):
            raise ExperimentError(option, [problem])
    if local is not None and not uris:
        raise ExperimentError("--local", ["is for --output URI or --resume URI; a folder alone is given with --output"])
    resumed = None if resume is None else Path(resume)
    if resumed and resume != "auto" and (absolute or not resumed.parent.name):  # both names are those of the run
        resumed = resumed.absolute()
    if not uris:
        return Places(here(Path(output or "results")), None, resumed)
    folder, store = here(Path(local or "results")), uris.get("--output")
    if "--resume" not in uris:
        return Places(folder, store, resumed)
    try:
        of_run, experiment, name = run_in(uris["--resume"])
    except ValueError as error:
        raise ExperimentError("--resume", [str(error)]) from None
    if output is not None and (store is None or below(store) != below(of_run)):
        problem = f"got {output!r}, and a run in {of_run} to resume; allowed: none, since the run stays where it is"
        raise ExperimentError("--output", [problem])
    return Places(folder, of_run, folder / experiment / name)


def read_experiment(request: Request, found: Collected | None = None) -> Experiment:
    """Return the experiment of the request; raises ExperimentError, which lists the problems of all of it.

    ``found``: the problems that reading the arguments raised.
    """
    found = found or Collected()
    experiment, source = None, str(request.file)
    with found.also():
        if request.content is None:
            experiment = load_experiment(request.file)
        else:
            content = parse_mapping(request.content, source=source)
            experiment = parse_experiment(content, source=source, home=request.home)
        if request.no_user_code:
            check_no_user_code(experiment, request.file)
        check_variants(experiment, request.file)
        if request.improve is not None:
            experiment = with_improvement(experiment, request.improve)
        if missing := [name for name in experiment.programs if not os.path.isfile(name)]:
            raise ExperimentError(source, [f"script: got {name!r}; there is no such file" for name in missing])
        if problems := [*_not_together(request, experiment)]:
            raise ExperimentError(source, problems)
    for mistake in mistakes(request):
        found.add(mistake)
    found.raise_all()
    assert experiment is not None
    return experiment


def mistakes(request: Request) -> Iterator[HarnessError]:
    """Yield what is wrong with the options by themselves, and run folders that are not there."""
    resumed = None if request.store or request.resume == AUTO else request.resume
    for given, path in (("", resumed), ("--like ", request.like)):
        if path and not os.path.isdir(path):
            yield RunFolderError(f"{given}{path}: not a run folder: it is not there; give results/EXPERIMENT/TIME-ID")
    if request.inline and (request.address is not None or request.assumed is not None):
        problem = "it runs in this process, on no cluster; leave out --address and --assume, unset RAY_ADDRESS"
        yield ExperimentError("--inline", [problem])
    elif request.inline and request.resume is not None:
        yield ExperimentError("--inline", ["its trials are for a debugger and complete no run; leave out --resume"])
    if request.add_blocks and request.resume is None:
        yield ExperimentError("--add-blocks", ["it adds to a run that is there; give its folder with --resume"])
    elif request.add_blocks and request.resume == AUTO:
        yield ExperimentError("--add-blocks", ["it adds to one run; give its folder with --resume instead of auto"])
    if request.improve is not None and request.inline:
        yield ExperimentError("--improve", ["it measures in worker groups; leave out --inline"])
    if request.memory and not request.plans_only:
        yield ExperimentError("--memory", ["it belongs to a plan; add --dry-run, or leave it out: a run measures it"])
    elif request.memory and request.no_user_code:
        yield ExperimentError("--memory", ["it runs the workload's code; leave it out, or --no-user-code"])


def _not_together(request: Request, experiment: Experiment) -> Iterator[str]:
    """Yield what an experiment asks for and its other sections or the request exclude; recorded runs may have it."""
    if experiment.improve:
        yield from (f"improve: {text}" for text, _ in experiment.against_improving)
    if experiment.trains_at_unknown_batches:
        yield (
            "per_device_batch_size: max is another batch for each strategy and number of devices: give a number beside "
            "it, convergence.global_batch_size, or convergence.only a batch"
        )
    if not request.store:
        return
    if experiment.improve:
        yield "improve: its runs are in the local run folder; leave out --output URI"
    if experiment.seeks_batches:
        yield "per_device_batch_size: max is kept in the local folder; give numbers, or leave out --output URI"
    if experiment.checkpoint and experiment.checkpoint.folder is None:
        problem = "are not sent to --output URI; give a folder that all nodes see and that outlives them"
        yield f"checkpoint.folder: checkpoints {problem}"
    if getattr(experiment, "keep", False):
        yield "keep: a script's files are not sent to --output URI; leave keep out"


def with_improvement(experiment: Experiment, time_s: float) -> Experiment:
    """Return the experiment with the time of --improve; raises ExperimentError if nothing can be improved."""
    if isinstance(experiment, ScriptExperiment):
        raise ExperimentError(
            "--improve", [f"{UNUSED_SECTIONS['improve']}: it is for workloads, not for a script or loop"]
        )
    if problems := [text for text, _ in experiment.against_improving]:
        raise ExperimentError("--improve", problems)
    settings = experiment.improve or Improve(time=time_s)
    return experiment.model_copy(update={"improve": settings.model_copy(update={"time": time_s})})


def check_variants(experiment: Experiment, file: Path) -> None:
    """Raise ExperimentError if a variant is no folder that holds the user's own modules; imports nothing of it."""
    folders = experiment.variants.items()
    there = {name: {m for m in (*experiment.own_modules, "harness") if module_file(m, [at])} for name, at in folders}
    of_some = [m for m in experiment.own_modules if any(m in modules for modules in there.values())]
    problems = []
    for name, folder in folders:
        got = f"variants.{name}: got {folder!r}"
        lacking = [module for module in of_some or experiment.own_modules if module not in there[name]]
        if not os.path.isdir(folder):
            problems.append(f"{got}; allowed: a folder that is there")
        elif lacking:
            problems.append(f"{got}; it has no module {lacking[0]}: give what is to be first on the import path")
        elif "harness" in there[name]:
            problems.append(f"{got}; it has a module harness: variants are versions of your own code, not of harness")
    if problems:
        raise ExperimentError(str(file), problems)


def resume_command(request: Request, folder: Path) -> str:
    """Return the shell command, or for an experiment in no file the call, that resumes the run in its folder."""
    if request.content is not None:
        more = f", output={request.store!r}" if request.store else ""
        return f"harness.run_experiment(..., resume={str(folder)!r}{more})"
    if request.store is None:
        return _command(request, {"--resume": str(folder)})
    local = {} if request.output == Path("results") else {"--local": str(request.output)}
    return _command(request, {"--resume": below(request.store, folder.parent.name, folder.name), **local})


def submit_command(request: Request, folder: Path) -> str | None:
    """Return the command that submits a run again in a job whose cluster ends with it; None outside of such a job."""
    return resume_command(request, folder) if in_job() or os.environ.get(SUBMIT_VARIABLE) else None


def check_output(request: Request) -> None:
    """Raise ExperimentError if Ray would remove the results with a job's copy of its working directory."""
    completes = request.resume not in (None, AUTO)
    if completes or request.store or not is_lost_with_job(request.output):
        return
    resume = {"--resume": "auto"} if request.resume else {}
    example = "output='/shared/results'" if request.content is not None else ""
    raise ExperimentError(
        "--output",
        [
            f"got {str(request.output)!r}; in a Ray job it is in the copy of the working directory that Ray removes; "
            "allowed: s3://BUCKET/FOLDER, or an absolute path that outlives the job, on storage that you can read: "
            f"{example or _command(request, {'--output': '/shared/results', **resume})}"
        ],
    )


def _command(request: Request, more: Mapping[str, str]) -> str:
    """Return the shell command of the request with more options; a job's driver has the address from Ray.

    In a batch script that ends its cluster, the words of SUBMIT_VARIABLE start it again, with an address of its own.
    """
    axes = []
    for axis, values in request.only.items():
        for value in as_axis(values):
            text = value if isinstance(value, str) else json.dumps(value)
            is_plain = parse_value(text, source="--only") == value  # a text that looks like another value is quoted
            axes.append(f"{axis}={text if is_plain else json.dumps(value)}")
    flags = ["--no-user-code"] * request.no_user_code + ["--no-preflight"] * (not request.preflight)
    flags += ["--links"] * request.links + ["--quiet"] * request.quiet + ["--verbose"] * request.verbose
    batch = shlex.split(os.environ.get(SUBMIT_VARIABLE, ""))
    address = None if in_job() or batch else request.address
    improve = None if request.improve is None else f"{request.improve:g}s"
    options = {"--address": address, "--only": ",".join(axes), "--improve": improve, **more}
    given = [part for name, value in options.items() if value for part in (name, value)]
    submit = ["ray", "job", "submit", "--working-dir", ".", "--"] if in_job() else []
    words = batch or [*submit, *program("doctor" if request.links else "run")]
    return shlex.join([*words, str(request.file), *flags, *given])


MODULES = ("run", "doctor", "report")
"""The commands that are modules of their own: python -m harness.run."""


def program(command: str) -> list[str]:
    """Return the words that start a command as this process was started: ``harness run``, or Python with a module."""
    script = sys.argv[0]
    if os.path.basename(script) == "harness":
        return ["harness" if shutil.which("harness") == script else script, command]
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)  # .venv/bin/python, as it was typed
    python = "python" if shutil.which("python") == sys.executable else python
    return [python, "-m", *([f"harness.{command}"] if command in MODULES else ["harness", command])]


def as_started(text: str) -> str:
    """Return a text whose commands of harness begin with the words that started this process."""
    return re.sub(r"\bpython -m harness[. ]([a-z]+)", lambda found: shlex.join(program(found[1])), text)


def check_no_user_code(experiment: Experiment, file: Path) -> None:
    """Raise ExperimentError if the experiment names code of its own, a download, or a folder to write to.

    Imports nothing that the file names.
    """
    problems = []
    if experiment.own_workload:
        allowed = f"--no-user-code allows built-in workloads only: {', '.join(BUILTIN_WORKLOADS)}"
        problems.append(f"workload: got {experiment.workload!r}; {allowed}")
    if experiment.own_strategies:
        allowed = f"--no-user-code allows built-in strategies only: {', '.join(BUILTIN_TRAITS)}"
        problems.append(f"grid.strategy: got {', '.join(map(repr, experiment.own_strategies))}; {allowed}")
    problems += [f"script: got {file!r}; with --no-user-code no script is run" for file in experiment.programs]
    if experiment.own_modules and not (experiment.own_workload or experiment.own_strategies):
        problems.append(f"loop: got {', '.join(experiment.own_modules)}; with --no-user-code no loop is run")
    if experiment.variants:
        problems.append("variants: with --no-user-code nothing that the file names is imported; leave them out")
    if experiment.checkpoint and experiment.checkpoint.folder:
        folder = experiment.checkpoint.folder
        problems.append(f"checkpoint.folder: got {folder!r}; with --no-user-code checkpoints stay in the run folder")
    grids = (experiment.grid, *experiment.cells) if experiment.grid else experiment.cells
    options: list[Mapping[str, PlainValue]] = [experiment.option_axes(), *(grid.options for grid in grids)]
    if any(options_in(axes, SECTION) for axes in options):
        problems.append("env: with --no-user-code no variable is set, since some load code; leave them out")
    if any(any(as_axis(axes.get("workload.download"))) for axes in options):
        problems.append("workload_options.download: with --no-user-code nothing is downloaded; fetch it yourself")
    if problems:
        raise ExperimentError(str(file), problems)
