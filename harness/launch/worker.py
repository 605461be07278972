"""The trials of a worker group on one rank, one after the other, each reported to the driver."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from harness.config.script import ScriptExperiment
from harness.doctor.examine import DoctorTrialFailed, run_doctor_trial
from harness.doctor.gate import SKIP_RULES, skip_reason
from harness.launch.protocol import GroupStarted, Job, Measured, TrialStarted
from harness.launch.startup import Received, Registration
from harness.launch.subgroups import Send, Subgroups
from harness.measure import environment, scenarios
from harness.measure.links import run_links_trial
from harness.measure.nccl_log import keep_log, logged_network
from harness.measure.scenarios import TrialContext
from harness.measure.script.child import COUNTER_VARIABLE, STACK_VARIABLE
from harness.measure.script.following import script
from harness.measure.script.loop import loop
from harness.measure.script.parent import ScriptFailed
from harness.plan.cell import place
from harness.plan.known_errors import with_remedy
from harness.plan.rows import Outcome, RankFacts, RankPlace, RankRow, TrialFacts
from harness.plan.run_environment import GroupRank, NodeEnvironment
from harness.plan.trial import SkipTrial, Trial, TrialResult, WorkerGroup, skipped
from harness.system import sanitize
from harness.system.process import step_counter
from harness.system.user_code import CodeVersion
from harness.train.ranks import Cache, Ranks, processors

MOST_DETAIL = 100_000
"""Characters of a traceback that are kept, from its end."""
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "_allocation_failed",  # the end of cuDNN 9's names for a device's and the host's memory
)
"""Lower-case messages of an allocation that failed."""
PERHAPS_OUT_OF_MEMORY = (
    "cublas_status_not_initialized",
    "unable to find an engine to execute this computation",
)
"""Lower-case messages of libraries that a GPU without free memory causes, but not it alone."""
FULL_BELOW = 0.03
"""Part of a GPU's memory: if less is free, it is full."""
LARGE_BLOCK = 2**25 - 2**16
"""Bytes of the largest block that raises the C library's thresholds, less what it adds."""
CHECKED = "version"
"""The key of a process's cache for the number of ranks for which its version of the user's code was checked last."""
SCENARIOS: Mapping[str, Callable[[TrialContext], TrialResult]] = {
    "throughput": scenarios.throughput,
    "convergence": scenarios.convergence,
    "profile": scenarios.profile,
    "equivalence": scenarios.equivalence,
    "doctor": run_doctor_trial,
    "links": run_links_trial,
}
"""The function of each ``Trial.scenario``; it returns the result of this rank, without times and ranks."""


class TrialFailed(Exception):
    """A trial failed on this rank and was reported. The group ends; fresh processes run the rest."""


def run_rank(job: Job, process: Registration, send: Callable[[Received], bool], connect: Callable[[], Ranks]) -> bool:
    """Register this process, connect it to the other ranks, run the group's trials; return False if refused."""
    with Path(process.stack).open("w") as stack, step_counter(Path(process.counter)) as advance:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.environ.update({COUNTER_VARIABLE: process.counter, STACK_VARIABLE: process.stack})
        if not job.experiment.programs:  # which have processes, and logs, of their own
            keep_log(Path(process.counter).parent)
        try:
            if not send(process):
                return False  # the run was given up while this process started
            ranks = connect()
            if not process.connected:
                send(replace(process, connected=True))
            run_group(job, ranks, send, advance, Path(process.counter).with_name("trials"))
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    return True


def devices_of(
    group: WorkerGroup, local_rank: int, gpus: Sequence[torch.device], first: int = 0
) -> tuple[torch.device, ...]:
    """Return the devices of one worker of a node: the GPUs that are named, or the next of ``gpus`` from the first on.

    A GPU that is shared occurs several times.
    """
    count = group.placement.devices_per_worker
    if group.device == "cpu":
        return tuple(torch.device("cpu") for _ in range(count))
    if not gpus:
        raise RuntimeError("no GPU is visible to torch in this process")
    if ids := group.placement.ids_of(local_rank):
        return tuple(gpus_by_number(ids))
    return tuple(gpus[(first + i) % len(gpus)] for i in range(count))


