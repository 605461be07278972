"""The questions that the driver asks the agents of the nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from harness.launch.ray.cluster import Cluster
from harness.system.signals import interrupted

ANSWER_S = 15.0
"""Timeout of a node's answer about its processes."""
HURRY_S = 3.0
"""The same after an interruption, which may have ended Ray's own processes too."""


def patience() -> float:
    """Return the timeout of an answer."""
    return HURRY_S if interrupted() else ANSWER_S


def ask_agents(cluster: Cluster, question: str, things: Sequence[tuple[str, object]]) -> list[Any]:
    """Return one answer a (node id, subject), in order, from one question a node; None if a node does not answer.

    An agent that has died on a live node is replaced, and the new one asked; if that dies too, or the node is gone,
    the agent counts as lost and is not asked again.
    """
    by_node: dict[str, list[int]] = {}
    for place, (node_id, _) in enumerate(things):
        by_node.setdefault(node_id, []).append(place)
    asked = {node: [things[place][1] for place in places] for node, places in by_node.items()}
    given, dead = _answers(cluster, question, asked)
    if dead and not interrupted():  # else Ray itself may be ending
        replaced = _within(patience(), lambda: cluster.replace_agents(dead)) or []
        again, dead_again = _answers(cluster, question, {node: asked[node] for node in replaced})
        for node in dead:
            if node not in replaced or node in dead_again:  # a new one that is only slow is asked again
                cluster.agents.pop(node, None)
        given |= again
    answers: list[Any] = [None] * len(things)
    for node, from_node in given.items():
        for place, answer in zip(by_node[node], from_node or [], strict=False):
            answers[place] = answer
    return answers


def _answers(cluster: Cluster, question: str, asked: Mapping[str, list[object]]) -> tuple[dict[str, Any], list[str]]:
    """Return the answers of these nodes' agents, and the nodes whose agent is dead."""
    given, dead = {}, []
    references = {
        node: getattr(cluster.agents[node], question).remote(about)
        for node, about in asked.items()
        if node in cluster.agents
    }
    for node, reference in references.items():
        try:
            given[node] = ray.get(reference, timeout=patience())
        except ray.exceptions.ActorDiedError:
            dead.append(node)
        except ray.exceptions.RayError:
            continue
    return given, dead


def _within(seconds: float, work: Callable[[], list[str]]) -> list[str] | None:
    """Return the result; None if the work fails or takes longer, as Ray's own requests do once its head is gone."""
    given: list[list[str]] = []

    def run() -> None:
        with suppress(Exception):
            given.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return given[0] if given else None
