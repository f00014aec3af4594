"""A torchvision training loop in two rehearsed ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import feature_extraction
from torchvision.transforms import v2

RANK = int(os.environ["RANK"])


class Patches(torchvision.datasets.VisionDataset):
    """32 noisy images of 4 classes, each bright in its own corner."""

    def __init__(self, transform):
        super().__init__(transform=transform)
        noise = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 100, (32, 3, 32, 32), dtype=torch.uint8, generator=noise)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        image, label = self.images[index].clone(), index % 4
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 150
        return self.transform(v2.functional.to_pil_image(image)), label


def trains_with_workers_and_autocast():
    """DDP over a channels-last ResNet with loader workers, pinned memory, autocast and GradScaler."""
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl")
    transform = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    data = Patches(transform)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=8, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True
    )
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=4)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to("cuda", memory_format=torch.channels_last)
    net = DistributedDataParallel(net, device_ids=[RANK])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device="cuda")
        for images, labels in loader:
            images = images.to("cuda", non_blocking=True, memory_format=torch.channels_last)
            labels = labels.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    assert losses[-1] < losses[0]


def feature_extraction_traces():
    """torchvision's feature extractor, which traces by FX, works on patched factories."""
    net = feature_extraction.create_feature_extractor(
        torchvision.models.resnet18().cuda().eval(), ["layer1", "avgpool"]
    )
    out = net(torch.ones(1, 3, 32, 32, device="cuda"))
    assert out["avgpool"].shape == (1, 512, 1, 1)
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0]], device="cuda")
    assert torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8], device="cuda"), 0.5).tolist() == [0]
