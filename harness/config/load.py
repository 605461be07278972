"""Experiments from files, run folders and mappings. Loading one probes, imports and downloads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from harness.config import yaml_source
from harness.config.experiment import Experiment
from harness.config.problems import validate
from harness.config.script import ScriptExperiment
from harness.errors import ExperimentError


def load_experiment(path: Path) -> Experiment:
    """Return the experiment in a file; raise ExperimentError, which lists every problem with its place."""
    content, duplicates = yaml_source.read_mapping(path)
    return parse_experiment(content, source=str(path), home=path.resolve().parent, problems=duplicates)


def load_resolved(path: Path, *, times: int) -> Experiment:
    """Return the experiment in a run folder, whose files may be larger by this factor; raise ExperimentError."""
    text = yaml_source.read_text(path, times * yaml_source.MAX_BYTES)
    try:
        return _resolved(text, times)
    except ExperimentError as error:
        raise ExperimentError(str(path), error.problems) from None


@lru_cache(maxsize=8)
def _resolved(text: str, times: int) -> Experiment:
    """Return the experiment in a text. Runs that are compared often have the same one, which takes 30 ms to read."""
    return parse_experiment(yaml_source.parse_mapping(text, source="", times=times), source="")


def parse_experiment(
    content: Mapping[str, object], *, source: str, home: Path | None = None, problems: Sequence[str] = ()
) -> Experiment:
    """Return the experiment in a mapping; raise ExperimentError, whose message names ``source``.

    Relative paths are resolved against ``home``; without ``home`` they stay relative. ``problems``: those found before.
    """
    kind = ScriptExperiment if {"script", "loop"} & {*content} else Experiment
    experiment, more = validate(kind, content, {"home": home})
    if experiment is None or problems:
        raise ExperimentError(source, [*problems, *more])
    return experiment