def gpus_by_number(numbers: Sequence[int]) -> list[torch.device]:
    """Return the GPUs of these numbers of the node, all of which are visible, in whatever order Ray lists them.

    nvidia-smi numbers GPUs by their PCI address. Raise RuntimeError if one is not visible.
    """
    places = range(torch.cuda.device_count())
    by_address = sorted(places, key=_pci_address)
    if max(numbers) >= len(by_address):
        raise RuntimeError(
            f"GPU {max(numbers)} is asked for, but this process sees {len(by_address)} of its node "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
        )
    return [torch.device("cuda", by_address[number]) for number in numbers]


def _pci_address(place: int) -> tuple[int, int, int]:
    properties = torch.cuda.get_device_properties(place)
    domain, bus, device = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    return domain, bus, device


def run_group(job: Job, ranks: Ranks, send: Send, advance: Callable[[], None], store: Path) -> None:
    """Run the group's trials; raise TrialFailed at the first that fails on this rank.

    ``store``: a file that only this user can open, for a group whose trials run on some of its ranks.
    """
    version = job.version_of(ranks.rank)
    _prepare_process(job, version)
    cache: Cache = {}
    _preload(job, ranks, cache)
    # programs use the GPUs alone, and connect their ranks themselves
    link = _announce(ranks, send, None if job.experiment.programs else logged_network(ranks))
    subgroups = Subgroups(job, ranks, store) if job.group.is_shared else None

    def work(trial: Trial, those: Ranks, send: Send, let_others_run: Callable[[], None] | None) -> bool:
        those = replace(those, devices=_devices_of(trial, ranks))
        context = TrialContext(trial, job.experiment, those, advance, cache, let_others_run)
        try:
            return _run(context, version, send, link)
        except BaseException as error:
            send(failure(trial.id, ranks.rank, error))
            raise TrialFailed(f"{trial.id} on rank {ranks.rank}: {type(error).__name__}") from None

    for turn in job.group.turns():
        if not (subgroups.run(turn, work, send, cache) if subgroups else work(turn[0], ranks, send, None)):
            return


def _devices_of(trial: Trial, ranks: Ranks) -> tuple[torch.device, ...]:
    """Return the devices of a rank: on CPU slots as many as the trial's placement has, else those of the group."""
    on_cpu = ranks.devices[0].type == "cpu"
    return ranks.devices[:1] * place(trial.cell).devices_per_worker if on_cpu else ranks.devices


def _run(context: TrialContext, version: CodeVersion | None, send: Send, link: str | None) -> bool:
    """Run a trial on its ranks, and report its result; return whether the processes can run another one."""
    trial, ranks = context.trial, context.ranks
    try:
        if not ranks.broadcast(send(TrialStarted(trial.id)) if ranks.first else None):
            return False
        if version and context.cache.get(CHECKED) != ranks.world_size:  # for each size modules are imported anew
            version.check()
            context.cache[CHECKED] = ranks.world_size
        result = _run_trial(context, send, link)
    except SkipTrial as skip:
        result = skipped(trial, skip.reason)
    if ranks.first:
        send(result)
    if context.device_failed:  # the next trial would fail in its place: fresh processes run the rest
        return False
    _release(compiled=trial.cell.compile)
    return True


