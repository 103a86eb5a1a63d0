"""SLWS on mambapy (mamba.py): a sequence classifier; its step-by-step decoding stays as it is."""

import torch
from mambapy.mamba import Mamba, MambaConfig
from torch import nn

import slws

model, head = Mamba(MambaConfig(d_model=32, n_layers=4)), nn.Linear(32, 2)
handle = slws.attach_slws(model, rate=0.5, warmup_epochs=2)

optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
x, labels = torch.randn(4, 16, 32), torch.tensor([0, 1, 0, 1])
for epoch in range(4):
    handle.set_epoch(epoch)
    for _ in range(5):
        loss = nn.functional.cross_entropy(head(model(x).mean(1)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
slws.describe(model)

model.eval()
caches = [(None, torch.zeros(4, 64, 3)) for _ in model.layers]
stepped = []
for t in range(16):
    y, caches = model.step(x[:, t], caches)
    stepped.append(y)
torch.testing.assert_close(torch.stack(stepped, 1), model(x), rtol=1e-4, atol=1e-4)
