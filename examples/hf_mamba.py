"""SLWS on Hugging Face's MambaModel, here under a language model's head."""

import torch
from transformers import MambaConfig, MambaForCausalLM

import slws

model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=4))
# Its scan reads one way, so a shuffled layer sees the future: meant for encoders and classifiers, shown on a language
# model because that is what the library has. Padding is masked by position, and the mask moves along.
handle = slws.attach_slws(model, rate=0.5)

model.train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
ids, mask = torch.randint(64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
mask[1, :4] = 0
for _ in range(10):
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
slws.describe(model)

model.eval()  # decoding with a cache: SLWS is not there
assert model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=3, do_sample=False).shape == (1, 15)
