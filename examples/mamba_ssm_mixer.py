"""SLWS on mamba-ssm's MixerModel, whose blocks pass a (hidden, residual) pair.

Without mamba-ssm, `tests/slws/mamba_ssm_source.py` lends its Python source with a scan in plain PyTorch.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import slws

try:
    from mamba_ssm.models.mixer_seq_simple import MixerModel
except ImportError:
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "slws"))
    from mamba_ssm_source import MixerModel

device = "cuda" if torch.cuda.is_available() else "cpu"
model = MixerModel(d_model=32, n_layer=4, d_intermediate=0, vocab_size=64, device=device)
head = nn.Linear(32, 2, device=device)
slws.attach_slws(model, rate=0.5)

optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
ids, labels = torch.randint(64, (4, 16), device=device), torch.tensor([0, 1, 0, 1], device=device)
for _ in range(10):
    loss = nn.functional.cross_entropy(head(model(ids).mean(1)), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
slws.describe(model)
