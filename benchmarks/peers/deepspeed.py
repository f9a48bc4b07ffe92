"""DeepSpeed ZeRO stages 1 to 3, where it is installed."""

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

    return Provider(f"DeepSpeed stage {number}", f"{zero or 'defaults'}, fused AdamW", make)


def providers() -> list[Provider]:
    if importlib.util.find_spec("deepspeed") is None:
        return []
    return [stage(number) for number in (1, 2, 3)]
