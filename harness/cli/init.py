"""``harness init``: a commented experiment file for a question, made from templates/."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from harness.cli.arguments import command, show
from harness.errors import ExperimentError, nearest
from harness.system.files import PACKAGE_FOLDER

TEMPLATES = PACKAGE_FOLDER / "cli" / "templates"
PLACEHOLDER = "FILE"
"""Stands for the experiment file's path in the comments of a template."""


class Question(NamedTuple):
    """A question with the name of the file that answers it, and of a module that belongs beside the file."""

    text: str
    file: str
    module: str | None = None


QUESTIONS: Mapping[str, Question] = {
    "scaling": Question("How does training scale with the number of devices?", "scaling.yaml"),
    "strategies": Question("Which strategy is the fastest on the same devices?", "strategies.yaml"),
    "batch": Question("Which batch size?", "batch.yaml"),
    "loader": Question("Does training wait for its data?", "loader.yaml"),
    "precision": Question("What does a lower precision gain?", "precision.yaml"),
    "convergence": Question("How well does training learn?", "convergence.yaml"),
    "own-workload": Question("How does a model of my own scale?", "my_workload.yaml", "my_workload.py"),
}

QuestionArgument = Annotated[
    str | None, typer.Argument(metavar="|".join(QUESTIONS), help="The question. Without one: the list of them.")
]
OutputFile = Annotated[
    Path | None, typer.Option(help="The file to write; by default named after the question, in the current folder.")
]


@command
def init_command(question: QuestionArgument = None, output: OutputFile = None) -> int:
    """Write a commented experiment file that answers a question and runs as it stands; replaces no file."""
    if question is None:
        show("harness init QUESTION writes a commented experiment file for one of these:")
        for name, known in QUESTIONS.items():
            show(f"  {name:<14}{known.text}")
        return 0
    if question not in QUESTIONS:
        raise ExperimentError("harness init", [f"got {question!r}; {nearest(question, QUESTIONS)}"])
    file = write_template(QUESTIONS[question], output)
    path = shlex.quote(str(file))
    show(f"Wrote {file}. Next: harness plan {path}, then harness run {path}")
    return 0


def write_template(question: Question, output: Path | None) -> Path:
    """Write the question's file, and its module beside it; return the file. Raises ExperimentError, writing nothing."""
    file = output or Path(question.file)
    if not str(file).isprintable():
        raise ExperimentError("--output", [f"got {str(file)!r}; allowed: a name of printable characters"])
    if question.module and file == file.parent / question.module:
        raise ExperimentError("--output", [f"got {file}, which is the name of the module beside it; give a .yaml file"])
    text = (TEMPLATES / question.file).read_text(encoding="utf-8")
    contents = {file: text.replace(f" {PLACEHOLDER} ", f" {shlex.quote(str(file))} ")}
    if question.module:
        module = (TEMPLATES / f"{question.module}.txt").read_text(encoding="utf-8")
        contents[file.parent / question.module] = module
    for path in contents:
        if os.path.lexists(path):
            other = "another file" if path == file else "a file in another folder"
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
    return file
