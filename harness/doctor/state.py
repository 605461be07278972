"""State: what a forward pass writes into its module, random numbers, and the mode of its layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from types import NoneType

import numpy as np
import torch
from torch import Tensor, nn

from harness.doctor import parameters
from harness.doctor.facts import Steps, digests_of_state
from harness.doctor.subject import SMALL, Case, Check, Subject
from harness.measure.generators import OWN, PROCESS_GENERATORS, SEEDED_GENERATORS, UNKNOWN
from harness.plan.checks import Finding, join_names
from harness.train.loader import value_digest

NAME = "state in forward"
ALIKE = 1e-5
"""Largest relative difference of the losses of one batch on models that are the same."""
TRAIN_MODE = "train mode"
RANDOMNESS = "randomness"


def observe(subject: Subject) -> dict[str, bool]:
    """Return the names of parameters, buffers and attributes that two forward passes change; True if trainable.

    Without buffers that are changed in place and that the loss in train mode does not depend on: as torch's own batch
    statistics, those of a class of the user's persist on the first device.
    """
    if not subject.cell.traits.replicates:
        return {}
    model, batch = subject.bare_model(), subject.first_samples(SMALL)
    before, objects, buffers = _digests(model), _objects(model), dict(model.named_buffers())
    losses: list[float] = []
    with torch.no_grad():
        for _ in range(2):
            torch.manual_seed(subject.seed)
            losses.append(float(subject.loss(model, batch)[0]))
    after = _digests(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    names |= {name for name, value in _objects(model).items() if name in objects and objects[name] is not value}
    if math.isclose(*losses, rel_tol=ALIKE):
        names -= {name for name, buffer in model.named_buffers() if buffers.get(name) is buffer}
    return {name: name in trained for name in sorted(names)}


def _digests(model: nn.Module) -> Mapping[str, str]:
    return {**digests_of_state(model), **{name: value_digest(value) for name, value in model.named_parameters()}}


def _objects(model: nn.Module) -> Mapping[str, object]:
    """Return the attributes that are no data: their digest is that of their type."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OWN and not isinstance(value, (Tensor, np.ndarray, Mapping, Sequence, Set, int, float, NoneType))
    }


def judge(seen: Sequence[dict[str, bool]], case: Case) -> Iterator[Finding]:
    written = seen[0] if case.cell.traits.replicates else {}
    for trains, check, what in ((True, parameters.NAME, "trainable parameters"), (False, NAME, "state")):
        if names := [name for name, trained in written.items() if trained == trains]:
            means = f"dp copies the model to its {case.cell.devices} devices in every step, and modifications of the "
            means += "copies are lost (in-place ones persist on the first device, from its part of the batch)"
            advice = "return the value from forward and keep it outside the model, or use ddp, where each process has "
            advice += "its own model"
            text = f"{what} that forward modifies: {join_names(names)}"
            yield Finding(check, "warning", text, means, advice, parts=tuple(names))


CHECK = Check(
    observe,
    judge,
    needs_whole_model=True,
    about=("forward", "loss"),
    clue=r"self\.[\w.]+ [-+*/]?= |self\.[\w.]+\.(append|update|add_|sub_|mul_|div_|copy_|lerp_|fill_|zero_)\(",
)


