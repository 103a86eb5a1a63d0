"""What each of two processes runs for test_attach_distributed.py."""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
from attach_models import Stack
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import slws


class Saving(Stack):
    saving = None

    def forward(self, x):
        for layer in self.layers:
            x = self.saving(layer, x) if self.saving else layer(x)
        return x


def build():
    torch.manual_seed(0)
    model = Saving().train()
    return model, torch.randn(4, 11, 8, generator=torch.Generator().manual_seed(10 + dist.get_rank()))


def run(model, x, seed=5):
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def averaged(model, x, steps=1):
    """Gradients of a plain copy, averaged over the ranks by hand."""
    twin = copy.deepcopy(model)
    for step in range(steps):
        run(twin, x, 5 + step)
    for p in twin.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return [p.grad for p in twin.parameters()]


def equal_everywhere(tensor):
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor)
    return torch.equal(*both)


def ranks_draw_their_own():
    """Seeded alike, two ranks shuffle differently, unless told to share; what one rank draws has the right rate."""
    for per_rank in (True, False):
        model, _ = build()
        handle = slws.attach_slws(model, 0.5, schedule="constant", per_rank=per_rank)
        torch.manual_seed(1)
        with torch.no_grad():
            out = torch.stack([model(torch.ones(1, 11, 8).cumsum(1)) for _ in range(100)])
        assert equal_everywhere(out) is not per_rank
        measured = torch.tensor([s["measured"] for s in handle.stats().values()])
        assert ((measured - 0.5).abs() < 0.2).all()


def ddp_averages_gradients():
    for steps in (1, 3):
        model, x = build()
        slws.attach_slws(model, 0.8, schedule="constant")
        wanted = averaged(model, x, steps)
        ddp = DistributedDataParallel(model)
        for step in range(steps):
            if step < steps - 1:
                with ddp.no_sync():
                    run(ddp, x, 5 + step)
            else:
                run(ddp, x, 5 + step)
        for p, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, want)


def fsdp2_shards():
    """Attached before or after sharding, with checkpoints and without, trains as the plain copy does."""
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for attach_first, saving in ((True, None), (False, None), (False, recompute), (True, recompute)):
        model, x = build()
        keys = list(model.state_dict())
        model.saving = saving
        plain = copy.deepcopy(model)
        plain.saving = None
        slws.attach_slws(plain, 0.8, schedule="constant")
        wanted, loss = averaged(plain, x), run(plain, x)
        if attach_first:
            handle = slws.attach_slws(model, 0.8, schedule="constant")
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        if not attach_first:
            handle = slws.attach_slws(model, 0.8, schedule="constant")
        assert run(model, x) == loss
        for p, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), want)
        assert list(model.state_dict()) == keys
        assert sum(s["shuffled"] for s in handle.stats().values()) > 0
        handle.remove()
        run(model, x)


def main(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        ranks_draw_their_own()
        ddp_averages_gradients()
        fsdp2_shards()
    finally:
        dist.destroy_process_group()
    # All is checked. After FSDP2 on gloo the interpreter's own end aborts now and then, on a thread of torch's.
    os._exit(0)
