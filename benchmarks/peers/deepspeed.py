"""DeepSpeed ZeRO stages 1 to 3, where it is installed.

Of three settings of stage 2 and five of stage 3 (buckets, overlap, prefetch, lifetimes), those below took the least
processor time on two gloo ranks: large contiguous buffers cost a page fault per page in every step. Stage 1 is set
like stage 2.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from benchmarks.model import GPT, Config
from benchmarks.provider import ADAMW, Batch, Provider, Step


def stage(number: int, **zero: Any) -> Provider:
    def make(config: Config) -> Step:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        model = GPT(config)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": config.batch,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
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
    return Provider(f"DeepSpeed stage {number}", f"{options}, gradient_clipping=0.0, fused AdamW", make)


def providers() -> list[Provider]:
    if importlib.util.find_spec("deepspeed") is None:
        return []
    plain = {"overlap_comm": False, "contiguous_gradients": False}
    return [stage(1, **plain), stage(2, **plain), stage(3, **plain, stage3_prefetch_bucket_size=0)]