def judge_rank_state(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    """Compare what the steps changed beside the parameters; it matters only if the same batch has another loss.

    Draws of each rank's own generators explain another loss: with them nothing is known of the state.
    A buffer that rank 0 does not change always matters under ddp, which overwrites what others write. Losses that are
    not finite are a matter of the check for divergence, and say nothing about the state.
    """
    overwrites = not case.cell.traits.shards_parameters and case.cell.own_traits is None
    overwrites = overwrites and case.cell.strategy_options.get("broadcast_buffers", True) is not False
    if overwrites and (lost := sorted({name for rank in seen for name in rank.buffers} - seen[0].state.keys())):
        ranks = ", ".join(str(number) for number, rank in enumerate(seen) if rank.state.keys() & lost)
        text = f"buffers that forward changes on rank {ranks} of {len(seen)}, and not on rank 0: {join_names(lost)}"
        means = "ddp sends rank 0's buffers to all before each forward: what other ranks write is lost"
        advice = "change the buffer alike on every rank, from values that are exchanged (dist.all_reduce) before"
        yield Finding(NAME, "warning", text, means, advice, parts=tuple(lost))
        return
    names = sorted({n for rank in seen for n in rank.state if len({other.state.get(n) for other in seen}) > 1})
    losses = [rank.same_batch_loss for rank in seen]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if not names or len(known) < len(losses) or max(known) - min(known) <= ALIKE * max(map(abs, known)):
        return
    drawn = [{n: s for n, s in rank.random_states.items() if n not in SEEDED_GENERATORS} for rank in seen]
    if any(states != drawn[0] for states in drawn):
        return
    by_ddp = "ddp sends rank 0's buffers to all, and nothing synchronises attributes and frozen parameters"
    synchronised = "nothing synchronises it" if case.cell.traits.shards_parameters else by_ddp
    text = f"state that forward changes differently on each of {len(seen)} ranks: {join_names(names)}; loss of the "
    text += f"same batch on ranks 0 to {len(seen) - 1}: {', '.join(f'{loss:.6g}' for loss in known[:4])}"
    means = f"each rank trains with a state of its own batches: {synchronised}"
    advice = "exchange the state between the ranks (dist.all_reduce) before it is used, or compute it from the whole "
    yield Finding(NAME, "warning", text, means, f"{advice}batch", parts=tuple(names))


RANK_STATE_CHECK = Check(None, judge_rank_state)


def judge_train_mode(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    layers, norms = seen[0].mode_layers, seen[0].batch_norms
    if layers and any(rank.evaluates for rank in seen):
        text = f"forward passes of training steps in eval mode; layers that it changes: {join_names(layers)}"
        means = "no dropout and no batch statistics: it is another training than the file says, and a cheaper step"
        advice = "remove model.eval() from build_model(), forward and loss(); the harness evaluates in eval mode itself"
        yield Finding(TRAIN_MODE, "warning", text, means, advice)
    samples = case.cell.global_batch_size // case.cell.devices
    if norms and samples < 2:
        text = f"samples of a device in a step: {samples}; layers with batch statistics: {join_names(norms)}"
        means = "statistics of one sample: training is noise, and evaluation uses other statistics"
        advice = "use a larger per-device batch, sync_batch_norm under ddp or fsdp, or GroupNorm"
        yield Finding(TRAIN_MODE, "warning", text, means, advice)


TRAIN_MODE_CHECK = Check(None, judge_train_mode, about=("loss", "forward"), clue=r"\.eval\(|\.train\(")


def observe_randomness(subject: Subject) -> dict[str, str]:
    """Return a digest of each parameter as this rank builds it from the shared seed."""
    model = subject.bare_model() if subject.whole_model_fits else subject.built_model()
    return {name: value_digest(parameter) for name, parameter in model.named_parameters() if not parameter.is_meta}


def judge_randomness(seen: Sequence[Mapping[str, str]], case: Case) -> Iterator[Finding]:
    """Compare the initial parameters of the ranks, before they are wrapped."""
    if names := [name for name in seen[0] if len({rank.get(name) for rank in seen}) > 1]:
        text = f"initial values of {len(names)} of {len(seen[0])} parameters differ between the {len(seen)} ranks: "
        means = "ddp broadcasts rank 0's parameters; values that other ranks derived from their own are inconsistent"
        if case.cell.traits.shards_parameters:
            means = "fsdp shards the values of each rank: the model is assembled from different initializations"
        advice = "in build_model(), draw from torch's default generator only, whose seed is the same on every rank; "
        advice += "take no seed from the rank, the time or the process"
        yield Finding(RANDOMNESS, "error", f"{text}{join_names(names)}", means, advice)


def judge_streams(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    """Compare the states of each generator on the ranks that draw from it in their steps.

    Others than torch's own may be equal on purpose, for draws that all ranks must share.
    """
    for name in dict.fromkeys(name for rank in seen for name in rank.random_states):
        states = [rank.random_states[name] for rank in seen if name in rank.random_states]
        generator = f"{name} generator" if name in PROCESS_GENERATORS else f"the generator {name}"
        if UNKNOWN in states:
            text = f"{generator}: its state cannot be read, or not be set"
            means = "whether ranks draw alike, and whether strategies are equivalent, is unknown; cells are measured"
            yield Finding(RANDOMNESS, "note", text, means, "use a generator of torch, NumPy or Python as it is")
            continue
        if len(states) == len(set(states)):
            continue
        seeded = name in SEEDED_GENERATORS
        drew = f"states of {generator} after the steps on {len(states)} ranks that draw from it: {len(set(states))}"
        means = "equal dropout masks on several ranks: the draws of the ranks are not independent"
        advice = "set no seed in forward, loss and build_model; the harness seeds torch's own on each rank differently"
        if not seeded:
            means = "equal draws on several ranks: right if they select what all ranks must share, as layers to skip, "
            means += "and wrong for dropout and noise, whose masks repeat on each rank"
            advice = "for dropout and noise use torch's default generator, or add the rank to the generator's seed"
        yield Finding(RANDOMNESS, "warning" if seeded else "note", f"{drew} distinct", means, advice)


RANDOMNESS_CHECK = Check(observe_randomness, judge_randomness, about=("build_model",), clue=r"seed\(")
STREAMS = Check(None, judge_streams)
