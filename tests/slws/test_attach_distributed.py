"""DDP and FSDP2 over two processes on the CPU; attach_ranks.py says what is checked."""

import socket

import attach_ranks
import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo")
def test_two_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(attach_ranks.main, (port,), nprocs=2)
