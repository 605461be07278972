"""``harness init``: a commented experiment file for one or more questions, made from templates/, or for a script."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from harness.cli.arguments import command, show
from harness.cli.init_cluster import CLUSTERS, PATH, cluster_text
from harness.errors import ExperimentError, nearest
from harness.system.files import PACKAGE_FOLDER

TEMPLATES = PACKAGE_FOLDER / "cli" / "templates"
OWN = "own-workload"
OWN_CLASS, OWN_MODULE = "my_workload:Regression", "my_workload.py"
LONGER = ("batch", "loader", "precision", "convergence")
"""The questions whose files, alone, have fewer than the blocks of effort: quick, so that they take minutes on GPUs."""
SMALL = {"image_classification": {"width": 8}, "language_model": {"context": 64, "text_bytes": 60_000}}
"""The options that size a workload for a laptop."""


class Question(NamedTuple):
    """A question, and about how long the run of its file takes on 2 CPU cores."""

    text: str
    minutes: int


QUESTIONS: Mapping[str, Question] = {
    "scaling": Question("How does training scale with the number of devices, and what limits it?", 2),
    "strategies": Question("Which strategy is the fastest on the same devices, and does each train the same?", 3),
    "batch": Question("Which batch size: from where on does a larger one no longer increase the throughput?", 3),
    "loader": Question("Does training wait for its data, and how many loader workers does it need?", 3),
    "precision": Question("What does a lower precision gain in speed, and does the training still learn?", 4),
    "convergence": Question("How well does training learn with a larger batch, or another strategy?", 2),
    OWN: Question("How does a model of my own scale?", 2),
}

QuestionArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="|".join(QUESTIONS),
        help="The questions, one or more; with --cluster answers, as NAME=VALUE. Without one: the list of them.",
    ),
]
WorkloadOption = Annotated[
    str, typer.Option(help="What to train: a name of `harness list workloads`, or module:ClassName of your own.")
]
DataOption = Annotated[
    str | None, typer.Option(help="What to train on: a name of `harness list workloads`, or the path of a folder.")
]
ScriptOption = Annotated[
    Path | None, typer.Option(help="A training script, as it is: how does it scale? In place of questions.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(CLUSTERS), help="The file that starts a run on a cluster, with answers such as nodes=4."
    ),
]
OutputFile = Annotated[
    Path | None, typer.Option(help="The file to write; by default named after the questions, in the current folder.")
]


@command
def init_command(
    questions: QuestionArguments = None,
    workload: WorkloadOption = "",
    data: DataOption = None,
    script: ScriptOption = None,
    cluster: ClusterOption = None,
    output: OutputFile = None,
) -> int:
    """Write a commented experiment file that answers questions and runs as it stands; replaces no file."""
    if cluster is not None:
        if script or workload or data:
            raise ExperimentError("--cluster", ["it takes no --script, --workload or --data; leave them out"])
        _write_cluster_file(cluster, questions or [], output)
        return 0
    if script:
        if questions or workload or data:
            raise ExperimentError("--script", ["it takes no questions, --workload or --data; leave them out"])
        file = output or Path(f"{script.stem}.yaml")
        write_new({file: script_text(script, file)})
        show(f"Wrote {file}. Next: harness plan {shlex.quote(str(file))}, then harness run {shlex.quote(str(file))}")
        return 0
    if not questions:
        show("harness init QUESTION [QUESTION ...] writes a commented experiment file for these:")
        for name, known in QUESTIONS.items():
            show(f"  {name:<14}{known.text}")
        show("harness init --script FILE writes one for a training script, as it is.")
        show(f"harness init --cluster {'|'.join(CLUSTERS)} writes the file that starts a run on a cluster.")
        return 0
    _write_experiment_file(questions, workload, data, output)
    return 0


def _write_experiment_file(questions: Sequence[str], workload: str, data: str | None, output: Path | None) -> None:
    for question in questions:
        if question not in QUESTIONS:
            raise ExperimentError("harness init", [f"got {question!r}; {nearest(question, QUESTIONS)}"])
    asked = [name for name in QUESTIONS if name in questions]
    file = output or Path("my_workload.yaml" if asked == [OWN] else f"{'-'.join(asked)}.yaml")
    if not str(file).isprintable():
        raise ExperimentError("--output", [f"got {str(file)!r}; allowed: a name of printable characters"])
    contents = {file: experiment_text(asked, workload, data, file)}
    if OWN in asked:
        if file == file.parent / OWN_MODULE:
            raise ExperimentError("--output", [f"got {file}, the name of the module beside it; give a .yaml file"])
        contents[file.parent / OWN_MODULE] = (TEMPLATES / f"{OWN_MODULE}.txt").read_text(encoding="utf-8")
    write_new(contents)
    path = shlex.quote(str(file))
    show(f"Wrote {file}. Next: harness plan {path}, then harness run {path}")


def _write_cluster_file(cluster: str, answers: Sequence[str], output: Path | None) -> None:
    found, text, unanswered = cluster_text(cluster, answers)
    file = output or Path(found.name)
    if not re.fullmatch(PATH[1], str(file)):
        raise ExperimentError("--output", [f"got {str(file)!r}; allowed: {PATH[0]}"])
    write_new({file: text.replace(found.name, str(file))})  # it is in the command that resumes
    show(f"Wrote {file}. Next: {found.start.replace('FILE', shlex.quote(str(file)))}")
    if unanswered:
        show(f"Not answered, and as in {found.name} of experiments/clusters: {', '.join(unanswered)}.")


def experiment_text(asked: Sequence[str], workload: str, data: str | None, file: Path) -> str:
    """Return the experiment file of questions, in the order of QUESTIONS; raise ExperimentError for a bad option.

    ``workload``: empty for image_classification, or for the class that comes with OWN.
    """
    import jinja2

    from harness.config.builtin_workloads import BUILTIN_WORKLOADS

    if workload and OWN in asked:
        raise ExperimentError("--workload", [f"got {workload!r} with {OWN}, which has {OWN_CLASS}; give one of both"])
    trained = workload or (OWN_CLASS if OWN in asked else "image_classification")
    builtin = BUILTIN_WORKLOADS.get(trained)
    if builtin is None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", trained):
        named = nearest(trained[:80], BUILTIN_WORKLOADS)
        raise ExperimentError("--workload", [f"got {trained[:80]!r}; {named}, or module:ClassName of your own"])
    names = _data(trained, data, file.parent) if builtin or data is not None else []
    small = dict(SMALL.get(trained, {}))
    if "loader" in asked and builtin and "synthetic_device" in builtin.data_names:
        names = list(dict.fromkeys([*names, "synthetic_device"]))
        small |= {"image_size": 16} if trained == "image_classification" else {}  # the same images in both
    timed, quick = asked != ["convergence"], len(asked) > 1 or asked[0] not in LONGER
    too_small = ["workload_options"] * bool(small) + [("effort" if quick else "throughput")] * timed
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string((TEMPLATES / "experiment.yaml").read_text(encoding="utf-8"))
    return template.render(
        asked=asked,
        texts=[QUESTIONS[name].text for name in asked],
        minutes=0 if len(asked) > 1 or workload or data is not None else QUESTIONS[asked[0]].minutes,
        file=shlex.quote(str(file)),
        name="my_workload" if asked == [OWN] else "-".join(asked),
        workload=trained,
        own=builtin is None,
        given=bool(workload),
        images=trained == "image_classification",
        folders=builtin is not None and builtin.folders,
        data=_flow(names),
        model=builtin.models[0] if builtin else "",
        small=_flow(small) if small else "",
        too_small=f"{', '.join(too_small)} and limits" if too_small else "limits",
        on_gpus=_on_gpus(asked) if trained == "image_classification" and data is None else "",
        timed=timed,
        quick=quick,
    )


def _on_gpus(asked: Sequence[str]) -> str:
    """Return the values of axes that suit GPUs, without those of a question; empty if it is about the data itself."""
    if {"loader", "convergence", "precision"} & {*asked}:  # which learns, too
        return ""
    batch = ", per_device_batch_size [64]" if "batch" not in asked else ""
    return f"data [synthetic_device], model [resnet50]{batch}, precision [bf16]"


def _data(workload: str, data: str | None, folder: Path) -> list[str]:
    """Return the data of a built-in workload: its own, or what is given; raise ExperimentError if it cannot be that.

    The path of a folder is relative to ``folder``, that of the experiment file, unless it is given as absolute.
    """
    from harness.config.builtin_workloads import BUILTIN_WORKLOADS

    builtin = BUILTIN_WORKLOADS.get(workload)
    if builtin is None:
        raise ExperimentError("--data", [f"got {data!r}; {workload} brings its own data: it is read in its datasets()"])
    if data is None:
        return [builtin.data]
    if builtin.folders and data not in builtin.data_names and os.path.isdir(data):
        return [data if os.path.isabs(data) else os.path.join(".", os.path.relpath(data, folder))]
    if problem := next(builtin.unknown([data], []), None):
        raise ExperimentError("--data", [problem[1]])
    if "/" in data:
        raise ExperimentError("--data", [f"got {data[:80]!r}: no such folder"])
    return [data]


def _flow(value: object) -> str:
    """Return a value in the flow style of YAML, on one line."""
    from harness.config.yaml_source import dump

    return dump(value, flow=True, width=10_000).strip().removesuffix("\n...")  # the end of a plain text


def write_new(contents: Mapping[Path, str]) -> None:
    """Write files, all or none; raise ExperimentError if one exists or cannot be written."""
    first = next(iter(contents))
    for path in contents:
        if os.path.lexists(path):
            other = "another file" if path == first else "a file in another folder"
            raise ExperimentError(str(path), [f"is there already and is not replaced; give {other} with --output"])
    written: list[Path] = []
    try:
        for path, content in contents.items():
            with path.open("x", encoding="utf-8") as new:
                written.append(path)
                new.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        problem = f"cannot be written: {error.strerror}; give another file with --output"
        raise ExperimentError(str(path), [problem]) from None


ADDS = ("add_argument", "option")
"""The methods that add an option to a command line: argparse's, click's."""
BATCH = re.compile(r"(^|[-_])(batch|bs|bsz)([-_]|$)|batch[-_]?size", re.IGNORECASE)
EPOCHS = re.compile(r"epochs|n[-_]?iter|max[-_](iters|steps)|num[-_]steps|iterations", re.IGNORECASE)
WHOLE_BATCH = re.compile(r"-*((train|per[-_]device|micro)[-_])*(batch[-_]?size|bs|bsz)", re.IGNORECASE)
WHOLE_EPOCHS = re.compile(r"-*((num|n|train|max|total)[-_])*(epochs|steps|iters|iterations)", re.IGNORECASE)
"""The usual names, before others that hold one."""
OF_ELSE = re.compile(r"(^|[-_])(val|valid|validation|eval|test|warm[-_]?up|norm|save|log|decay)([-_]|$)", re.IGNORECASE)
"""Options of batches or epochs that are not those of the training."""
LOCAL_RANK = ("--local-rank", "--local_rank")
"""The option that torch.distributed.launch passes to each rank."""
MANY = 100_000
"""A number of epochs or steps that no trial reaches: it is ended after its last window."""
UNKNOWN_BATCH = 32


class Option(NamedTuple):
    """An option of a script's command line, and its default; None if it has none, or not a constant."""

    flag: str
    default: str | int | float | bool | None
    required: bool
    takes_value: bool = True

    def __str__(self) -> str:
        if self.default in (None, ""):
            return self.flag
        return f"{self.flag} {' '.join(str(self.default).split())}"