def failure(trial_id: str, rank: int, error: BaseException) -> TrialResult:
    """Return the result of a trial that raised: rank, error and traceback."""
    # redacted here too, and before it is cut: another node may have variables that the driver has not
    trace = sanitize.redact_text("".join(traceback.format_exception(error))[-2 * MOST_DETAIL :])[-MOST_DETAIL:]
    facts = TrialFacts()
    if isinstance(error, DoctorTrialFailed):  # what the examination had found before, and the error of the user's code
        facts, error = error.facts, error.origin
    kind = type(error).__name__
    if isinstance(error, ScriptFailed):  # in its own process, whose output has the traceback
        trace, kind = error.output, error.kind
    message = sanitize.redact_text(" ".join(_message(error)[:MOST_DETAIL].split()))[:500]
    return TrialResult(
        trial_id,
        outcome_of(error),
        with_remedy(f"{kind} on rank {rank}: {message}", _message(error)[:MOST_DETAIL]),
        error_type=kind,
        error_rank=rank,
        detail=trace,
        facts=facts,
    )


def outcome_of(error: BaseException) -> Outcome:
    """Return oom if device or host memory ran out, else error."""
    text = _message(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in OUT_OF_MEMORY):
        return "oom"
    return "oom" if any(sign in text for sign in PERHAPS_OUT_OF_MEMORY) and _is_full() else "error"


def _is_full() -> bool:
    """Return whether hardly any memory is free on a GPU that this process has allocated memory on."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    with contextlib.suppress(RuntimeError):  # after some errors CUDA answers nothing
        used = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]
        memories = [torch.cuda.mem_get_info(number) for number in used]
        return any(free < FULL_BELOW * total for free, total in memories)
    return False


def _message(error: BaseException) -> str:
    """Return an exception's message; its __str__ may raise too."""
    try:
        return str(error)
    except Exception as worse:
        return f"(no message: its __str__ raised {type(worse).__name__})"


def _prepare_process(job: Job, version: CodeVersion | None) -> None:
    """Set the same number of threads for every strategy, and the import path of the user's code."""
    torch.set_num_threads(job.threads_per_device)
    if job.group.device == "cpu":
        _keep_freed_memory()
    if version:
        version.use()
    elif job.import_path and job.import_path not in sys.path:
        sys.path.insert(0, job.import_path)
    gc.collect()
    gc.freeze()  # what was imported stays; later collections do not walk it


def _keep_freed_memory() -> None:
    """Have the C library keep freed memory for its next use, as it does once a process has freed a large block.

    Before, it gives it back to the system, which costs a fault a page at the next use: the first trial of a process
    would be slower than the others (mallopt(3): M_MMAP_THRESHOLD).
    """
    torch.empty(LARGE_BLOCK, dtype=torch.uint8)  # and freed


@contextlib.contextmanager
def _without_denormals() -> Iterator[None]:
    """Let denormal numbers be zero in a block, at whose end a step on the CPU then takes as long as before.

    Momenta and gradients shrink to them in a network that knows its few data by heart, and each takes up to a hundred
    times as long as another number. What trains to a result keeps them.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _preload(job: Job, ranks: Ranks, cache: Cache) -> None:
    """Import and read what the first trial needs, so that it costs no more than the others.

    An error here occurs again in the trial, which records it.
    """
    first = job.group.trials[0]
    if isinstance(job.experiment, ScriptExperiment) or first.scenario == "links":
        return  # which need neither workload nor data
    if len(job.group.variants) > 1:
        return  # of which each has collectives of its own
    with contextlib.suppress(Exception, SystemExit):
        TrialContext(first, job.experiment, ranks, lambda: None, cache).workload()
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()  # torch's first imports its compiler


def _announce(ranks: Ranks, send: Send, nccl_network: str | None) -> str | None:
    """Send the ranks and one environment a node, from rank 0; return the link between the ranks' GPUs on each node."""
    row: GroupRank = {**_place_of(ranks), "pid": os.getpid(), "devices": [str(device) for device in ranks.devices]}
    here = environment.capture_environment(ranks.node_id, ranks.devices)
    seen = ranks.gather_to_first((row, {**here, "nccl_network": nccl_network} if nccl_network else here))
    if ranks.first:
        nodes = {facts["node_id"]: facts for _, facts in seen}
        send(GroupStarted(tuple(nodes.values()), tuple(row for row, _ in seen)))
    return ranks.broadcast(_link([facts for _, facts in seen]))


