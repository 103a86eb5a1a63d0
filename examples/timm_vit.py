"""SLWS on a timm Vision Transformer; any timm model whose blocks take (B, L, C) goes the same way."""

import timm
import torch
from torch import nn

import slws

model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10)
handle = slws.attach_slws(model, rate=0.5, keep_first=1)  # the class token stays; the paper moves it too

optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)
model.train()
model.set_grad_checkpointing()
for _ in range(10):
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
slws.describe(model)
handle.remove()
slws.describe(model)
