"""A training script for torchrun, as it is: DistributedDataParallel, a DistributedSampler, its own loop."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness import probe  # for its learning curve alone; outside a trial it does nothing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    held_out = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1)).to(device)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, options.batch_size, sampler=sampler, drop_last=True)
    width = options.width
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if options.evaluate:
            with probe.pause(), torch.no_grad():  # evaluation is no time of training
                error = nn.functional.mse_loss(model.module(held_out), held_out.sin().sum(dim=1, keepdim=True))
            probe.report(train_loss=loss, val_loss=error, epoch=epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
