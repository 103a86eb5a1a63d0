"""SLWS on Hugging Face's Mamba2Model with activation checkpointing, as an encoder with a classifier on top."""

import torch
from torch import nn
from transformers import Mamba2Config, Mamba2Model

import slws

config = Mamba2Config(
    vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=8
)
model, head = Mamba2Model(config), nn.Linear(32, 2)
slws.attach_slws(model, rate=0.5)

model.train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
ids, labels = torch.randint(64, (4, 16)), torch.tensor([0, 1, 0, 1])
for _ in range(10):
    loss = nn.functional.cross_entropy(head(model(ids).last_hidden_state.mean(1)), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
slws.describe(model)