def options_of(text: str) -> list[Option]:
    """Return the options that calls such as ``add_argument("--name", default=...)`` in Python code name.

    Those of click's ``@click.option`` too. Raise SyntaxError.
    """
    found: dict[str, Option] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
            flags = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            named = sorted((flag for flag in flags if flag.startswith("-")), key=len)
            given = {key.arg: key.value for key in node.keywords}
            constants = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
            if named:
                stores = "action" not in given or constants.get("action") == "store"
                takes_value = stores and not constants.get("is_flag") and "/" not in named[-1]
                default = constants.get("default") if takes_value else None
                value = default if isinstance(default, str | int | float | bool) else None
                required = takes_value and constants.get("required") is True
                found[named[-1]] = Option(named[-1], value, required, takes_value)
    return list(found.values())


def _best(options: Sequence[Option], part: re.Pattern[str], whole: re.Pattern[str]) -> Option | None:
    """Return the first option whose whole name matches, else the first of which a part does."""
    found = [each for each in options if part.search(each.flag)]
    return next((each for each in found if whole.fullmatch(each.flag)), next(iter(found), None))


def script_text(script: Path, file: Path) -> str:
    """Return the experiment file of a script, to be written to ``file``; raise ExperimentError if it cannot be read."""
    try:
        text = script.read_text(encoding="utf-8")
        options = options_of(text)
    except (OSError, UnicodeError) as error:
        raise ExperimentError("--script", [f"got {str(script)!r}; it cannot be read: {error}"]) from None
    except SyntaxError as error:
        raise ExperimentError("--script", [f"got {str(script)!r}; line {error.lineno}: {error.msg}"]) from None
    valued = [each for each in options if each.takes_value and not OF_ELSE.search(each.flag)]
    batch = _best(valued, BATCH, WHOLE_BATCH)
    size = batch.default if batch and isinstance(batch.default, int) and batch.default > 0 else UNKNOWN_BATCH
    long = _best(valued, EPOCHS, WHOLE_EPOCHS)
    rank = next((each for each in options if each.flag in LOCAL_RANK), None)
    others = [each for each in options if each not in (batch, long, rank)]
    required = [f"{each.flag} VALUE" for each in others if each.required]
    given = [f"{batch.flag} {{per_device_batch_size}}"] if batch else []
    given += [f"{long.flag} {MANY}"] if long else []
    given += [f"{rank.flag} {{local_rank}}"] if rank else []
    given += required
    name = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:60]  # the characters that names may have
    lines = [
        f"# How does {script.name} scale? harness plan, doctor and run {file.name}",
        f"name: {_flow(name or 'script')}",
        f"script: {_flow(os.path.relpath(script, file.parent))}",
        *["# Replace each VALUE: the script needs one."] * bool(required),
        *([f"# {long.flag}: more than it needs, as the script is ended after its last window."] if long else []),
        f"arguments: {' '.join(given)}" if given else "# arguments: --batch-size {per_device_batch_size}",
        "# Each name in braces in arguments is an axis, and its values stand in grid."
        + (f" Other options of the script: {'; '.join(map(str, others))}" if others else " What does the script take?"),
        "step: {pause: validation}         # without evaluation, which short windows hold by chance; also samples: 32,",
        "                                  # of a rank and step, if no DataLoader of torch delivers its batches",
        "grid:",
        "  devices: [1, 2]                 # GPUs, or CPU slots; each is a rank",
        f"  per_device_batch_size: [{size}]     # of a rank; or global_batch_size, here and above: of all ranks",
        "effort: quick                     # short windows; normal and careful take longer",
        "throughput: {blocks: decide}      # 3 to 8, until it is clear what is faster; a number: as many in any case",
        "# Learning curves, of probe.report() in the script or a Trainer's logs; the epochs to train are in arguments:",
        "# convergence: {seeds: [0], target: {metric: val_loss, at_most: 1}}",
        "limits: {trial: 5m}               # the longest time without a step, from the start of the script on",
        "",
    ]
    return "\n".join(lines)
