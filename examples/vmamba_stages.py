"""SLWS on a hierarchical model with (B, H, W, C) features, as VMamba has: one schedule across its stages."""

import torch
from torch import nn

import slws


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(dim), nn.Linear(4 * dim, dim)

    def forward(self, x):  # (B, H, W, C), scanned along rows and columns, both ways
        h = self.norm(x)
        scans = [h.cumsum(1), h.cumsum(2), h.flip(1).cumsum(1).flip(1), h.flip(2).cumsum(2).flip(2)]
        return x + self.proj(torch.cat(scans, -1) / h.shape[1])


class Stage(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.down, self.blocks = nn.Linear(2 * dim, dim), nn.Sequential(*(Block(dim) for _ in range(depth)))

    def forward(self, x):  # halves H and W, doubles C
        return self.blocks(self.down(torch.cat([x[:, ::2, ::2], x[:, 1::2, 1::2]], -1)))


model = nn.Sequential(Stage(8, 2), nn.Linear(8, 16), Stage(16, 3), nn.Linear(16, 10))
slws.attach_slws(model, rate=0.5, layers="*.blocks", seq_dim=(1, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(20):
    loss = nn.functional.cross_entropy(model(torch.randn(4, 16, 16, 8)).mean((1, 2)), torch.arange(4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
slws.describe(model)
