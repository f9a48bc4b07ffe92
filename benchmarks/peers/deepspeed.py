"""DeepSpeed ZeRO stages 1 to 3, where it is installed.

Three settings of stages 1 and 2 and six of stage 3 (bucket sizes, overlap, contiguous gradients, persistence, lifetimes)
took turns on two gloo ranks. Every change tried had a median ratio below that of the defaults; among each other they differ
by less than the noise.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from benchmarks.peers.gpt import GPT, Config
from benchmarks.peers.provider import ADAMW, Batch, Provider, Step


def stage(number: int, clip: float = 0.0, **zero: Any) -> Provider:
    def make(config: Config) -> Step:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        model = GPT(config)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": config.batch,
                "gradient_clipping": clip,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,  # with offload it would compile an AdamW of its own
                "zero_optimization": {"stage": number, **zero},
            },
            dist_init_required=False,
        )

        def step(batch: Batch) -> float:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    options = ", ".join(f"{option}={value}" for option, value in zero.items())
    return Provider(f"DeepSpeed stage {number}", f"{options}, gradient_clipping={clip}, fused AdamW", make)


def installed() -> bool:
    """Whether it is here. The tests leave it out by WITHOUT_DEEPSPEED: it compiles an exchange of its own, for minutes."""
    return "WITHOUT_DEEPSPEED" not in os.environ and importlib.util.find_spec("deepspeed") is not None


def offloaded(clip: float) -> Provider:
    """ZeRO stage 2 with the optimizer's states and the update on the CPU, which is the device too."""
    return stage(2, clip, reduce_bucket_size=10**7, offload_optimizer={"device": "cpu"})


def providers() -> list[Provider]:
    if not installed():
        return []
    small = {"reduce_bucket_size": 10**7}
    # Its own linear would replace torch's in the whole process, and so slow the other providers down.
    whole = {"overlap_comm": False, "stage3_max_reuse_distance": 0, "memory_efficient_linear": False}
    return [
        stage(1, overlap_comm=False, contiguous_gradients=False),
        stage(2, **small),
        stage(3, **small, **whole),
    ]
