"""Claims about devices: numbers, copies, batches of every kind, FLOPs and the measured peak."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves, tree_map

from harness.config.known_hardware import peak_flops
from harness.doctor import communication, placement
from harness.doctor.subject import Subject
from harness.launch.agent import describe_node
from harness.launch.worker import gpus_by_number
from harness.measure.flops import count_flops, measured_peak
from harness.train import workloads
from harness.train.transfer import to_device
from harness.train.workloads.image_classification import ImageClassification
from harness.train.workloads.language_model import LanguageModel
from tests.gpu.setting import cell_of, need_cuda, one_rank
from tests.gpu.verdict import NotRun, Verdict, judged

CPU = torch.device("cpu")


def pci_addresses(device: torch.device) -> Verdict:
    """Every GPU has a PCI address, by which it is numbered as nvidia-smi does; a node has their names and memory."""
    need_cuda(device)
    everyone = list(range(torch.cuda.device_count()))
    found = [gpu.index for gpu in gpus_by_number(everyone)]
    known = map(torch.cuda.get_device_properties, everyone)
    here, node = {gpu.name: gpu.total_memory for gpu in known}, describe_node("here", "127.0.0.1")
    same = (node.gpu_model, node.gpu_memory_bytes) == (" + ".join(sorted(here)), min(here.values()))
    text = f"by address: {', '.join(map(str, found))}; {node.gpu_model}, {node.gpu_memory_bytes} bytes"
    return judged(sorted(found) == everyone and same, text)


def copies_arrive(device: torch.device) -> Verdict:
    """Copies between the host and the GPUs, and from GPU to GPU, are identical bit for bit."""
    need_cuda(device)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    moved = communication.corrupt_pairs([CPU, *gpus], communication.SIZES, 2, lambda tensor, to: tensor.to(to))
    direct = communication.corrupt_pairs(gpus, communication.SIZES, 2, communication.directly)
    text = f"{len(gpus)} GPUs and the host" + (f"; corrupt: {[*moved, *direct]}" if moved or direct else "")
    return judged(not moved and not direct, text)


class WithTo:
    """An object that is no tensor and has .to(), as a graph batch of PyG."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> WithTo:
        return WithTo(self.x.to(device, non_blocking=non_blocking))


Pair = namedtuple("Pair", "x y")


def batches_move(device: torch.device) -> Verdict:
    """Batches of every kind that collate functions return reach the device, and keep their type."""
    x = torch.arange(6.0)
    batches: dict[str, Any] = {"tensor": x, "list": [x, x], "tuple": (x, "text"), "dict": {"x": x}}
    batches |= {"namedtuple": Pair(x, x), "UserDict": UserDict(x=x), "object with to()": WithTo(x)}
    batches["PackedSequence"] = pack_sequence([x[:3], x[:2]])
    wrong = []
    for name, batch in batches.items():
        try:
            moved = to_device(batch, device, non_blocking=False)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}")
            continue
        if type(moved) is not type(batch) or any(tensor.device != device for tensor in _tensors(moved)):
            wrong.append(name)
    return judged(not wrong, f"{len(batches)} kinds" + (f"; not moved: {', '.join(wrong)}" if wrong else ""))


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, PackedSequence):
        return [batch.data]
    if isinstance(batch, WithTo):
        return [batch.x]
    plain = dict(batch) if isinstance(batch, UserDict) else batch
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def lstm_devices(device: torch.device) -> Verdict:
    """The doctor's check of devices finds no fault in cuDNN's packed LSTM."""
    grid = {"data": "stdlib", "model": "small", "per_device_batch_size": 16}
    options = {"longest": 64, "text_bytes": 20_000}
    cell = cell_of(device, grid, workload="padded_sequences", workload_options=options)
    workload = workloads.build(cell)
    subject = Subject(cell, workload, workload.datasets(), 0, one_rank(device))
    seen = placement.observe(subject)
    return judged(not seen, "no fault is found" if not seen else str(seen))


COUNTED: Mapping[str, tuple[Any, Any]] = {
    "ResNet-18": (
        ImageClassification(model="resnet18", data="synthetic"),
        (torch.randn(2, 3, 32, 32), torch.tensor([0, 1])),
    ),
    "GPT": (LanguageModel(model="mini", data="synthetic"), torch.randint(0, 256, (2, 257))),
}
"""Workloads whose FLOPs are counted, of convolutions and of attention, each with a batch."""


def flops_agree(device: torch.device) -> Verdict:
    """FLOPs counted on the device are those counted on the CPU; the count leaves the generator, and takes no memory."""
    cuda = device.type == "cuda"
    torch.ones(1, device=device)
    told, holds = [], True
    for name, (workload, batch) in COUNTED.items():
        here_batch = tree_map(lambda tensor: tensor.to(device), batch)
        state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if cuda else 0
        here = count_flops(workload, here_batch, device)
        more = torch.cuda.max_memory_allocated(device) - before if cuda else 0
        same_state = torch.equal(torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state(), state)
        there = count_flops(workload, batch, CPU)
        text = f"{name} {here.per_unit or 0:.10g} here, {there.per_unit or 0:.10g} on the CPU, {more / 2**20:.0f} MiB"
        told.append(text + (f"; {here.reason}" if here.reason else "") + ("" if same_state else "; generator changed"))
        holds = holds and here == there and here.per_unit is not None and same_state and more < MOST_COUNTING_BYTES
    return judged(holds, "; ".join(told))


MOST_COUNTING_BYTES = 2**20
"""The most device memory that a count takes; the models of COUNTED have more than 40 times as much."""


def peak_products(device: torch.device) -> Verdict:
    """The measured peak of every precision is 0.6 to 1.0 of the table's, and its memory is given back."""
    cuda = device.type == "cuda"
    names = ("fp32", "tf32", "bf16") if cuda else ("fp32",)
    for name in names:
        measured_peak(device, name, seconds=0.0)  # cuBLAS takes its workspace once
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    peaks = {name: measured_peak(device, name, seconds=0.1) for name in names}
    kept = torch.cuda.memory_reserved(device) - reserved if cuda else 0
    text = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in peaks.items())
    text += f" TFLOP/s; kept {kept / 2**20:.0f} MiB"
    if not cuda:
        return judged(all(peak > 0 for peak in peaks.values()), text, **peaks)
    model = torch.cuda.get_device_name(device)
    stated = {name: found.flops_per_s for name in names if (found := peak_flops(model, name))}
    if not stated and not kept:
        raise NotRun(f"the table of devices has no peak of {model}: {text}")
    ratios = {name: peaks[name] / stated[name] for name in stated}
    text += f"; {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())} of the table, bounds 0.6 to 1.0"
    return judged(not kept and all(0.6 <= ratio <= 1.0 for ratio in ratios.values()), text, **peaks)