def _link(environments: Sequence[NodeEnvironment]) -> str | None:
    """Return the links between the ranks' GPUs inside each node; None if there are none, or one is unknown."""
    found: list[str] = []
    for node_id in dict.fromkeys(facts["node_id"] for facts in environments):
        here = [facts for facts in environments if facts["node_id"] == node_id]
        links = environment.links_between(
            here[0]["topology"], [device["uuid"] for f in here for device in f["devices"]]
        )
        if links is None:
            return None
        found += links
    return environment.format_links(found)


def _run_trial(context: TrialContext, send: Send, link: str | None) -> TrialResult:
    started_at, start = time.time(), time.perf_counter()
    ranks = context.ranks
    # the result would have the name of the requested placement
    got = (ranks.world_size * len(ranks.devices), len(set(ranks.gather(ranks.node_id))))
    asked = (context.trial.cell.devices, context.trial.cell.nodes)
    if got != asked:
        raise RuntimeError(
            f"placed on {got[0]} devices of {got[1]} nodes, asked for {asked[0]} devices of {asked[1]} nodes"
        )

    def complete(result: TrialResult) -> TrialResult:
        rows = tuple(ranks.gather_to_first(_rank_row(ranks, context.rank_facts)))
        trial_s = time.perf_counter() - start - context.others_s
        parts = {**context.parts, "other": max(0.0, trial_s - sum(context.parts.values()))}
        facts: TrialFacts = {**result.facts, "link": link}
        return replace(result, started_at=started_at, trial_s=trial_s, parts=parts, ranks=rows, facts=facts)

    def keep(result: TrialResult) -> None:
        measured = complete(result)
        if ranks.first:
            send(Measured(measured))

    context.keep = keep
    on_cpu, is_program = ranks.devices[0].type == "cpu", isinstance(context.experiment, ScriptExperiment)
    flushes = context.trial.timed and on_cpu and not is_program
    with computing_with(context.trial.threads), _without_denormals() if flushes else contextlib.nullcontext():
        return complete(run_scenario(context))


@contextlib.contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Give torch this many CPU threads for a block, or as many as there are processors for it; 0: as many as it has."""
    if not threads:
        yield
        return
    own = torch.get_num_threads()
    torch.set_num_threads(min(threads, processors()))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def run_scenario(context: TrialContext) -> TrialResult:
    """Run a trial's scenario; raise SkipTrial if the doctor has refused the cell in this process."""
    trial = context.trial
    if trial.trains and (reason := skip_reason(context.cache.get(SKIP_RULES, ()), trial.cell, trial.scenario)):
        raise SkipTrial(reason)
    if isinstance(context.experiment, ScriptExperiment):
        return script(context) if context.experiment.script else loop(context)
    return SCENARIOS[trial.scenario](context)


def _rank_row(ranks: Ranks, facts: RankFacts) -> RankRow:
    return {
        **_place_of(ranks),
        "devices": ", ".join(str(device) for device in ranks.devices),
        "device_model": " + ".join(sorted({environment.describe_device(device)["model"] for device in ranks.devices})),
        "threads": torch.get_num_threads(),
        **facts,
    }


def _place_of(ranks: Ranks) -> RankPlace:
    place = {name: getattr(ranks, name) for name in ("rank", "local_rank", "node_rank", "node_id", "address")}
    return cast("RankPlace", {**place, "host": socket.gethostname()})


def _release(*, compiled: bool) -> None:
    """Free the memory of the last trial, so that the next one starts with the same amount.

    ``compiled``: whether it compiled its model; the compiler keeps the code, and with it the memory of CUDA graphs.
    """
    if compiled:
        torch.compiler.reset()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # freed pages go back to the system, if the C library can
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
