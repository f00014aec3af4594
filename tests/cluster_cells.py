"""The cells that every cluster has to run as this machine does."""

SETUP = """
import taas, torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(7)
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
train = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=16, shuffle=True)
taas.register(train)
"""
TRAIN = """#!g2.8
#pragma taas --gpus 16 --cpus 2
import os, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.manual_seed(1)
net = DistributedDataParallel(nn.Linear(64, 10).to("cuda"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x.to("cuda")), y.to("cuda"))
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), "net.pt")
"""
NEXT = "#!g2.8\n#pragma taas --gpus 16\nimport os\nprint('world', os.environ['WORLD_SIZE'])"
WEIGHTS = "torch.load('net.pt')['weight'].tolist()"
