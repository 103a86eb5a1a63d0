"""SLWS on a plain nn.ModuleList: bidirectional scans in a dozen lines."""

import torch
from torch import nn

import slws


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.inner(self.norm(x)).sigmoid()
        return x + self.outer((h.cumsum(1) + h.flip(1).cumsum(1).flip(1)) / h.shape[1])


class Model(nn.Module):
    def __init__(self, dim=32, depth=4):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(dim) for _ in range(depth)), nn.Linear(dim, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


model = Model()
slws.attach_slws(model, rate=0.5)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(20):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16, 32)), torch.randint(10, (8,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
slws.describe(model)
